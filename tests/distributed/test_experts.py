"""Mixtures of experts: replicas that exchange tokens in every micro-batch run equally many of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.training import Layout, train

ITERATIONS = 5
EXPERTS = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-router-load-balancing-type", "aux_loss", "--disable-bias-linear"),
]
MAKESPAN = ["--wlb-packing", "makespan", "--wlb-overhead-tokens", "2", "--wlb-crossover", "16"]


def _train(layout: Layout, data: Path, *more: Any) -> Any:
    return train(["--data-path", data, "--split", "100,0,0", *EXPERTS, *more], layout=layout, iterations=ITERATIONS)


def test_expert_parallel_replicas_run_equal_counts(toy_data: Path, tmp_path: Path) -> None:
    """Without auxiliary loss a token's gradient does not depend on its micro-batch: losses equal plain's."""
    parallel = ["--expert-model-parallel-size", "2", "--moe-aux-loss-coeff", "0"]
    plain = _train(Layout(dp=2), toy_data, *parallel, "--wlb-packing", "plain")
    exact = _train(Layout(dp=2), toy_data, *parallel, *MAKESPAN, "--wlb-ledger", tmp_path / "ledger")
    assert len(exact.losses) == ITERATIONS
    assert exact.losses == pytest.approx(plain.losses, rel=1e-5)
    assert exact.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)
    counts = [
        [len(replica) for replica in json.loads(line)["replicas"]]
        for line in (tmp_path / "ledger").read_text().splitlines()
    ]
    assert all(len(set(step)) == 1 for step in counts)
    assert any(step != [4, 4] for step in counts), f"some step must run another number than plain's 4, got {counts}"


def test_logged_auxiliary_loss_is_a_mean_over_the_micro_batches_run(toy_data: Path) -> None:
    """A perfectly even router has 1 whatever the number of micro-batches; ours stays near it, as plain's does."""
    logged = {}
    for name, packing in {"plain": ["--wlb-packing", "plain"], "makespan": MAKESPAN}.items():
        run = _train(Layout(pp=2), toy_data, "--moe-aux-loss-coeff", "1e-2", *packing)
        (first, *_) = re.findall(r"load_balancing_loss: ([0-9.E+-]+)", run.log)
        logged[name] = float(first)
    (count, *_) = re.findall(r"\| micro-batches: (\d+) \|", run.log)
    assert int(count) >= 10, "the first step must run many more than plain's 8, or nothing is tested"
    assert logged["makespan"] == pytest.approx(logged["plain"], rel=0.1)
