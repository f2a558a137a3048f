"""Micro-batches chosen by hand through the trainer itself, at any layout: what each token was given, and its loss.

All of them are the micro-batches of one step, so that one start of the ranks serves every case.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness.training import Layout, Run, train
from wlb.data.collate import padded_lengths
from wlb.documents import Document, MicroBatch
from wlb.sharding import Sharding, ShardPlan

Piece = tuple[int, int, int]
RECORDED = ("tokens", "labels", "positions", "mask", "losses")
FAULTS = ("leak", "local positions", "labels rolled")


@dataclass(frozen=True, kw_only=True)
class Pack:
    """One micro-batch.

    pieces: (sequence, start, length) of its documents. sharder: divides it over context-parallel ranks.
    padding_token: what padding is made of. pad_unit: tokens of a shard are a multiple of it, as FP8 asks.
    fault: one of FAULTS, made on purpose.
    """

    pieces: tuple[Piece, ...]
    sharder: str = "per_sequence"
    padding_token: int = 0
    pad_unit: int = 1
    fault: str | None = None

    @property
    def micro_batch(self) -> MicroBatch:
        return MicroBatch(
            documents=tuple(
                Document(doc_id=i, length=length, arrival=0, sequence=sequence, start=start)
                for i, (sequence, start, length) in enumerate(self.pieces)
            )
        )

    def plan(self, cp_size: int, pad_to_multiple: int) -> ShardPlan:
        """The padding at the tail is a last document."""
        lengths = padded_lengths(self.micro_batch, pad_to_multiple * self.pad_unit)
        return Sharding(name=self.sharder, cp_size=cp_size).plan(lengths)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One micro-batch as all ranks saw it, in the order of the pack.

    plan: how it was divided. table_tokens: rows of the RoPE table that ranks asked for.
    tokens, labels, positions, mask, losses: (T,) of every token, padding included.
    rank_tokens: trained tokens that each context-parallel rank counted.
    """

    plan: ShardPlan
    table_tokens: int
    rank_tokens: tuple[int, ...]
    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    mask: np.ndarray
    losses: np.ndarray

    def documents(self, values: np.ndarray) -> list[np.ndarray]:
        """(T,) -> of each segment; the padding, if any, is the last."""
        return np.split(values, np.cumsum(self.plan.lengths)[:-1])


def run_packs(
    packs: Sequence[Pack], folder: Path, args: Sequence[Any], *, layout: Layout
) -> tuple[Run, list[Measured]]:
    """Train one step whose micro-batches are `packs`. `folder` is written to."""
    folder.mkdir()
    run = train(args, layout=layout, iterations=1, sabotage=partial(_choose, folder, tuple(packs)))
    return run, [_read(folder, number, layout.cp) for number in range(len(packs))]


def _read(folder: Path, number: int, cp_size: int) -> Measured:
    ranks = [np.load(folder / f"{number}-{rank}.npz") for rank in range(cp_size)]
    lengths = tuple(ranks[0]["lengths"].tolist())
    plan = ShardPlan.from_table(ranks[0]["plan"], lengths=lengths, cp_size=cp_size)
    (table_tokens,) = {int(r["table_tokens"]) for r in ranks}
    return Measured(
        plan=plan,
        table_tokens=table_tokens,
        rank_tokens=tuple(int(r["num_tokens"]) for r in ranks),
        **{name: np.concatenate([r[name] for r in ranks])[plan.restore] for name in RECORDED},
    )


def _choose(folder: Path, packs: tuple[Pack, ...], undo: ExitStack) -> None:
    """A sabotage of `train`: every step trains `packs`, and the last stage writes down what it saw."""
    import torch
    from megatron.training.global_vars import get_args

    from megatron.wlb import batch, step
    from megatron.wlb.data_provider import pad_multiple
    from megatron.wlb.parallel import ParallelDims
    from megatron.wlb.patches.registry import replace

    micro_batches = tuple(p.micro_batch for p in packs)
    number_of = {id(m): number for number, m in enumerate(micro_batches)}
    begin_step, collate = batch.PackedSteps.begin_step, batch.collate
    describe, on_device, masked_loss = batch.packed_seq_params, batch.batch_on_device, step.masked_loss

    def begin_chosen(self: Any) -> Any:
        planned, args = begin_step(self), get_args()
        plans = tuple(p.plan(args.context_parallel_size, pad_multiple(args)) for p in packs)
        self._step = changed(planned, micro_batches=micro_batches, shard_plans=plans)
        return self._step

    def collate_chosen(micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        pack = packs[number_of[id(micro_batch)]]
        packed = collate(micro_batch, *args, **(kwargs | {"padding_token": pack.padding_token}))
        if pack.fault == "labels rolled":
            packed = changed(packed, labels=np.roll(packed.tokens, -1))
        return packed

    def describe_chosen(micro_batch: Any, plan: Any, cp_rank: int, *, position_ids: Any, **kwargs: Any) -> Any:
        pack = packs[number_of[id(micro_batch)]]
        if pack.fault == "leak":
            assert pack.sharder == "per_sequence", "it cuts one document as it cuts the pack"
            plan = Sharding(name="per_sequence", cp_size=plan.cp_size).plan((plan.num_tokens,))
        elif pack.fault == "local positions":
            position_ids = torch.arange(len(position_ids))
        return describe(micro_batch, plan, cp_rank, position_ids=position_ids, **kwargs)

    def on_device_chosen(micro_batch: Any, packed: Any, plan: Any, cp_rank: int, **kwargs: Any) -> Any:
        made = on_device(micro_batch, packed, plan, cp_rank, **kwargs)
        made["loss_mask"].seen = (number_of[id(micro_batch)], packed, plan, made["packed_seq_params"].max_seqlen_q)
        return made

    def masked_loss_seen(loss_mask: Any, output: Any) -> Any:
        total, num_tokens, reported = masked_loss(loss_mask, output)
        number, packed, plan, table_tokens = loss_mask.seen
        here = ParallelDims.current()
        if here.tp_rank == 0:
            np.savez(
                folder / f"{number}-{here.cp_rank}.npz",
                plan=plan.table,
                lengths=np.array(plan.lengths),
                table_tokens=table_tokens,
                num_tokens=int(num_tokens),
                tokens=packed.tokens,
                labels=packed.labels,
                positions=packed.position_ids,
                mask=loss_mask[0].numpy(),
                losses=output.detach()[0].numpy(),
            )
        return total, num_tokens, reported

    replace(undo, batch.PackedSteps, "begin_step", begin_chosen)
    replace(undo, batch, "collate", collate_chosen)
    replace(undo, batch, "packed_seq_params", describe_chosen)
    replace(undo, batch, "batch_on_device", on_device_chosen)
    replace(undo, step, "masked_loss", masked_loss_seen)
