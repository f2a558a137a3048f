"""Exact mode: makespan trains what plain trains in every step, so gradients are equal to rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.gradients import summed_gradients
from tests.harness.training import Layout, train

ITERATIONS = 3
LAYOUT = Layout(pp=2, dp=2)
MAKESPAN = ["--wlb-packing", "makespan", "--wlb-overhead-tokens", "2", "--wlb-crossover", "16"]


def _gradients(folder: Path, data: Path, start: Path, packing: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Summed gradients by step, rank and parameter, and the plans."""
    ledger = folder / "ledger.jsonl"
    files = summed_gradients(
        folder,
        [
            *("--data-path", data, "--split", "100,0,0", *packing, "--wlb-ledger", ledger),
            *("--load", start, "--finetune", "--no-load-optim", "--no-load-rng"),
        ],
        layout=LAYOUT,
        iterations=ITERATIONS,
    )
    gradients = {f"{file}/{name}": gradient for file, named in files.items() for name, gradient in named.items()}
    return gradients, [json.loads(line)["replicas"] for line in ledger.read_text().splitlines()]


def test_summed_gradients_equal_plain(toy_data: Path, start_checkpoint: Path, tmp_path: Path) -> None:
    import torch

    plain, plain_plans = _gradients(tmp_path / "plain", toy_data, start_checkpoint, ["--wlb-packing", "plain"])
    exact, exact_plans = _gradients(tmp_path / "exact", toy_data, start_checkpoint, MAKESPAN)
    assert len(plain) == len(exact) > ITERATIONS * 2 * 10
    for plain_step, exact_step in zip(plain_plans, exact_plans, strict=True):
        assert plain_step != exact_step
        assert sorted(_documents(plain_step)) == sorted(_documents(exact_step))
    counts = [[len(replica) for replica in step] for step in exact_plans]
    assert any(a != b for a, b in counts), f"counts must differ between replicas in some step, got {counts}"
    for name, gradient in plain.items():
        assert gradient.dtype == torch.float64
        error = (gradient - exact[name]).norm() / gradient.norm()
        assert error < 1e-12, f"{name}: {error}"


def test_losses_and_gradient_norms_equal_plain(toy_data: Path, start_checkpoint: Path) -> None:
    args = [
        *("--data-path", toy_data, "--split", "100,0,0"),
        *("--load", start_checkpoint, "--finetune", "--no-load-optim", "--no-load-rng"),
    ]
    plain = train([*args, "--wlb-packing", "plain"], layout=LAYOUT, iterations=10)
    exact = train([*args, *MAKESPAN], layout=LAYOUT, iterations=10)
    assert exact.losses == pytest.approx(plain.losses, rel=1e-5)
    assert exact.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)


def _documents(step: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(document) for replica in step for micro_batch in replica for document in micro_batch]
