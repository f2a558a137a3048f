"""Micro-batches without documents, and whole steps of them, train nothing and break nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.harness.data import write_index
from tests.harness.training import Layout, train


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(dp=2), Layout(cp=2)], ids=str)
def test_a_step_in_which_everything_waits(layout: Layout, tmp_path: Path) -> None:
    """Every document is an outlier and no queue has filled: eight micro-batches of padding, no gradient, no NaN."""
    documents = [[(7 * i + j) % 120 for j in range(31 if i % 2 else 61)] for i in range(200)]
    prefix = write_index(tmp_path / "two_lengths", documents)
    args = ["--data-path", prefix, "--split", "100,0,0", "--wlb-packing", "wlb", "--wlb-thresholds", "20", "50"]
    run = train(args, layout=layout, iterations=5)
    (first, *_) = [line for line in run.log.splitlines() if "elapsed time per iteration" in line]
    assert "| tokens: 0 |" in first
    assert run.losses[0] == run.grad_norms[0] == 0
    assert all(math.isfinite(norm) for norm in run.grad_norms)
    assert all(math.isfinite(loss) for loss in run.losses)
    assert run.losses[-1] > 0
