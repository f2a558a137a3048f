"""Packing and sharding decided together: plans are compared by the seconds of the slowest context-parallel rank.

What a divided micro-batch takes is no sum over its documents, and finding it out takes a shard plan, a thousand times
what timing a candidate takes. So the search goes by the additive estimate, and only the plans it ends with, and
changes of the best of them that look good, are priced exactly, as long as the shard plans allowed for a step last.

R rows of `work`, N micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from wlb.packing.makespan.fill import alike
from wlb.packing.makespan.moves import Draws, Moves
from wlb.packing.makespan.replica import Replica, sums
from wlb.packing.makespan.search import BATCH, try_orders
from wlb.packing.makespan.start import orders
from wlb.packing.makespan.timer import NEVER, ReplicaTimer
from wlb.packing.makespan.work import Int64, StepWork, durations_ns
from wlb.schedule.model import PipelineModel
from wlb.sharding.division import Division

MicroBatches = list[list[int]]
"""Documents (columns of `StepWork`) of each micro-batch of a replica, in pipeline order."""

_Key = tuple[int, ...]
_NONE: Mapping[_Key, list[int]] = MappingProxyType({})
_ALIKE_FACTORS = (1, 1.5, 2, 3)
_ORDER_ROUNDS = 4
_TRIED = 4  # moves of a batch that are priced exactly
_PATIENCE = 6  # rounds without a gain
_WIDTHS = np.array((1, 1, 1, 2, 2, 4, 8))


class _Priced(NamedTuple):
    """What a micro-batch takes: pairs of its slowest rank, the order of its documents, and (R,) durations."""

    pairs: int
    documents: list[int]
    durations: Int64


class ShardedChoice:
    """Takes the best of some plans by exact time, and improves it.

    work: with the additive estimate of divided work. undivided: the same documents, with undivided work.
    exact: the pipeline with `ShardedCost`. plans: shard plans that may be made.
    takes: whether a replica may have so many micro-batches. free_counts: whether that number may change.
    """

    def __init__(
        self,
        work: StepWork,
        undivided: StepWork,
        timer: ReplicaTimer,
        exact: PipelineModel,
        division: Division,
        *,
        plans: int,
        takes: Callable[[int], bool],
        free_counts: bool,
    ) -> None:
        self._work, self._undivided, self._timer = work, undivided, timer
        self._exact, self._division = exact, division
        self._left, self._takes, self._free_counts = plans, takes, free_counts
        self._tokens: list[int] = work.tokens.tolist()
        self._priced: dict[_Key, _Priced] = {}
        self._planned: set[tuple[int, ...]] = set()
        self._draws = Draws(0)
        self._best: list[Replica] | None = None

    @property
    def plans_left(self) -> int:
        return self._left

    def consider(self, step: Sequence[Sequence[Sequence[int]]], *, keep_order: bool = False) -> bool:
        """A plan of every replica. False if it takes more shard plans than are left.

        keep_order: the documents of its micro-batches may also stay in the order given.
        """
        if self._best is not None and max(map(self._least_time, step)) >= _slowest(self._best):
            return True  # it cannot be better
        also = {_key(m): list(m) for replica in step for m in replica} if keep_order else {}
        if not self._price([m for replica in step for m in replica], also):
            return False
        replicas = []
        for micro_batches in step:
            replica = self._replica(micro_batches)
            self._order(replica, rounds=_ORDER_ROUNDS)
            replicas.append(replica)
        if self._best is None or _slowest(replicas) < _slowest(self._best):
            self._best = replicas
        return True

    def consider_alike(self, per_replica: int) -> None:
        """The best plan's documents with those of similar length in one micro-batch.

        per_replica: micro-batches of plain training.

        A long document among short ones is what sharders that cut by position make worst of.
        """
        assert self._best is not None
        if not self._division.order_matters:
            return
        parts = [r.documents() for r in self._best]
        for factor in _ALIKE_FACTORS:
            step = [alike(self._work, p, round(factor * per_replica), cap_tokens=self._timer.cap_tokens) for p in parts]
            counts = {len(micro_batches) for micro_batches in step}
            if all(map(self._takes, counts)) and (self._free_counts or len(counts) == 1):
                self.consider(step)

    def run(self) -> list[MicroBatches]:
        """Documents of each micro-batch in the order in which it holds them. Some plan has been priced."""
        assert self._best is not None
        idle = 0
        while idle < _PATIENCE and self._left >= 2:
            times = [r.time for r in self._best]
            slow, fast = times.index(max(times)), times.index(min(times))
            before = self._best[slow].time
            if idle % 3 == 2:
                self._split(slow)
            else:
                self._move(slow, fast if idle % 2 else slow)
            if self._best[slow].time < before:
                self._order(self._best[slow], rounds=_ORDER_ROUNDS)
            idle = 0 if _slowest(self._best) < before else idle + 1
        return [[self._priced[_key(m)].documents for m in r.micro_batches] for r in self._best]

    def _price(self, micro_batches: Iterable[Sequence[int]], also: Mapping[_Key, list[int]] = _NONE) -> bool:
        """Find out what each takes, longest document first; False if that is more shard plans than are left.

        also: orders of documents to try beside that one, or instead where all orders are as good.
        """
        wanted: list[tuple[tuple[int, ...], list[int]]] = []
        for key in map(_key, micro_batches):
            tried = [also[key]] if key in also else []
            if key not in self._priced and (self._division.order_matters or not tried):
                tried.append(list(key))
            wanted += [(tuple(self._tokens[d] for d in documents), documents) for documents in tried]
        # Counted whether or not the division remembers some: a resumed run must find the same plan.
        plans = {lengths for lengths, _ in wanted} - self._planned
        if len(plans) > self._left:
            return False
        self._left -= len(plans)
        self._planned |= plans
        for lengths, documents in wanted:
            pairs, key = self._division.slowest_pairs(lengths), _key(documents)
            if key not in self._priced or pairs < self._priced[key].pairs:
                self._priced[key] = _Priced(pairs, documents, durations_ns(self._exact, lengths))
        return True

    def _replica(self, micro_batches: Sequence[Sequence[int]]) -> Replica:
        """Of micro-batches that are priced."""
        replica = Replica(self._work, micro_batches, 0)
        replica.durations = np.stack([self._priced[_key(m)].durations for m in micro_batches], axis=1)
        replica.time = int(self._timer.times(replica.durations[:, :, None], replica.tokens[:, None])[0])
        return replica

    def _least_time(self, micro_batches: Sequence[Sequence[int]]) -> int:
        """A replica's time in this order if every rank computed an equal share of exact pairs and received nothing."""
        durations, tokens = sums(self._undivided, micro_batches)
        fixed = self._undivided.fixed[:, None]
        least = fixed + (durations - fixed) // self._division.cp_size
        return int(self._timer.times(least[:, :, None], tokens[:, None])[0])

    def _order(self, replica: Replica, *, rounds: int) -> None:
        if not self._timer.order_matters or replica.count < 2:
            return
        weights = replica.durations.sum(axis=0).tolist()
        tried = np.array(list(orders(weights))).T  # (N, C)
        times = self._timer.times(replica.durations[:, tried], replica.tokens[tried])
        best = int(times.argmin())
        if times[best] < replica.time:
            replica.reorder(tried[:, best].tolist())
            replica.time = int(times[best])
        for _ in range(rounds):
            try_orders(replica, self._timer, self._draws, BATCH)

    def _move(self, slow: int, fast: int) -> None:
        """The best of a few promising moves of documents off the slowest replica's critical path, if it is faster."""
        assert self._best is not None
        giving, taking = self._best[slow], self._best[fast]
        inside = giving is taking
        if (inside and giving.count < 2) or not any(giving.micro_batches):
            return
        share, slack = giving.critical_share(self._timer), taking.critical_share(self._timer)
        sizes = np.array([len(m) for m in giving.micro_batches], dtype=np.int64)
        weights = (share + 1) * (sizes > 0), int(slack.max()) + 1 - slack
        moves = Moves.draw(giving, taking, weights, self._draws, widths=_WIDTHS, count=BATCH)
        times = self._timer.times(*moves.candidates(giving, BATCH, gives=True, takes=inside))
        if not inside:
            times = np.maximum(times, self._timer.times(*moves.candidates(taking, BATCH, gives=False, takes=True)))
        times[~moves.legal] = NEVER
        found: list[tuple[int, list[Replica]]] = []
        for k in np.argsort(times, kind="stable")[:_TRIED].tolist():
            if times[k] == NEVER:
                break
            changed = [giving.copy()] if inside else [giving.copy(), taking.copy()]
            moves.apply(k, changed[0], changed[-1])
            if self._price(m for r in changed for m in r.micro_batches):
                priced = [self._replica(r.micro_batches) for r in changed]
                found.append((_slowest(priced), priced))
        if found:
            time, priced = min(found, key=lambda f: f[0])
            if time < giving.time:
                self._best[slow], self._best[fast] = priced[0], priced[-1]

    def _split(self, slow: int) -> None:
        """The slowest replica's best plan with one micro-batch's longest document on its own, if it is faster."""
        assert self._best is not None
        replica = self._best[slow]
        if not (self._free_counts and self._takes(replica.count + 1)):
            return
        for i in range(replica.count):
            key = _key(replica.micro_batches[i])
            alone, others = list(key[:1]), list(key[1:])
            if others and self._price([alone, others]):
                micro_batches = [*replica.micro_batches[:i], alone, others, *replica.micro_batches[i + 1 :]]
                split = self._replica(micro_batches)
                self._order(split, rounds=0)
                if split.time < self._best[slow].time:
                    self._best[slow] = split


def _key(micro_batch: Sequence[int]) -> _Key:
    """Longest document first."""
    return tuple(sorted(micro_batch))


def _slowest(replicas: Sequence[Replica]) -> int:
    return max(r.time for r in replicas)
