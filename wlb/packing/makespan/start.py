"""Good plans at once: documents spread longest first over replicas and micro-batches, in a few fixed orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from wlb.packing.dealing import pipeline_order
from wlb.packing.makespan.fill import FEW_DOCUMENTS, NO_CAP, by_length, spread
from wlb.packing.makespan.replica import Replica, sums
from wlb.packing.makespan.timer import NEVER, ReplicaTimer
from wlb.packing.makespan.work import StepWork

_FACTORS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4)
_FEW_FACTORS = (1.25, 2, 3)
_HUGE_FACTOR = 1.25
_MANY_DOCUMENTS = 8_000  # of a step
HUGE = 20_000  # documents of a replica: the bubble hardly matters, and every number of micro-batches is dear to time
_FILL_TENTHS = (10, 6)  # of (stages - 1): an upper limit, and what remains where other passes hide part of it
_EVEN_OUT_TRIES = 4


def orders(loads: Sequence[int]) -> Iterator[list[int]]:
    """Orders worth a try: the pipeline fills behind the first micro-batches and drains behind the last."""
    rising = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    falling = rising[::-1]
    yield list(pipeline_order(loads))
    yield rising
    yield falling
    for ends in (1, 2, 3):  # all falling, but a few of the least first and last
        if len(loads) > ends:
            first = ends - ends // 2
            yield rising[:first] + falling[: len(loads) - ends] + rising[first:ends][::-1]


def start(work: StepWork, documents: Sequence[int], count: int, timer: ReplicaTimer) -> Replica | None:
    """The best of some plans for documents spread over `count` micro-batches; None if each breaks a cap.

    Spread evenly and then put in one of `orders`, or spread so that work rises from both ends, over a little more than
    the pipeline's length or all the way to the middle.
    """
    tried = []
    is_small = len(documents) <= FEW_DOCUMENTS
    if is_small or not timer.order_matters:
        flat = spread(work, documents, count, cap_tokens=timer.cap_tokens)
        if flat is not None and timer.order_matters:
            loads = [int(work.total[m].sum()) for m in flat]
            tried += [[flat[i] for i in order] for order in orders(loads)]
        elif flat is not None:
            tried.append(flat)
    if timer.order_matters:
        for ramp in sorted({min(timer.num_stages + 1, count // 2), count // 2} if is_small else {count // 2}):
            ramped = spread(work, documents, count, cap_tokens=timer.cap_tokens, ramp=ramp)
            if ramped is not None and all(ramped):
                tried.append(ramped)
    if not tried:
        return None
    each = [sums(work, micro_batches) for micro_batches in tried]
    times = timer.times(np.stack([d for d, _ in each], axis=2), np.stack([t for _, t in each], axis=1))
    best = int(times.argmin())
    return None if times[best] == NEVER else Replica(work, tried[best], int(times[best]))


class Starter:
    """Starts for every replica.

    num_stages: time that a unit of work takes is about 1 / num_stages. per_replica: micro-batches of plain training.
    takes: whether a replica may have so many micro-batches. equal_counts: all replicas must have equally many.
    """

    def __init__(
        self,
        work: StepWork,
        timer: ReplicaTimer,
        *,
        num_replicas: int,
        num_stages: int,
        per_replica: int,
        takes: Callable[[int], bool],
        equal_counts: bool,
    ) -> None:
        self._work, self._timer, self._takes = work, timer, takes
        self._num_replicas, self._num_stages = num_replicas, num_stages
        self._per_replica, self._equal = per_replica, equal_counts

    def members(self) -> list[list[Replica]] | None:
        """Per replica, plans of its documents with different numbers of micro-batches, best first; None if there is
        none within the caps."""
        found = [members for parts in self._partitions() if (members := self._of_partition(parts))]
        for members in found if self._num_replicas > 1 else ():
            self._even_out(members)
        return min(found, key=lambda members: max(m[0].time for m in members), default=None)

    def _partitions(self) -> Iterator[list[list[int]]]:
        """Ways to part the documents between the replicas."""
        every = list(range(self._work.num_documents))
        if self._num_replicas == 1:
            yield [every]
            return
        if self._num_stages == 1:
            yield by_length(self._work, self._num_replicas, fill_tenths=0)
            return
        for tenths in _FILL_TENTHS if len(every) <= _MANY_DOCUMENTS else _FILL_TENTHS[1:]:
            yield by_length(self._work, self._num_replicas, fill_tenths=tenths * (self._num_stages - 1))
        if len(every) <= FEW_DOCUMENTS:
            even = spread(self._work, every, self._num_replicas, cap_tokens=NO_CAP)
            assert even is not None
            yield even

    def _of_partition(self, parts: list[list[int]]) -> list[list[Replica]]:
        members = [self._starts(p, self._counts(parts if self._equal else [p])) for p in parts]
        if self._equal:
            members = _with_one_count(members)
        return members if all(members) else []

    def _starts(self, documents: list[int], counts: Sequence[int]) -> list[Replica]:
        found = [start(self._work, documents, count, self._timer) for count in counts]
        return sorted((r for r in found if r is not None), key=lambda r: r.time)

    def _counts(self, parts: list[list[int]]) -> list[int]:
        """Numbers of micro-batches to try for the parts' documents, not more than there are documents."""
        most_tokens = max(int(self._work.tokens[p].sum()) for p in parts)
        least = max(1, -(-most_tokens // self._timer.cap_tokens))
        wanted = [least, least + 1]
        if self._timer.order_matters:
            documents = max(len(p) for p in parts)
            if documents > HUGE:
                wanted = [round(_HUGE_FACTOR * self._per_replica)]
            else:
                factors: tuple[float, ...] = _FACTORS if documents < FEW_DOCUMENTS else _FEW_FACTORS
                if self._work.num_documents > _MANY_DOCUMENTS:
                    factors = _FEW_FACTORS[1:]
                wanted = [least + 1, *(min(round(f * self._per_replica), documents) for f in factors)]
        return sorted({self._allowed(max(least, w)) for w in wanted})

    def _allowed(self, count: int) -> int:
        while not self._takes(count):
            count += 1
        return count

    def _even_out(self, members: list[list[Replica]]) -> None:
        """Give about half of what separates the slowest replica from the fastest to the latter, while that helps."""
        share = 2
        kept = 2 if self._work.num_documents <= FEW_DOCUMENTS * self._num_replicas else 1
        for _ in range(_EVEN_OUT_TRIES):
            slow = max(range(len(members)), key=lambda r: (members[r][0].time, -r))
            fast = min(range(len(members)), key=lambda r: (members[r][0].time, r))
            gap = members[slow][0].time - members[fast][0].time
            staying, going, left = [], [], gap * self._num_stages // share
            for d in members[slow][0].documents():
                if self._work.total[d] <= left:
                    going.append(d)
                    left -= int(self._work.total[d])
                else:
                    staying.append(d)
            if not going or not staying:
                return
            receiving = sorted(members[fast][0].documents() + going)
            slower = self._starts(staying, [r.count for r in members[slow][:kept]])
            faster = self._starts(receiving, [r.count for r in members[fast][:kept]])
            if slower and faster and max(slower[0].time, faster[0].time) < members[slow][0].time:
                members[slow], members[fast] = slower, faster
                if self._equal:
                    members[:] = _with_one_count(members)
            else:
                share *= 2


def _with_one_count(members: list[list[Replica]]) -> list[list[Replica]]:
    """Of each replica the plan with that number of micro-batches, common to all, with which the slowest is fastest."""
    counts = set.intersection(*({r.count for r in m} for m in members))
    times = {c: max(r.time for m in members for r in m if r.count == c) for c in counts}
    if not times:
        return [[] for _ in members]
    best = min(times, key=lambda c: (times[c], c))
    return [[r for r in m if r.count == best] for m in members]
