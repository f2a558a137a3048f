"""Exact mode: makespan trains what plain trains in every step, so gradients are equal to rounding."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness.training import Layout, train

ITERATIONS = 3
LAYOUT = Layout(pp=2, dp=2)
MAKESPAN = ["--wlb-packing", "makespan", "--wlb-overhead-tokens", "2", "--wlb-crossover", "16"]


def _in_float64(undo: ExitStack) -> None:
    """Weights, activations, loss and gradients in float64, through Megatron's own loop."""
    import torch
    from megatron.training import argument_utils

    from megatron.wlb.patches.registry import replace

    # Norms take the default type, not the configured one.
    torch.set_default_dtype(torch.float64)
    undo.callback(torch.set_default_dtype, torch.float32)
    original = argument_utils.core_transformer_config_from_args

    def config_of(args: Any, config_class: Any = None) -> Any:
        args.params_dtype = torch.float64
        return original(args, config_class)

    replace(undo, argument_utils, "core_transformer_config_from_args", config_of)
    replace(undo, torch.Tensor, "float", torch.Tensor.double)


def _gradients(folder: Path, data: Path, start: Path, packing: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Summed gradients by step, rank and parameter, and the plans."""
    import torch

    ledger = folder / "ledger.jsonl"
    train(
        [
            *("--data-path", data, "--split", "100,0,0", *packing, "--wlb-ledger", ledger),
            *("--load", start, "--finetune", "--no-load-optim", "--no-load-rng"),
            *("--save", folder, "--save-interval", "1000", "--save-wgrads-interval", "1"),
            *("--clip-grad", "0"),  # it takes float32 only
        ],
        layout=LAYOUT,
        iterations=ITERATIONS,
        sabotage=_in_float64,
    )
    gradients = {
        f"{path.parent.name}/{path.name}/{name}": gradient
        for path in sorted(folder.glob("wgrads/*/*.pth"))
        for chunk in torch.load(path, weights_only=True).values()
        for name, gradient in chunk.items()
    }
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
