"""Megatron's description of a packed sequence, carrying the plan by which it was made.

Extra fields of a subclass travel through the model untouched, but Transformer Engine is handed the fields of the base
class only, and RoPE nothing but `cu_seqlens`. So that tensor carries the plan as well: it is the same object wherever
it arrives, also when activations are recomputed, and nothing goes through a global.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from wlb.documents import MicroBatch
from wlb.errors import PlanLostError
from wlb.sharding import ShardPlan
from wlb.sharding.plan import unsharded

_ATTRIBUTE = "wlb_planned_rows"

# Tables of angles whose rows are kept. A model has one, and then all its layers share them; multi-latent attention has
# one a layer, of which each is used for queries and keys and not again before backward.
_KEPT_TABLES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRows:
    """Which tokens the rows of a tensor are.

    plan: of the micro-batch. cp_rank: whose rows.
    position_ids: (S,) position in its document of each row, on the device.
    """

    plan: ShardPlan
    cp_rank: int
    position_ids: torch.Tensor
    _angles: list[tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def angles(self, table: torch.Tensor) -> torch.Tensor:
        """(P, 1, 1, H) of all positions -> (S, 1, 1, H) of these rows, gathered once for a table.

        Queries and keys of all layers share one tensor, also where activations are recomputed: a table is known by its
        memory, for recompute hands on another object. That memory is kept meanwhile, so that no other table can get
        its place; both go with the micro-batch, or when more tables have come.
        """
        if table.requires_grad:
            return table[self.position_ids]
        for i, (known, angles) in enumerate(self._angles):
            if _is_same_memory(known, table):
                self._angles.append(self._angles.pop(i))
                return angles
        angles = table[self.position_ids]
        self._angles.append((table.detach(), angles))
        del self._angles[:-_KEPT_TABLES]
        return angles


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Both are alive, so equal addresses are one memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
    )


def mark_planned(cu_seqlens: torch.Tensor, rows: PlannedRows) -> None:
    """Let this very tensor (no copy or view of it) carry the plan."""
    setattr(cu_seqlens, _ATTRIBUTE, rows)


def planned_rows(cu_seqlens: torch.Tensor | None) -> PlannedRows | None:
    """What the tensor carries; None for one of another origin."""
    return getattr(cu_seqlens, _ATTRIBUTE, None)


def plan_lost(layer: str, name: str, found: object) -> PlanLostError:
    """The error of a layer whose calls must bring a plan.

    layer: who was called. name: of the argument that brings the plan. found: what came instead.
    """
    if isinstance(found, torch.Tensor):
        came = f"a tensor of shape {tuple(found.shape)} without one (a copy or a view of the tensor has none)"
    else:
        came = "None" if found is None else type(found).__name__
    return PlanLostError(f"{layer}: {name} must carry the plan of its micro-batch in a packed run, got {came}")


@dataclass
class PlannedPackedSeqParams(PackedSeqParams):
    """`PackedSeqParams` of a planned micro-batch: what the base class holds is of the whole pack, on every rank.

    micro_batch: its documents.
    plan: which context-parallel rank holds what, the padding at the tail as a last document of its own.
    cp_rank: of this process.
    """

    micro_batch: MicroBatch = field(default_factory=lambda: MicroBatch(documents=()))
    plan: ShardPlan = field(default_factory=lambda: unsharded(()))
    cp_rank: int = 0

    @property
    def segments(self) -> tuple[int, ...]:
        """Cumulative lengths of the whole pack, leading 0, padding included."""
        return tuple(accumulate(self.plan.lengths, initial=0))


def packed_seq_params(
    micro_batch: MicroBatch,
    plan: ShardPlan,
    cp_rank: int,
    *,
    position_ids: torch.Tensor,
    max_positions: int,
    cu_seqlens: torch.Tensor | None = None,
) -> PlannedPackedSeqParams:
    """Describe a packed micro-batch to Megatron's attention.

    Args:
        position_ids: (S,) position in its document of every token that `cp_rank` holds, on the device.
        max_positions: no document is longer; RoPE's table never has to be.
        cu_seqlens: (segments + 1,) int32 of the whole pack, on the device, and nobody else's; made here by default.

    `max_seqlen` is the longest segment rounded up to a power of two: Megatron caches one RoPE table for every
    value that it sees.
    """
    if cu_seqlens is None:
        segments = tuple(accumulate(plan.lengths, initial=0))
        cu_seqlens = torch.tensor(segments, dtype=torch.int32).pin_memory().cuda(non_blocking=True)
    mark_planned(cu_seqlens, PlannedRows(plan=plan, cp_rank=cp_rank, position_ids=position_ids))
    longest = max(plan.lengths)
    max_seqlen = max(longest, min(1 << (longest - 1).bit_length(), max_positions))
    return PlannedPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        # Left to itself, Transformer Engine compares two tensors on the host in every layer to find this out.
        pad_between_seqs=False,
        micro_batch=micro_batch,
        plan=plan,
        cp_rank=cp_rank,
    )
