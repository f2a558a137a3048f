"""Stopped at any step and resumed, a packed run trains the very documents that an unbroken run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.training import Layout, Run, train

ITERATIONS = 8
PACKERS = {
    "plain": [],
    "makespan": ["--wlb-overhead-tokens", "2", "--wlb-crossover", "16"],
    "makespan+delay": [
        *("--wlb-overhead-tokens", "2", "--wlb-crossover", "16"),
        *("--wlb-max-delay-steps", "3", "--wlb-thresholds", "24", "40"),
    ],
    "makespan+replay": ["--wlb-overhead-tokens", "2", "--wlb-crossover", "16", "--wlb-max-delay-steps", "3"],
    "wlb+budget": ["--wlb-intake", "budget", "--wlb-max-delay-steps", "3", "--wlb-thresholds", "24", "40"],
    "two_stage": ["--wlb-overhead-tokens", "2", "--wlb-crossover", "16"],
    "greedy": ["--wlb-greedy-window", "2"],
    "wlb": ["--wlb-thresholds", "24", "40"],
}


def _ledger(path: Path) -> dict[int, Any]:
    """Step -> documents; where a step was planned twice, the later line counts."""
    return {row["step"]: row["replicas"] for row in map(json.loads, path.read_text().splitlines())}


def _run(packer: str, data: Path, folder: Path, layout: Layout, *more: Any) -> tuple[Run, dict[int, Any]]:
    ledger = folder / "ledger.jsonl"
    args = [
        "--data-path",
        data,
        "--split",
        "100,0,0",
        "--wlb-packing",
        packer.partition("+")[0],
        *PACKERS[packer],
        "--wlb-ledger",
        ledger,
    ]
    run = train([*args, *more], layout=layout, iterations=ITERATIONS)
    return run, _ledger(ledger)


# A packer's state is what resume is about: layouts add little to it, so most of them run with the slow tests.
CASES = [
    pytest.param(
        packer,
        layout,
        id=f"{packer}-{layout}",
        marks=[] if layout.pp == 2 and packer in ("plain", "wlb", "makespan+delay") else pytest.mark.slow,
    )
    for packer in sorted(PACKERS)
    for layout in (Layout(pp=2), Layout(dp=2), Layout(cp=2))
]


@pytest.mark.parametrize(("packer", "layout"), CASES)
def test_losses_and_documents_equal_an_unbroken_run(
    packer: str, layout: Layout, toy_data: Path, tmp_path: Path
) -> None:
    unbroken, planned = _run(packer, toy_data, tmp_path / "unbroken", layout)
    assert sorted(planned) == list(range(ITERATIONS))
    documents = [tuple(d) for step in planned.values() for replica in step for m in replica for d in m]
    assert len(documents) == len(set(documents)) > 100

    stops = (3, 5)  # steps at which queues, carried documents and looked-ahead micro-batches are not empty
    folder = tmp_path / "broken"
    losses: list[float] = []
    for stop in (*stops, ITERATIONS):
        saving = ["--save", folder, "--save-interval", stop, "--load", folder]
        run, replanned = _run(packer, toy_data, folder, layout, *saving, "--exit-interval", stop)
        losses += run.losses
    assert losses == pytest.approx(unbroken.losses, rel=1e-6)
    assert replanned == planned


@pytest.mark.parametrize("packer", ["wlb", "wlb+budget", "makespan+delay"])
def test_what_waits_at_a_stop_is_saved(packer: str, toy_data: Path, tmp_path: Path) -> None:
    """The case that resume is about: at the stop, documents wait in the queues."""
    import torch

    _run(packer, toy_data, tmp_path, Layout(), "--save", tmp_path, "--save-interval", 3, "--exit-interval", 3)
    (path,) = tmp_path.glob("iter_0000003/*/train_dataloader_dprank000.pt")
    state = torch.load(path, weights_only=True)["dataloader_state_dict"]["train"]["packer_state"]
    assert state["step"] == 3
    assert sum(map(len, state["queues"])) > 0


def test_a_checkpoint_of_another_corpus_is_refused(toy_data: Path, tmp_path: Path) -> None:
    from tests.harness.data import learnable_documents, write_index
    from tests.harness.processes import RankFailure

    saving = ["--save", tmp_path, "--save-interval", 3]
    _run("wlb", toy_data, tmp_path, Layout(), *saving, "--exit-interval", 3)
    other = write_index(tmp_path / "other", learnable_documents(count=1500, seed=8, longest=200))
    with pytest.raises(RankFailure, match=r"StateError.*saved 2000.*1500"):
        _run("wlb", other, tmp_path, Layout(), "--load", tmp_path)


def test_a_stock_checkpoint_starts_the_stream_at_its_beginning(toy_data: Path, tmp_path: Path) -> None:
    """Moving a running job to packing: weights and iteration go on, and the start says where documents begin."""
    train(["--mock-data", "--save", tmp_path, "--save-interval", "2"], iterations=2)
    run, planned = _run("plain", toy_data, tmp_path, Layout(), "--load", tmp_path, "--override-opt_param-scheduler")
    assert "no packing state of iteration 2" in run.log
    assert len(run.losses) == ITERATIONS - 2
    assert sorted(planned) == list(range(ITERATIONS - 2))


@pytest.mark.parametrize("packer", ["makespan", "wlb"])
def test_another_layout_goes_on_with_the_same_documents(packer: str, toy_data: Path, tmp_path: Path) -> None:
    """A job restarted on other ranks: 1 process, then PP 2, then DP 2, and CP 2 between where it changes no document.

    What a document costs depends on the context-parallel ranks, and so does what packer wlb carries over.
    """
    _, planned = _run(packer, toy_data, tmp_path / "unbroken", Layout())
    folder = tmp_path / "moved"
    between = [(7, Layout(cp=2))] if packer == "makespan" else []
    for stop, layout in ((3, Layout()), (5, Layout(pp=2)), *between, (ITERATIONS, Layout(dp=2))):
        saving = ["--save", folder, "--save-interval", stop, "--load", folder, "--no-load-rng"]
        _, moved = _run(packer, toy_data, folder, layout, *saving, "--exit-interval", stop)
    assert {step: sorted(_documents(plan)) for step, plan in moved.items()} == {
        step: sorted(_documents(plan)) for step, plan in planned.items()
    }


def _documents(plan: Any) -> list[tuple[int, ...]]:
    return [tuple(d) for replica in plan for micro_batch in replica for d in micro_batch]
