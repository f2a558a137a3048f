"""Runs of queries with their keys, in arrays: thousands of them under a plan that cuts every document."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from wlb.sharding.rows import Int64


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


@dataclass(frozen=True, slots=True, eq=False)
class TaskTable:
    """Tasks in columns.

    queries: (tasks, 3) int64 start, stop, position. keys: (pieces, 3) likewise, of all tasks back to back.
    edges: (tasks + 1,) where the pieces of each task begin, leading 0.
    """

    queries: Int64
    keys: Int64
    edges: Int64

    def __len__(self) -> int:
        return len(self.queries)

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> TaskTable:
        """From objects."""
        tasks = tuple(tasks)
        keys = [(k.start, k.stop, k.position) for t in tasks for k in t.keys]
        return cls(
            np.array([(t.start, t.stop, t.position) for t in tasks], dtype=np.int64).reshape(-1, 3),
            np.array(keys, dtype=np.int64).reshape(-1, 3),
            np.cumsum([0, *(len(t.keys) for t in tasks)], dtype=np.int64),
        )

    @classmethod
    def of_single_pieces(cls, queries: Int64, keys: Int64) -> TaskTable:
        """Each task with one piece of keys."""
        return cls(queries, keys, np.arange(len(queries) + 1))

    def tasks(self) -> tuple[Task, ...]:
        """As objects."""
        keys = [Keys(*piece) for piece in self.keys.tolist()]
        edges = self.edges.tolist()
        return tuple(
            Task(start, stop, position, tuple(keys[edges[i] : edges[i + 1]]))
            for i, (start, stop, position) in enumerate(self.queries.tolist())
        )

    @property
    def query_lengths(self) -> Int64:
        """(tasks,)"""
        return self.queries[:, 1] - self.queries[:, 0]

    @property
    def key_lengths(self) -> Int64:
        """(tasks,) rows of all pieces of each task."""
        ends = np.concatenate([[0], np.cumsum(self.keys[:, 1] - self.keys[:, 0])])
        lengths: Int64 = np.diff(ends[self.edges])
        return lengths

    @property
    def are_one_block_each(self) -> bool:
        """Whether, where no window cuts, each task is one block: one piece of keys, all earlier or all its own."""
        if len(self.keys) != len(self.queries):
            return False
        first, last = self.keys[:, 2], self.keys[:, 2] + self.keys[:, 1] - self.keys[:, 0]
        position = self.queries[:, 2]
        return bool(((first >= position) | (last <= position)).all())
