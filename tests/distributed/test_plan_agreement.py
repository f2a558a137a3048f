"""Ranks that hold different plans stop with a sentence; they never hang."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import RankFailure
from tests.harness.training import Layout, train


def _rank_one_shuffles_otherwise(undo: ExitStack) -> None:
    from megatron.wlb import data_provider
    from megatron.wlb.patches.registry import replace

    original = data_provider.ProcessSource

    def source(spec: Any, **kwargs: Any) -> Any:
        return original(changed(spec, seed=spec.seed + int(os.environ["RANK"])), **kwargs)

    replace(undo, data_provider, "ProcessSource", source)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2), Layout(tp=2), Layout(cp=2)], ids=str)
def test_ranks_that_differ_are_named_with_the_document(layout: Layout, toy_data: Path) -> None:
    args = ["--data-path", toy_data, "--split", "100,0,0", "--wlb-packing", "plain"]
    sentence = (
        r"PlanMismatchError: ranks \[1\] planned step 0 otherwise than rank 0; the first difference is document \d+ "
        r"\(sequence \d+, \d+ tokens from \d+\) in micro-batch 0 of replica 0 on rank 1, document \d+ .* on rank 0"
    )
    with pytest.raises(RankFailure, match=sentence):
        train(args, layout=layout, iterations=2, sabotage=_rank_one_shuffles_otherwise, timeout_s=40)
