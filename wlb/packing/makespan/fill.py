"""Spreading documents, longest first: over the micro-batches of a replica, and over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise

import numpy as np

from wlb.packing.makespan.work import Int64, StepWork

NO_CAP = 1 << 62
FEW_DOCUMENTS = 400
_STRIDE = 16
_LONGEST = 256
_HALVINGS = 16


def spread(
    work: StepWork, documents: Sequence[int], count: int, *, cap_tokens: int, ramp: int = 0
) -> list[list[int]] | None:
    """Documents over `count` micro-batches, each to the one with least work that has room; None if one fits nowhere.

    documents: longest first. Where they are many, those in the middle are dealt all at once, to make works equal, and
        only the longest and the shortest one by one.
    ramp: the first and last so many micro-batches, and more so the nearer to the end they are, get less work: none of
        the mean at the very end, all of it `ramp` further in. A pipeline fills and drains in less time then, and the
        long documents, which are placed first, are in the middle.
    """
    mean = int(work.total[documents].sum()) // count
    loads = [mean * max(0, ramp - min(i, count - 1 - i)) // max(1, ramp) for i in range(count)]
    if len(documents) > FEW_DOCUMENTS:
        head = max(int((work.total[documents] * 8 > mean).sum()), 2 * count)
        tail = len(documents) - 4 * count
        if tail - head > FEW_DOCUMENTS // 2:
            filling = _Filling(work, loads, cap_tokens)
            filling.place(documents[:head])
            filling.deal(documents[head:tail])
            if filling.within_cap and filling.place(documents[tail:]):
                return filling.places
    filling = _Filling(work, loads, cap_tokens)
    return filling.places if filling.place(documents) else None


def alike(work: StepWork, documents: Sequence[int], count: int, *, cap_tokens: int) -> list[list[int]]:
    """Documents of neighbouring lengths together, in about `count` micro-batches of about equal work, or more where
    they would break the cap.

    documents: longest first.
    """
    totals, tokens = work.total[documents].tolist(), work.tokens[documents].tolist()
    share = sum(totals) / count
    micro_batches: list[list[int]] = []
    load, room = 0, -1
    for d, total, length in zip(documents, totals, tokens, strict=True):
        if length > room or load + total / 2 > share:
            micro_batches.append([])
            load, room = 0, cap_tokens
        micro_batches[-1].append(d)
        load, room = load + total, room - length
    return micro_batches


def by_length(work: StepWork, num_replicas: int, *, fill_tenths: int) -> list[list[int]]:
    """Documents over replicas so that long ones share a replica.

    A pipeline is filled and drained at the pace of its largest micro-batch, once, however many are as large. So each
    replica gets, longest first, what a common time allows once fill_tenths / 10 times the work of its own longest
    document is charged for that, and the next begins with shorter ones. The time is the shortest in which all fit.
    """
    total = work.total.tolist()
    head = total[:_LONGEST]
    rest = sum(total[_LONGEST:])
    low, high = sum(total) // num_replicas, sum(total) + fill_tenths * max(total, default=0)
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if _first_fit(head, rest, middle, num_replicas, fill_tenths) else (middle, high)
    fitted = _first_fit(head, rest, high, num_replicas, fill_tenths)
    assert fitted is not None
    parts, loads = fitted
    filling = _Filling(work, loads, NO_CAP)
    filling.places = parts
    every = list(range(len(total)))
    tail = max(len(head), len(total) - 8 * num_replicas)
    if tail > len(head):
        filling.deal(every[len(head) : tail])
    filling.place(every[tail:])
    return filling.places


def _first_fit(
    head: Sequence[int], rest: int, limit: int, num_replicas: int, fill_tenths: int
) -> tuple[list[list[int]], list[int]] | None:
    """Long documents to the first replica that stays within `limit`; None if they, or the rest, do not all fit."""
    parts: list[list[int]] = [[] for _ in range(num_replicas)]
    loads = [0] * num_replicas
    for d, work in enumerate(head):
        for r in range(num_replicas):
            load = loads[r] + work + (0 if parts[r] else fill_tenths * work // 10)
            if load <= limit:
                parts[r].append(d)
                loads[r] = load
                break
        else:
            return None
    return (parts, loads) if sum(loads) + rest <= limit * num_replicas else None


class _Filling:
    """Places (micro-batches or replicas) that are being filled.

    loads: work that each is treated as having already.
    """

    def __init__(self, work: StepWork, loads: Sequence[int], cap_tokens: int) -> None:
        self._work, self._cap_tokens = work, cap_tokens
        self.places: list[list[int]] = [[] for _ in loads]
        self._tokens, self._loads = [0] * len(loads), list(loads)

    @property
    def within_cap(self) -> bool:
        return max(self._tokens) <= self._cap_tokens

    def place(self, documents: Sequence[int]) -> bool:
        """Each, longest first, to the one with least work that has room; False if one fits nowhere."""
        totals, tokens = self._work.total[documents].tolist(), self._work.tokens[documents].tolist()
        least = [(load, i) for i, load in enumerate(self._loads)]
        heapify(least)
        parked: list[tuple[int, int]] = []  # too full for the documents of late: (minus room, place), most room first
        for d, total, length in zip(documents, totals, tokens, strict=True):
            while parked and -parked[0][0] >= length:
                i = heappop(parked)[1]
                heappush(least, (self._loads[i], i))
            while least and self._tokens[least[0][1]] + length > self._cap_tokens:
                i = heappop(least)[1]
                heappush(parked, (self._tokens[i] - self._cap_tokens, i))
            if not least:
                return False
            load, i = least[0]
            heapreplace(least, (load + total, i))
            self._loads[i] = load + total
            self.places[i].append(d)
            self._tokens[i] += length
        return True

    def deal(self, documents: Sequence[int]) -> None:
        """All at once: every micro-batch gets a mix of lengths, so much that works become equal. Ignores the cap."""
        order = np.concatenate([np.arange(k, len(documents), _STRIDE) for k in range(_STRIDE)])
        dealt = np.asarray(documents, dtype=np.intp)[order]
        ends = np.cumsum(self._work.total[dealt])
        loads = np.array(self._loads, dtype=np.int64)
        missing = _missing_to_level(loads, int(ends[-1]))
        edges = np.concatenate([[0], np.searchsorted(ends, np.cumsum(missing)[:-1]), [len(dealt)]]).tolist()
        for i, (begin, end) in enumerate(pairwise(edges)):
            mine = dealt[begin:end]
            self.places[i].extend(mine.tolist())
            self._tokens[i] += int(self._work.tokens[mine].sum())
            self._loads[i] += int(self._work.total[mine].sum())


def _missing_to_level(loads: Int64, amount: int) -> Int64:
    """(N,) what each load lacks of the level to which `amount` fills the lowest of them."""
    rising = np.sort(loads)
    used = np.cumsum(rising)
    # With the k + 1 lowest filled the level is (their loads + amount) / (k + 1), no lower than the highest of them.
    levels = (used + amount) // np.arange(1, len(loads) + 1)
    k = int(np.flatnonzero(levels >= rising)[-1])
    missing: Int64 = np.maximum(levels[k] - loads, 0)
    return missing
