"""Which rows of queries meet which rows of keys, and how: geometry alone, in integers.

A `Task` is a run of queries of one document with the keys that one buffer holds for it. A `Phase` is all tasks whose
keys lie in one buffer. The CUDA kernel takes a phase in one variable-length call; the CPU kernel takes it block by
block, where a block is what a dense kernel can do: full, causal diagonal, or masked where a sliding window cuts it.

Queries [2, 4) of a document against its keys [0, 4)::

    key     0 1 2 3
    query 2 x x x .      full block [2, 4) x [0, 2), diagonal block [2, 4) x [2, 4)
    query 3 x x x x
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np

from wlb.sharding.rows import Rows, ranges

Kind = Literal["full", "diagonal", "masked"]

# Queries of one piece where a window cuts: bounds a mask to MASK_ROWS x 2 * MASK_ROWS, whatever the document's length.
MASK_ROWS = 256


@dataclass(frozen=True, slots=True)
class Keys:
    """Rows [start, stop) of a buffer; `position` in the document of the first."""

    start: int
    stop: int
    position: int


@dataclass(frozen=True, slots=True)
class Task:
    """Local query rows [start, stop), the first at `position` of its document, and keys of the same document.

    Keys lie before the queries; the last may be the queries' own.
    """

    start: int
    stop: int
    position: int
    keys: tuple[Keys, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Local query rows against rows of a key buffer; every query of it sees at least one of the keys.

    shift: position of the first query less that of the first key.
    first: none of the queries has an output yet.
    """

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    kind: Kind
    shift: int
    first: bool


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Tasks on one buffer of keys.

    causal: the last key of each task is the last query's own, so scores are masked from the bottom right corner on;
        otherwise all keys of a task lie before its queries.
    window: as in `sharded_attention`; None also where it hides no key.
    first: no query of it has an output from an earlier phase.
    num_queries, num_keys: rows of the buffers.
    """

    tasks: tuple[Task, ...]
    blocks: tuple[Block, ...]
    causal: bool
    window: int | None
    first: bool
    num_queries: int
    num_keys: int

    @property
    def merges(self) -> bool:
        return not all(b.first for b in self.blocks)

    @cached_property
    def query_rows(self) -> Rows:
        """Of all tasks, back to back."""
        return Rows(ranges((t.start, t.stop) for t in self.tasks))

    @cached_property
    def key_rows(self) -> Rows:
        """Of all tasks, back to back; keys that several tasks see are there several times."""
        return Rows(ranges((k.start, k.stop) for t in self.tasks for k in t.keys))

    @cached_property
    def query_edges(self) -> Rows:
        """(tasks + 1,) int32, leading 0."""
        return _edges(t.stop - t.start for t in self.tasks)

    @cached_property
    def key_edges(self) -> Rows:
        """(tasks + 1,) int32, leading 0."""
        return _edges(sum(k.stop - k.start for k in t.keys) for t in self.tasks)

    @cached_property
    def most_queries(self) -> int:
        """Of one task."""
        return max(t.stop - t.start for t in self.tasks)

    @cached_property
    def most_keys(self) -> int:
        """Of one task."""
        return max(sum(k.stop - k.start for k in t.keys) for t in self.tasks)


class PhaseBuilder:
    """Makes the phases of one rank, in the order in which they will run.

    num_queries: rows of the shard.
    """

    def __init__(self, num_queries: int, window: int | None) -> None:
        self._seen = np.zeros(num_queries, dtype=np.bool_)
        self._window = window

    def phase(self, tasks: Iterable[Task], *, num_keys: int, causal: bool) -> Phase:
        """`causal` as in `Phase`."""
        tasks = tuple(tasks)
        first = not any(self._seen[t.start : t.stop].any() for t in tasks)
        blocks = tuple(self._block(*b) for t in tasks for b in _blocks_of(t, self._window))
        return Phase(
            tasks=tasks,
            blocks=blocks,
            causal=causal,
            window=self._window,
            first=first,
            num_queries=len(self._seen),
            num_keys=num_keys,
        )

    def _block(self, query_start: int, query_stop: int, key_start: int, key_stop: int, kind: Kind, shift: int) -> Block:
        seen = self._seen[query_start:query_stop]
        first = not seen.any()
        seen[:] = True
        return Block(query_start, query_stop, key_start, key_stop, kind, shift, first)


def _blocks_of(task: Task, window: int | None) -> Iterator[tuple[int, int, int, int, Kind, int]]:
    query_row = task.start - task.position
    last = task.position + task.stop - task.start
    for keys in task.keys:
        key_row = keys.start - keys.position
        key_stop = keys.position + keys.stop - keys.start
        for s, e, a, b, kind in visible_blocks((task.position, last), (keys.position, key_stop), window):
            yield s + query_row, e + query_row, a + key_row, b + key_row, kind, s - a


def visible_blocks(
    queries: tuple[int, int], keys: tuple[int, int], window: int | None
) -> Iterator[tuple[int, int, int, int, Kind]]:
    """(query start, query stop, key start, key stop, kind) that cover exactly the visible scores.

    queries: positions in a document.
    keys: positions; either they end before the queries, or they end with them.
    window: a query sees so many keys, with its own; None for all.

    >>> list(visible_blocks((2, 4), (0, 4), None))
    [(2, 4, 0, 2, 'full'), (2, 4, 2, 4, 'diagonal')]
    """
    start, stop = queries
    first, end = keys
    assert end <= start or (end == stop and first <= start), (queries, keys)
    if window is None or stop - 1 - first < window:
        if first < min(end, start):
            yield start, stop, first, min(end, start), "full"
        if end > start:
            yield start, stop, start, stop, "diagonal"
        return
    if end <= start:
        stop = min(stop, end - 1 + window)  # later queries see none of these keys
    for s in range(start, stop, MASK_ROWS):
        e = min(s + MASK_ROWS, stop)
        low, high = max(first, s - window + 1), min(end, e)
        if high - low <= 2 * MASK_ROWS:
            yield s, e, low, high, "masked"
            continue
        # Here the window is longer than the piece, so the piece's own diagonal is not cut.
        seen_by_all, past = max(first, e - window), min(high, s)
        # One key that every query sees is left in the masked part: a row without any would have no log-sum-exp.
        cut = min(past, seen_by_all + 1) if low < seen_by_all else low
        if low < cut:
            yield s, e, low, cut, "masked"
        if cut < past:
            yield s, e, cut, past, "full"
        if high > s:
            yield s, e, s, e, "diagonal"


def _edges(lengths: Iterable[int]) -> Rows:
    return Rows(np.fromiter(accumulate(lengths, initial=0), dtype=np.int32))
