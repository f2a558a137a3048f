"""What a variable-length kernel is called with: where each task's queries and keys lie, and how many they are.

A kernel that takes offsets reads keys where they are, so a head and a tail of one document may name the same rows
twice. Forward may do that in one call. Backward may not: a kernel writes the gradient of a task's keys and adds
nothing, so the second would overwrite the first. Tasks are therefore dealt to as few calls as keep the keys of each
call apart: one for most phases, two for heads and tails.

Tasks with keys [0, 4), [0, 9) and [9, 12)::

    call 0    [0, 4)  [9, 12)
    call 1    [0, 9)

Kernels that keep a plan for each size they have seen (cuDNN does) would build one for nearly every micro-batch. For
them the number of tasks and the longest of them are rounded up to powers of two; tasks that fill up have no rows. All
others launch blocks for the longest task in every task, so for them nothing is rounded, and short tasks go to calls of
their own (see `length_classes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wlb.sharding.length_classes import length_classes
from wlb.sharding.rows import Int64, Rows
from wlb.sharding.tasks import TaskTable

LEAST_ROWS = 128
"""Of the longest task, after rounding: a kernel computes whole tiles of about that many rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelCall:
    """Tasks of one call; rows of queries do not overlap, and both starts do not decrease.

    queries, keys: (tasks, 2) int64 start, stop; keys of one buffer.
    """

    queries: Int64
    keys: Int64

    @property
    def num_tasks(self) -> int:
        """With those that fill up."""
        return len(self.queries)

    @cached_property
    def query_rows(self) -> Rows:
        """Of all tasks, in their order."""
        return Rows.between(self.queries[:, 0], self.queries[:, 1])

    @cached_property
    def key_rows(self) -> Rows:
        """Of all tasks, in their order."""
        return Rows.between(self.keys[:, 0], self.keys[:, 1])

    @cached_property
    def query_starts(self) -> Rows:
        """(num_tasks + 1,) int32 first row of each, and the last row's successor."""
        return self._starts(self.queries)

    @cached_property
    def key_starts(self) -> Rows:
        """(num_tasks + 1,) int32, likewise."""
        return self._starts(self.keys)

    @cached_property
    def query_lengths(self) -> Rows:
        """(num_tasks,) int32 rows of each."""
        return self._lengths(self.queries)

    @cached_property
    def key_lengths(self) -> Rows:
        """(num_tasks,) int32 rows of each."""
        return self._lengths(self.keys)

    @cached_property
    def query_edges(self) -> Rows:
        """(num_tasks + 1,) int32 cumulative lengths, leading 0."""
        return cumulative(self.query_lengths.numbers)

    @cached_property
    def key_edges(self) -> Rows:
        """(num_tasks + 1,) int32 cumulative lengths, leading 0."""
        return cumulative(self.key_lengths.numbers)

    @cached_property
    def most_queries(self) -> int:
        """Of one task."""
        return longest(self.queries)

    @cached_property
    def most_keys(self) -> int:
        """Of one task."""
        return longest(self.keys)

    @cached_property
    def keys_are_queries(self) -> bool:
        """Whether each task has as many keys as queries: then both corners of its scores are on the diagonal."""
        return np.array_equal(self.queries[:, 1] - self.queries[:, 0], self.keys[:, 1] - self.keys[:, 0])

    @cached_property
    def query_places(self) -> tuple[Rows, Rows]:
        """Of each of `query_rows` its task, and its number in it."""
        return places(self.queries[:, 1] - self.queries[:, 0])

    def _starts(self, ranges: Int64) -> Rows:
        starts = np.full(self.num_tasks + 1, ranges[-1, 1], dtype=np.int32)
        starts[: len(ranges)] = ranges[:, 0]
        return Rows(starts)

    def _lengths(self, ranges: Int64) -> Rows:
        lengths = np.zeros(self.num_tasks, dtype=np.int32)
        lengths[: len(ranges)] = ranges[:, 1] - ranges[:, 0]
        return Rows(lengths)


class RoundedCall(KernelCall):
    """The same, for kernels that keep a plan for each size: see the module."""

    @property
    def num_tasks(self) -> int:
        return bucket(len(self.queries))

    @cached_property
    def most_queries(self) -> int:
        return bucket(longest(self.queries), LEAST_ROWS)

    @cached_property
    def most_keys(self) -> int:
        return bucket(longest(self.keys), LEAST_ROWS)


