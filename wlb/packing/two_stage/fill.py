"""Stage 2: a replica's documents to micro-batches, for several numbers of them.

D documents of a replica, v micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np

from wlb.packing.dealing import pipeline_order
from wlb.packing.makespan.fill import spread
from wlb.packing.makespan.timer import ReplicaTimer
from wlb.packing.makespan.work import StepWork
from wlb.packing.two_stage.level import level

MAX_COUNTS = 20

MicroBatches = list[list[int]]
"""Documents (columns of `StepWork`) of each micro-batch of a replica, in pipeline order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """What a replica takes by Hydraulis' formula: (largest + overhead) x (num_stages - 1 + v).

    overhead: what a micro-batch takes however short it is, in the unit of work. The formula is that of 1F1B without
    virtual stages, all micro-batches as large as the largest.
    """

    num_stages: int
    overhead: int

    def value(self, largest: int, count: int) -> int:
        return (largest + self.overhead) * (self.num_stages - 1 + count)

    def best_count(self, total: int, longest: int) -> int:
        """v with the least value if work could be cut anywhere, but for the longest document: at least 1.

        Beyond total / longest the largest micro-batch shrinks no further; before that, v^2 = total (num_stages - 1)
        / overhead is the least of (total / v + overhead)(num_stages - 1 + v).
        """
        count = total // max(1, longest)
        if self.overhead:
            count = min(count, isqrt(total * (self.num_stages - 1) // self.overhead))
        return max(1, count)


class Filler:
    """Packs the parts of a step.

    takes: whether a replica may have so many micro-batches; true for some larger number, whatever the number.
    """

    def __init__(self, work: StepWork, timer: ReplicaTimer, form: ClosedForm, *, takes: Callable[[int], bool]) -> None:
        self._work, self._timer, self._form, self._takes = work, timer, form, takes

    def fill(self, parts: Sequence[Sequence[int]]) -> list[MicroBatches]:
        """Each replica's micro-batches, all replicas with the same number v, that with the least value of the slowest.

        parts: documents of each replica, longest first. Never over a cap: where no number that is tried keeps both,
        micro-batches are spaced out by empty ones.
        """
        best: tuple[int, list[MicroBatches]] | None = None
        for bound, count in sorted((self._bound(parts, count), count) for count in self.counts(parts)):
            if best is not None and bound >= best[0]:
                break
            packed = self._packed(parts, count)
            if packed is not None and (best is None or packed[0] < best[0]):
                best = packed
        return self._spaced(parts) if best is None else best[1]

    def counts(self, parts: Sequence[Sequence[int]]) -> list[int]:
        """At most MAX_COUNTS numbers of micro-batches to try: from the fewest that the cap allows to half as many
        again as would be best if work could be cut anywhere."""
        least, wanted = self._least(parts), 1
        for part in parts:
            if part:
                wanted = max(wanted, self._form.best_count(self._total(part), self._longest(part)))
        most_documents = max(least, *(len(p) for p in parts))
        wanted = min(max(least, wanted), most_documents)
        most = min(wanted + wanted // 2 + 2, most_documents)
        steps = MAX_COUNTS - 2
        tried = {least + (most - least) * i // steps for i in range(steps + 1)} | {wanted}
        return sorted({self._allowed(count) for count in tried})

    def _packed(self, parts: Sequence[Sequence[int]], count: int) -> tuple[int, list[MicroBatches]] | None:
        """The slowest replica's value with the plan; None if a cap is broken."""
        packed, value = [], 0
        for part in parts:
            micro_batches = self._spread(part, count)
            if micro_batches is None:
                return None
            close_to = self._least_largest(part, count)
            micro_batches = level(self._work, micro_batches, cap_tokens=self._timer.cap_tokens, close_to=close_to)
            loads = [self._total(m) for m in micro_batches]
            packed.append([micro_batches[i] for i in pipeline_order(loads)])
            value = max(value, self._form.value(max(loads), count))
        return (value, packed) if all(map(self._fits, packed)) else None

    def _spaced(self, parts: Sequence[Sequence[int]]) -> list[MicroBatches]:
        """As few micro-batches as documents can be placed in, with as many empty ones between them as the caps ask."""
        count = self._least(parts)
        while any(self._spread(part, count) is None for part in parts):
            count += 1
        filled = [self._spread(part, count) for part in parts]
        gap = 0
        while True:
            spaced = []
            for micro_batches in filled:
                assert micro_batches is not None
                spaced.append([m for group in micro_batches for m in (group, *([] for _ in range(gap)))])
            allowed = self._allowed(len(spaced[0]))
            spaced = [[*s, *([] for _ in range(allowed - len(s)))] for s in spaced]
            if all(map(self._fits, spaced)):
                return spaced
            gap += 1

    def _spread(self, part: Sequence[int], count: int) -> MicroBatches | None:
        if not part:
            return [[] for _ in range(count)]
        return spread(self._work, part, count, cap_tokens=self._timer.cap_tokens)

    def _fits(self, micro_batches: MicroBatches) -> bool:
        tokens = np.array([int(self._work.tokens[m].sum()) if m else 0 for m in micro_batches], dtype=np.int64)
        return bool(self._timer.fit(tokens[:, None])[0])

    def _bound(self, parts: Sequence[Sequence[int]], count: int) -> int:
        """No plan with so many micro-batches has a smaller value."""
        return max(self._form.value(self._least_largest(part, count), count) for part in parts)

    def _least_largest(self, part: Sequence[int], count: int) -> int:
        return max(self._longest(part), -(-self._total(part) // count)) if part else 0

    def _least(self, parts: Sequence[Sequence[int]]) -> int:
        most_tokens = max(int(self._work.tokens[list(p)].sum()) if p else 0 for p in parts)
        return max(1, -(-most_tokens // self._timer.cap_tokens))

    def _total(self, documents: Sequence[int]) -> int:
        return int(self._work.total[documents].sum()) if documents else 0

    def _longest(self, part: Sequence[int]) -> int:
        return int(self._work.total[part[0]])

    def _allowed(self, count: int) -> int:
        while not self._takes(count):
            count += 1
        return count
