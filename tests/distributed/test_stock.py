"""With none of our flags a run is Megatron's: the same losses as its own data set and batches, used directly."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.training import Layout, train

ITERATIONS = 5


def _use_megatron_core_directly(undo: ExitStack) -> None:
    """Replace our provider and forward step by the shortest use of megatron.core's classes that trains."""
    import torch

    from megatron.wlb import stock
    from megatron.wlb.patches.registry import replace

    def provider(args: Any) -> Any:
        def provide(sizes: Any, vp_stage: int | None = None) -> Any:
            from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
            from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
            from megatron.core.datasets.utils import get_blend_from_list
            from megatron.training.global_vars import get_tokenizer

            config = GPTDatasetConfig(
                random_seed=args.seed,
                sequence_length=args.seq_length,
                blend=get_blend_from_list(args.data_path),
                split=args.split,
                path_to_cache=args.data_cache_path,
                tokenizer=get_tokenizer(),
                reset_position_ids=False,
                reset_attention_mask=False,
                eod_mask_loss=False,
            )
            return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()

        return provide

    def loss_of(mask: Any, losses: Any) -> Any:
        total = (losses.float().view(-1) * mask.view(-1)).sum()
        count = mask.sum()
        return total, count.to(torch.int), {"lm loss": torch.stack([total.detach(), count])}

    def forward_step(args: Any) -> Any:
        def step(iterator: Any, model: Any) -> Any:
            sample = next(iterator)
            losses = model(sample["tokens"], sample["position_ids"], sample["attention_mask"], labels=sample["labels"])
            return losses, partial(loss_of, sample["loss_mask"])

        return step

    replace(undo, stock, "dataset_provider", provider)
    replace(undo, stock, "forward_step", forward_step)


@pytest.fixture
def stock_args(toy_data: Path, tmp_path: Path) -> list[Any]:
    return ["--data-path", toy_data, "--split", "90,10,0", "--data-cache-path", tmp_path / "cache"]


def test_losses_equal_direct_use_of_megatron_core(stock_args: list[Any]) -> None:
    ours = train(stock_args, iterations=ITERATIONS)
    theirs = train(stock_args, iterations=ITERATIONS, sabotage=_use_megatron_core_directly)
    assert len(ours.losses) == ITERATIONS
    assert ours.losses == theirs.losses
    assert ours.grad_norms == theirs.grad_norms
    other_seed = train([*stock_args, "--seed", "4321"], iterations=1)
    assert other_seed.losses[0] != ours.losses[0]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--bf16"], id="bf16"),
        pytest.param(["--calculate-per-token-loss"], id="per-token-loss"),
        pytest.param(["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"], id="resets"),
    ],
)
@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(dp=2, tp=2), Layout(dp=2, pp=2)],
    ids=str,
)
def test_megatron_trains_on_the_cpu(layout: Layout, options: list[str], stock_args: list[Any]) -> None:
    run = train([*stock_args, *options], layout=layout, iterations=ITERATIONS)
    assert len(run.losses) == ITERATIONS
    assert run.losses[-1] < run.losses[0]
    assert all(norm > 0 for norm in run.grad_norms)


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["float32", "bf16"])
def test_stock_checkpoint_resumes(precision: list[str], stock_args: list[Any], tmp_path: Path) -> None:
    """Stopped and resumed, weights, moments and data go on: losses equal an unbroken run's."""
    args, layout = [*stock_args, *precision], Layout(pp=2)
    unbroken = train(args, layout=layout, iterations=6)
    saving = [*args, "--save", tmp_path / "save", "--save-interval", "3"]
    train([*saving, "--exit-interval", "3"], layout=layout, iterations=6, writer_process=True)
    resumed = train([*saving, "--load", tmp_path / "save"], layout=layout, iterations=6)
    assert resumed.losses == pytest.approx(unbroken.losses[3:], rel=1e-6)
    assert resumed.grad_norms == pytest.approx(unbroken.grad_norms[3:], rel=1e-5)
