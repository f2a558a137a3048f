"""In how many parts each query gets its output, and which outputs must be kept exact while they are merged.

A query's keys may lie in several buffers: its own beside what is gathered, or one of each rank under a ring. Each phase
that has the query gives one part of its output; a dense kernel gives one for each of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from wlb.sharding.rows import Int64, Rows

Part = tuple[slice | Int64, bool]
"""Rows of queries, and whether it is the first part of all of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Of all queries.

    most: parts of one query.
    begins_late: whether a part that is added to others is the first of some of its queries.
    added: rows of queries to which a part is added. places: (T,) of each query its place among them, 0 elsewhere.
    stores_first: whether no part that is the first of its queries comes after one that is added.
    """

    most: int
    begins_late: bool
    added: Rows
    places: Rows
    stores_first: bool


def parts_of(parts: Iterable[Part], num_queries: int) -> Parts:
    """In the order in which they come."""
    counts, is_added = np.zeros(num_queries, dtype=np.int64), np.zeros(num_queries, dtype=np.bool_)
    begins_late, any_added, stores_first = False, False, True
    for rows, first in parts:
        if not counts[rows].size:
            continue
        if first:
            stores_first = stores_first and not any_added
        else:
            any_added = True
            begins_late = begins_late or not counts[rows].all()
            is_added[rows] = True
        counts[rows] += 1
    return Parts(
        most=int(counts.max(initial=0)),
        begins_late=begins_late,
        added=Rows(np.flatnonzero(is_added)),
        places=Rows(np.maximum(np.cumsum(is_added) - 1, 0)),
        stores_first=stores_first,
    )
