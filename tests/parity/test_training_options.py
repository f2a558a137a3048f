"""Options of Megatron's that change how a packed step is computed, not what it computes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron.wlb.environment import package_sentences
from tests.harness.training import Layout, Run, train

ITERATIONS = 4
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def packed(toy_data: Path, start_checkpoint: Path) -> list[Any]:
    return [
        *("--data-path", toy_data, "--split", "100,0,0", "--wlb-packing", "wlb"),
        *("--load", start_checkpoint, "--finetune", "--no-load-optim", "--no-load-rng"),
    ]


@pytest.fixture(scope="module")
def usual(packed: list[Any]) -> Run:
    return train(packed, iterations=ITERATIONS)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["selective", "--recompute-modules", "core_attn"], id="core-attention"),
        pytest.param(["full", "--recompute-method", "uniform", "--recompute-num-layers", "1"], id="full-uniform"),
        pytest.param(["full", "--recompute-method", "block", "--recompute-num-layers", "2"], id="full-block"),
    ],
)
def test_recomputed_activations_give_the_same_run(options: list[str], packed: list[Any], usual: Run) -> None:
    run = train([*packed, "--recompute-granularity", *options], iterations=ITERATIONS)
    assert len(run.losses) == ITERATIONS
    assert run.losses == pytest.approx(usual.losses, rel=1e-6)
    assert run.grad_norms == pytest.approx(usual.grad_norms, rel=1e-6)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, pp=2)], ids=str)
def test_sequence_parallelism_gives_the_same_run(layout: Layout, packed: list[Any], usual: Run) -> None:
    run = train([*packed, "--sequence-parallel"], layout=layout, iterations=ITERATIONS)
    assert len(run.losses) == ITERATIONS
    assert run.losses == pytest.approx(usual.losses, rel=RELATIVE)
    assert run.grad_norms == pytest.approx(usual.grad_norms, rel=RELATIVE)


def test_start_up_says_which_packages_were_found(usual: Run) -> None:
    for sentence in package_sentences():
        assert usual.log.count(f"> {sentence}\n") == 1


def _unmarked_norms(undo: ExitStack) -> None:
    """Norms without the mark by which sequence parallelism sums their gradients."""
    from megatron.wlb import cpu
    from megatron.wlb.patches.registry import replace

    original = cpu._replace_norm

    def unmarked(stack: ExitStack) -> None:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        original(stack)
        marking = WrappedTorchNorm.__new__

        def make_norm(*args: Any, **kwargs: Any) -> Any:
            norm = marking(*args, **kwargs)
            for parameter in norm.parameters():
                parameter.sequence_parallel = False
            return norm

        replace(stack, WrappedTorchNorm, "__new__", make_norm)

    replace(undo, cpu, "_replace_norm", unmarked)


def test_the_comparison_sees_norm_gradients_that_are_not_summed(packed: list[Any], usual: Run) -> None:
    run = train([*packed, "--sequence-parallel"], layout=Layout(tp=2), iterations=2, sabotage=_unmarked_norms)
    assert abs(run.grad_norms[0] / usual.grad_norms[0] - 1) > 100 * RELATIVE