def one_call(table: TaskTable) -> KernelCall:
    """All tasks, whatever keys they share. There must be a task, and the keys of each must lie in one run."""
    first, last = table.edges[:-1], table.edges[1:] - 1
    keys = np.stack((table.keys[first, 0], table.keys[last, 1]), axis=1)
    follows = table.keys[1:, 0] == table.keys[:-1, 1]
    follows[table.edges[1:-1] - 1] = True  # the next piece is another task's
    assert follows.all(), "the pieces of a task's keys must follow each other in their buffer"
    return KernelCall(queries=table.queries[:, :2], keys=keys)


def calls_apart(call: KernelCall) -> tuple[KernelCall, ...]:
    """The same tasks in as few calls as there can be whose keys do not overlap.

    By first fit, which for intervals in the order of their starts needs no more calls than one key is seen by tasks.
    """
    numbers = _numbers_in_groups(call)
    if numbers is None:
        numbers = _first_fit(call)
    return _divided(call, numbers)


def by_length(call: KernelCall) -> tuple[KernelCall, ...]:
    """The same tasks, short ones apart from long ones: see `length_classes`."""
    queries, keys = call.queries, call.keys
    return _divided(call, length_classes(queries[:, 1] - queries[:, 0], keys[:, 1] - keys[:, 0]))


def rounded(call: KernelCall) -> RoundedCall:
    """The same tasks, for a kernel that keeps a plan for each size."""
    return RoundedCall(queries=call.queries, keys=call.keys)


def _divided(call: KernelCall, numbers: Int64) -> tuple[KernelCall, ...]:
    """numbers: (tasks,) in which of the calls each is; itself where they are all in the first."""
    if not numbers.any():
        return (call,)
    return tuple(
        KernelCall(queries=call.queries[numbers == n], keys=call.keys[numbers == n]) for n in range(numbers.max() + 1)
    )


def _numbers_in_groups(call: KernelCall) -> Int64 | None:
    """(tasks,) call of each, where tasks come in groups that share keys all with all, as those of one document do.

    None where they do not, which only a sliding window brings about.
    """
    starts, stops = call.keys.T
    if (call.queries[1:, 0] < call.queries[:-1, 1]).any() or (starts[1:] < starts[:-1]).any():
        return None
    opens = np.concatenate(([True], starts[1:] >= np.maximum.accumulate(stops)[:-1]))
    firsts = np.flatnonzero(opens)
    if (np.maximum.reduceat(starts, firsts) >= np.minimum.reduceat(stops, firsts)).any():
        return None
    numbers: Int64 = np.arange(len(opens)) - firsts[np.cumsum(opens) - 1]
    return numbers


def _first_fit(call: KernelCall) -> Int64:
    """(tasks,) call of each."""
    ends: list[tuple[int, int]] = []
    numbers = []
    for (query_start, query_stop), (key_start, key_stop) in zip(call.queries.tolist(), call.keys.tolist(), strict=True):
        fits = (n for n, (query, key) in enumerate(ends) if query <= query_start and key <= key_start)
        number = next(fits, len(ends))
        ends[number : number + 1] = [(query_stop, key_stop)]
        numbers.append(number)
    return np.array(numbers, dtype=np.int64)


def longest(ranges: Int64) -> int:
    """Of (tasks, 2) start, stop."""
    return int((ranges[:, 1] - ranges[:, 0]).max())


def bucket(count: int, least: int = 1) -> int:
    """The next power of two, or `least`.

    >>> [bucket(n) for n in (1, 2, 3, 64, 65)], bucket(5, 128)
    ([1, 2, 4, 64, 128], 128)
    """
    return max(least, 1 << (count - 1).bit_length())


def cumulative(lengths: Sequence[int] | np.ndarray) -> Rows:
    """(n + 1,) int32, leading 0."""
    edges = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=edges[1:])
    return Rows(edges)


def places(lengths: Int64) -> tuple[Rows, Rows]:
    """Of each row of runs of these lengths, back to back: which run, and where in it."""
    runs = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return Rows(runs), Rows(np.arange(len(runs)) - starts[runs])
