"""Fits of measured seconds: of undivided micro-batches, and of what dividing them over context-parallel ranks costs.

All ranks wait for the slowest, so a divided micro-batch takes its slowest rank's seconds: those of the pairs that
`ShardCosts.slowest_pairs` counts, of its tokens, and what every micro-batch costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from wlb.cost import FittedCost, MeasuredMicroBatch, QuadraticTime, fit_cost
from wlb.cost.least_squares import fit_seconds
from wlb.errors import DataError
from wlb.sharding import ShardCosts, ShardPlan

TILES_TOKENS = (1, 16, 32, 64, 128, 256)
"""Tiles that a fit chooses from: the CPU's kernel cuts queries by how many there are, others always alike."""

HELD_UP = 1.15
"""Undisturbed micro-batches stay within a few percent of their cost; beyond so many times it another program ran."""

_TRIMMINGS = 2
_FEWEST = 3  # what a fit needs
_FEWEST_PLANS = 6
_PASSES = 4  # which rank is the slowest depends on the prices, and these on that


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A divided micro-batch and the seconds of its slowest rank, both passes."""

    plan: ShardPlan
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTime:
    """Seconds of a divided micro-batch.

    costs: what cuts and exchanges cost, in pairs. pair_s: of a pair. token_s: of a rank's token. fixed_s: of all else.
    """

    costs: ShardCosts
    pair_s: float
    token_s: float
    fixed_s: float

    def seconds(self, plan: ShardPlan) -> float:
        """Of the slowest rank."""
        return self.pair_s * self.costs.slowest_pairs(plan) + self.token_s * plan.rank_tokens + self.fixed_s

    def deviation(self, measured: Sequence[MeasuredPlan]) -> float:
        """Mean of |measured / predicted - 1|."""
        return fmean(abs(m.seconds / self.seconds(m.plan) - 1) for m in measured)


def fit_shard_time(measured: Sequence[MeasuredPlan], *, tiles_tokens: Sequence[int] = TILES_TOKENS) -> ShardTime:
    """The prices closest to the measured seconds, without the measurements that another program held up.

    measured: by several sharders, or nothing tells the price of a span from that of what it receives.

    Raises:
        DataError: fewer than 6 measurements, seconds that are not above 0, or none that grow with attention.
    """
    if len(measured) < _FEWEST_PLANS:
        raise DataError(f"measured must hold at least {_FEWEST_PLANS} plans, got {len(measured)}")
    for i, m in enumerate(measured):
        if not 0 < m.seconds < float("inf"):
            raise DataError(f"measured seconds must be finite and > 0, got {m.seconds} (plan {i})")

    def fit(kept: Sequence[MeasuredPlan]) -> ShardTime:
        found = [time for tile in tiles_tokens for time in _fits(kept, tile)]
        if not found:
            raise DataError("measured seconds must grow with attention's pairs, got none that do")
        return min(found, key=lambda time: _error(time, kept))

    return steady(measured, fit, lambda time, m: m.seconds / time.seconds(m.plan), fewest=_FEWEST_PLANS)


def _fits(measured: Sequence[MeasuredPlan], tile_tokens: int) -> list[ShardTime]:
    """Better and better ones for this tile."""
    seconds = np.array([m.seconds for m in measured])
    costs = ShardCosts(tile_tokens=tile_tokens)
    found = []
    for _ in range(_PASSES):
        features = np.array([_features(m.plan, costs) for m in measured], dtype=np.float64)
        pair_s, span_s, exchange_s, received_s, token_s, fixed_s = fit_seconds(features, seconds).tolist()
        if pair_s == 0:
            break
        costs = ShardCosts(
            tile_tokens=tile_tokens,
            span_pairs=round(span_s / pair_s),
            exchange_pairs=round(exchange_s / pair_s),
            received_token_pairs=round(received_s / pair_s),
        )
        found.append(ShardTime(costs=costs, pair_s=pair_s, token_s=token_s, fixed_s=fixed_s))
    return found


def _features(plan: ShardPlan, costs: ShardCosts) -> tuple[int, int, int, int, int, int]:
    """Of the rank that computes most: pairs in tiles and spans; of the plan: exchange, received tokens, tokens, 1."""
    ranks = range(plan.cp_size)
    slowest = max(ranks, key=lambda rank: costs.attention_pairs(plan, rank))
    num_spans = len(plan.ranks[slowest])
    received = max(plan.received_tokens(rank) for rank in ranks)
    pairs = costs.attention_pairs(plan, slowest) - costs.span_pairs * num_spans
    return pairs, num_spans, int(received > 0), received, plan.rank_tokens, 1


def _error(time: ShardTime, measured: Sequence[MeasuredPlan]) -> float:
    return sum((time.seconds(m.plan) / m.seconds - 1) ** 2 for m in measured)


def fit_divided(
    plans: Sequence[ShardPlan], costs: ShardCosts, forward_s: Sequence[float], backward_s: Sequence[float]
) -> FittedCost:
    """Cost of the undivided micro-batches, from the seconds of their slowest ranks.

    costs: what dividing costs. forward_s, backward_s: of each plan's slowest rank.
    """
    features = np.array([(costs.slowest_pairs(p), p.rank_tokens, 1) for p in plans], dtype=np.float64)
    times = []
    for seconds in (forward_s, backward_s):
        pair_s, token_s, micro_batch_s = fit_seconds(features, np.array(seconds)).tolist()
        # A document of n tokens has n * n / 2 pairs.
        times.append(QuadraticTime(square_s=pair_s / 2, token_s=token_s, micro_batch_s=micro_batch_s))
    return FittedCost(forward=times[0], backward=times[1])


def fit_undivided(measured: Sequence[MeasuredMicroBatch]) -> FittedCost:
    """The fit without micro-batches that another program held up."""
    return steady(
        measured,
        fit_cost,
        lambda cost, m: (m.forward_s + m.backward_s) / (cost.forward_s(m.lengths) + cost.backward_s(m.lengths)),
        fewest=_FEWEST,
    )


def steady[M, F](
    measured: Sequence[M], fit: Callable[[Sequence[M]], F], ratio: Callable[[F, M], float], *, fewest: int
) -> F:
    """`fit(measured)` without those well slower than most say they should be, of which at least `fewest` are left.

    ratio: measured over fitted seconds.
    """
    fitted = fit(measured)
    for _ in range(_TRIMMINGS):
        ratios = [ratio(fitted, m) for m in measured]
        limit = HELD_UP * median(ratios)
        kept = [m for m, r in zip(measured, ratios, strict=True) if r <= limit]
        if len(kept) < fewest:
            break
        fitted = fit(kept)
    return fitted
