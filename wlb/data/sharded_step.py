"""How context-parallel ranks divide the micro-batches of a step: planned where the step is planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from wlb.data.collate import padded_lengths
from wlb.documents import MicroBatch
from wlb.sharding import Division, ShardCosts, Sharding, ShardPlan
from wlb.sharding.index import Index, adopt, prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatistics:
    """Numbers of the shard plans of one replica's step.

    imbalance_ranks: predicted work of each micro-batch's slowest context-parallel rank over that of the mean rank,
        both added up over the micro-batches: they wait for each other in every micro-batch.
    received_tokens: tokens whose keys and values the rank that receives most of them receives, in one layer.
    """

    imbalance_ranks: float
    received_tokens: int


def shard_step(
    micro_batches: Iterable[MicroBatch], sharding: Sharding | Division, *, pad_to_multiple: int
) -> tuple[ShardPlan, ...]:
    """Plan every micro-batch. `pad_to_multiple` is a multiple of the ranks."""
    return tuple(sharding.plan(padded_lengths(m, pad_to_multiple)) for m in micro_batches)


def shard_statistics(plans: Sequence[ShardPlan], costs: ShardCosts) -> ShardStatistics:
    """Count the plans of a step, at least one."""
    ranks = range(plans[0].cp_size)
    pairs = [[costs.rank_pairs(plan, r) for r in ranks] for plan in plans]
    total = sum(map(sum, pairs))
    return ShardStatistics(
        imbalance_ranks=sum(map(max, pairs)) * len(ranks) / total if total else 1.0,
        received_tokens=max(sum(plan.received_tokens(r) for plan in plans) for r in ranks),
    )


def pack_shard_plans(
    plans: Sequence[ShardPlan],
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[dict[tuple[object, ...], Index]]]:
    """(spans, 4) int64 of all plans in order, the number of spans of each, and what was prepared for each.

    Arrays, as in `pack_micro_batches`; an index is a few dozen of them, of a plan's pieces and not of its rows.
    """
    tables = [plan.table for plan in plans]
    spans = np.concatenate([np.empty((0, 4), dtype=np.int64), *tables])
    return spans, np.array([len(t) for t in tables]), [prepared(plan) for plan in plans]


def unpack_shard_plans(
    table: NDArray[np.int64],
    counts: NDArray[np.int64],
    indexes: Sequence[Mapping[tuple[object, ...], Index]],
    micro_batches: Sequence[MicroBatch],
    *,
    cp_size: int,
    pad_to_multiple: int,
) -> tuple[ShardPlan, ...]:
    """Undo `pack_shard_plans`."""
    edges = np.concatenate([[0], np.cumsum(counts)]).tolist()
    plans = tuple(
        ShardPlan.from_table(table[a:b], lengths=padded_lengths(m, pad_to_multiple), cp_size=cp_size)
        for (a, b), m in zip(pairwise(edges), micro_batches, strict=True)
    )
    for plan, index in zip(plans, indexes, strict=True):
        adopt(plan, index)
    return plans
