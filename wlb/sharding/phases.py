"""Which rows of queries meet which rows of keys, and how: geometry alone, in integers.

A task is a run of queries of one document with the keys that one buffer holds for it. A `Phase` is all tasks whose
keys lie in one buffer. CUDA kernels take a phase in one variable-length call or in few (see `calls`); the CPU kernel
takes it block by block, where a block is what a dense kernel can do: full, causal diagonal, or masked where a sliding
window cuts it.

Queries [2, 4) of a document against its keys [0, 4)::

    key     0 1 2 3
    query 2 x x x .      full block [2, 4) x [0, 2), diagonal block [2, 4) x [2, 4)
    query 3 x x x x
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wlb.sharding.calls import KernelCall, RoundedCall, by_length, calls_apart, one_call, rounded
from wlb.sharding.parts import Parts, parts_of
from wlb.sharding.rows import expanded
from wlb.sharding.tasks import Task, TaskTable

Kind = Literal["full", "diagonal", "masked"]

# Queries of one piece where a window cuts: bounds a mask to MASK_ROWS x 2 * MASK_ROWS, whatever the document's length.
MASK_ROWS = 256


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """Tasks on one buffer of keys.

    table: the tasks.
    causal: the last key of each task is the last query's own, so scores are masked from the bottom right corner on;
        otherwise all keys of a task lie before its queries.
    window: as in `sharded_attention`; None also where it hides no key.
    first: no query of it has an output from an earlier phase.
    num_queries, num_keys: rows of the buffers.
    previous: the phase that runs before.
    """

    table: TaskTable
    causal: bool
    window: int | None
    first: bool
    num_queries: int
    num_keys: int
    previous: Phase | None = field(default=None, repr=False)

    @property
    def num_tasks(self) -> int:
        return len(self.table)

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """As objects; on the way of every micro-batch the columns of `table` do."""
        return self.table.tasks()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What a dense kernel computes. Made when asked for: a kernel that takes a whole phase never does."""
        return self._blocks_and_seen[0]

    @cached_property
    def _blocks_and_seen(self) -> tuple[tuple[Block, ...], NDArray[np.bool_]]:
        """The blocks, and which of the queries have an output after them."""
        if self.previous is None:
            seen = np.zeros(self.num_queries, dtype=np.bool_)
        else:
            seen = self.previous._blocks_and_seen[1].copy()
        blocks = []
        for task in self.tasks:
            for start, stop, key_start, key_stop, kind, shift in _blocks_of(task, self.window):
                here = seen[start:stop]
                blocks.append(Block(start, stop, key_start, key_stop, kind, shift, first=not here.any()))
                here[:] = True
        return tuple(blocks), seen

    @cached_property
    def parts(self) -> Parts:
        """Of all queries after this phase, by phases."""
        tables = ((phase.table.queries, phase.first) for phase in self._up_to_here())
        return parts_of(((expanded(rows[:, 0], rows[:, 1]), first) for rows, first in tables), self.num_queries)

    @cached_property
    def parts_by_block(self) -> Parts:
        """Of all queries after this phase, by blocks."""
        blocks = (block for phase in self._up_to_here() for block in phase.blocks)
        return parts_of(((slice(b.query_start, b.query_stop), b.first) for b in blocks), self.num_queries)

    def _up_to_here(self) -> list[Phase]:
        """From the first one to this."""
        phases = [self]
        while (previous := phases[-1].previous) is not None:
            phases.append(previous)
        return phases[::-1]

    @cached_property
    def call(self) -> KernelCall:
        """All tasks; there must be one."""
        return one_call(self.table)

    @cached_property
    def calls_by_length(self) -> tuple[KernelCall, ...]:
        """The same for a kernel that copies keys: short tasks apart from long ones."""
        return by_length(self.call)

    @cached_property
    def calls_apart(self) -> tuple[KernelCall, ...]:
        """The same for a kernel that writes gradients where keys lie: in no call two tasks have a key in common, and
        short tasks are apart from long ones."""
        return tuple(part for call in calls_apart(self.call) for part in by_length(call))

    @cached_property
    def rounded_calls(self) -> tuple[RoundedCall, ...]:
        """As `calls_apart` for a kernel that keeps a plan for each size, so of all lengths together."""
        return tuple(rounded(call) for call in calls_apart(self.call))


class PhaseBuilder:
    """Makes the phases of one rank, in the order in which they will run.

    num_queries: rows of the shard.
    """

    def __init__(self, num_queries: int, window: int | None) -> None:
        self._num_queries = num_queries
        self._seen: NDArray[np.bool_] | bool = False  # of each row, or of all
        self._window = window
        self._last: Phase | None = None

    def phase(self, tasks: Iterable[Task] | TaskTable, *, num_keys: int, causal: bool) -> Phase:
        """`causal` as in `Phase`."""
        table = tasks if isinstance(tasks, TaskTable) else TaskTable.of(tasks)
        self._last = Phase(
            table=table,
            causal=causal,
            window=self._window,
            first=not self._mark(table),
            num_queries=self._num_queries,
            num_keys=num_keys,
            previous=self._last,
        )
        return self._last

    def _mark(self, table: TaskTable) -> bool:
        """Whether any query of these tasks was there before. A task's queries are no other's."""
        if not len(table) or self._seen is True:
            return bool(len(table))
        if self._seen is False:
            if table.query_lengths.sum() == self._num_queries:
                self._seen = True
                return False
            self._seen = np.zeros(self._num_queries, dtype=np.bool_)
        assert isinstance(self._seen, np.ndarray)
        rows = expanded(table.queries[:, 0], table.queries[:, 1])
        were_seen = bool(self._seen[rows].any())
        self._seen[rows] = True
        return were_seen


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
