"""The same documents give the same losses and gradients, however ranks divide the work."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness.training import Layout, Run, train
from wlb.packing import PACKERS

LAYOUTS = [
    Layout(dp=2),
    Layout(tp=2),
    Layout(pp=2),
    Layout(pp=4),
    Layout(tp=2, pp=2),
]
ITERATIONS = 10
# What a micro-batch costs beside its tokens must be small for a window of 64, or these would never make more.
OPTIONS = {name: ["--wlb-overhead-tokens", "2", "--wlb-crossover", "16"] for name in ("makespan", "two_stage")}
RELATIVE = 1e-5


def _packed(packer: str, data: Path, start: Path) -> list[Any]:
    return [
        *("--data-path", data, "--split", "100,0,0", "--wlb-packing", packer, "--wlb-document-cut", "stream"),
        *OPTIONS.get(packer, []),
        *("--load", start, "--finetune", "--no-load-optim", "--no-load-rng"),
    ]


@pytest.fixture(scope="module")
def one_process(toy_data: Path, start_checkpoint: Path) -> dict[str, Run]:
    return {packer: train(_packed(packer, toy_data, start_checkpoint), iterations=ITERATIONS) for packer in PACKERS}


CASES = [
    pytest.param(
        layout,
        packer,
        id=f"{layout}-{packer}",
        marks=[]
        if layout.world_size == 2 and (packer in ("plain", "makespan") or layout.pp == 2)
        else pytest.mark.slow,
    )
    for layout in LAYOUTS
    for packer in sorted(PACKERS)
]


@pytest.mark.parametrize(("layout", "packer"), CASES)
def test_losses_and_gradient_norms_equal_one_process(
    layout: Layout, packer: str, toy_data: Path, start_checkpoint: Path, one_process: dict[str, Run]
) -> None:
    run = train(_packed(packer, toy_data, start_checkpoint), layout=layout, iterations=ITERATIONS)
    assert len(run.losses) == ITERATIONS
    assert run.losses == pytest.approx(one_process[packer].losses, rel=RELATIVE)
    assert run.grad_norms == pytest.approx(one_process[packer].grad_norms, rel=RELATIVE)


def _wrong_positions(undo: ExitStack) -> None:
    """Positions counted from the other end of the pack."""
    from megatron.wlb import batch
    from megatron.wlb.patches.registry import replace

    original = batch.packed_seq_params

    def backwards(*args: Any, position_ids: Any, **kwargs: Any) -> Any:
        return original(*args, position_ids=position_ids.flip(0), **kwargs)

    replace(undo, batch, "packed_seq_params", backwards)


def _leak_between_documents(undo: ExitStack) -> None:
    """One segment for the whole pack."""
    from megatron.wlb import core_attention
    from megatron.wlb.patches.registry import replace
    from wlb.sharding.plan import unsharded

    original = core_attention.sharded_attention

    def leaking(query: Any, key: Any, value: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        return original(query, key, value, unsharded((plan.num_tokens,)), *args, **kwargs)

    replace(undo, core_attention, "sharded_attention", leaking)


def _rolled_labels(undo: ExitStack) -> None:
    """Labels rolled over the pack: a document's last position is taught the next document's first token."""
    from dataclasses import replace as changed

    import numpy as np

    from megatron.wlb import batch
    from megatron.wlb.patches.registry import replace

    original = batch.collate

    def rolled(*args: Any, **kwargs: Any) -> Any:
        packed = original(*args, **kwargs)
        return changed(packed, labels=np.roll(packed.tokens, -1))

    replace(undo, batch, "collate", rolled)


@pytest.mark.parametrize("sabotage", [_wrong_positions, _leak_between_documents, _rolled_labels])
@pytest.mark.parametrize(
    "layout",
    [Layout(), *(pytest.param(wide, marks=pytest.mark.slow if wide.world_size > 2 else []) for wide in LAYOUTS)],
    ids=str,
)
def test_the_comparison_sees_what_it_must(
    layout: Layout, sabotage: Any, toy_data: Path, start_checkpoint: Path, one_process: dict[str, Run]
) -> None:
    """The control beside each layout: a fault that packing can have moves the loss far beyond the tolerance."""
    run = train(_packed("wlb", toy_data, start_checkpoint), layout=layout, iterations=1, sabotage=sabotage)
    assert abs(run.losses[0] / one_process["wlb"].losses[0] - 1) > 100 * RELATIVE
