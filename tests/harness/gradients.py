"""Gradients of a training run in float64: what layouts and packings that train the same documents must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.harness.training import Layout, train


def in_float64(undo: ExitStack) -> None:
    """Weights, activations, loss and gradients in float64, through Megatron's own loop: a sabotage of `train`."""
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


def summed_gradients(
    folder: Path, args: Sequence[Any], *, layout: Layout, iterations: int
) -> dict[str, dict[str, Any]]:
    """File of a rank and step -> parameter -> gradient, summed over the ranks that share the parameter.

    folder: written to; args start from a checkpoint.
    """
    import torch

    train(
        [
            *args,
            *("--save", folder, "--save-interval", "1000", "--save-wgrads-interval", "1"),
            *("--clip-grad", "0"),  # it takes float32 only
        ],
        layout=layout,
        iterations=iterations,
        sabotage=in_float64,
    )
    return {
        f"{path.parent.name}/{path.name}": {
            name: gradient for chunk in torch.load(path, weights_only=True).values() for name, gradient in chunk.items()
        }
        for path in sorted(folder.glob("wgrads/*/*.pth"))
    }
