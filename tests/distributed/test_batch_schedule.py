"""A batch size that grows: steps, samples and learning rate as in Megatron, for every packer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.training import Layout, Run, train
from wlb.packing import PACKERS

ITERATIONS = 8
WINDOW = 64
BATCHES = [2, 2, 4, 4, 8, 8, 8, 8]  # the schedule below, in windows a step
# In tokens: 4 windows in batches of 2, 8 in batches of 4, then batches of 8.
SCHEDULE = ["--step-batch-size-schedule", f"0:2 {4 * WINDOW}:4 {12 * WINDOW}:8"]
OPTIONS = {"makespan": ["--wlb-overhead-tokens", "2", "--wlb-crossover", "16"], "wlb": ["--wlb-thresholds", "40"]}


def _train(data: Path, packer: str, *more: Any) -> Run:
    args = ["--data-path", data, "--split", "100,0,0", "--wlb-packing", packer, *OPTIONS.get(packer, [])]
    return train(
        [*args, "--wlb-document-cut", "stream", *SCHEDULE, *more],
        layout=Layout(dp=2),
        iterations=ITERATIONS,
        without=("--global-batch-size",),
    )


def _documents(ledger: Path) -> list[list[tuple[int, ...]]]:
    rows = {row["step"]: row["replicas"] for row in map(json.loads, ledger.read_text().splitlines())}
    return [[tuple(d) for replica in rows[s] for m in replica for d in m] for s in sorted(rows)]


@pytest.mark.parametrize("packer", sorted(PACKERS))
def test_a_run_trains_the_documents_of_its_schedule(packer: str, toy_data: Path, tmp_path: Path) -> None:
    run = _train(toy_data, packer, "--wlb-ledger", tmp_path / "ledger")
    steps = _documents(tmp_path / "ledger")
    tokens = [sum(length for *_, length in step) for step in steps]
    assert len(steps) == ITERATIONS
    documents = [d for step in steps for d in step]
    assert len(documents) == len(set(documents))
    total = sum(BATCHES) * WINDOW
    if packer == "greedy":  # fixed length: what its gaps leave over is never drawn
        assert 0.9 * total <= sum(tokens) <= total
    else:
        assert sum(tokens) == total
    if packer in ("plain", "makespan", "two_stage"):
        assert tokens == [batch * WINDOW for batch in BATCHES]
    logged = [int(n) for n in re.findall(r"global batch size: +(\d+)", run.log)]
    assert logged == BATCHES
    assert re.findall(r"consumed samples: +(\d+)", run.log)[-1] == str(sum(BATCHES))


def test_resumed_inside_the_ramp(toy_data: Path, tmp_path: Path) -> None:
    unbroken = _train(toy_data, "makespan", "--wlb-ledger", tmp_path / "unbroken")
    saving = ["--save", tmp_path, "--save-interval", "3", "--load", tmp_path, "--wlb-ledger", tmp_path / "broken"]
    losses = _train(toy_data, "makespan", *saving, "--exit-interval", "3").losses
    losses += _train(toy_data, "makespan", *saving).losses
    assert losses == pytest.approx(unbroken.losses, rel=1e-6)
    assert _documents(tmp_path / "broken") == _documents(tmp_path / "unbroken")
