"""Stage 1: documents to data-parallel replicas, by total work and the warm-up of each pipeline.

Two replicas of 4 stages, two documents of work 8 and 22 of work 1; a replica counts as its total + 3 x its longest::

    8 and eleven 1 | 8 and eleven 1     19 + 24 = 43, 19 + 24 = 43     longest first
    8 8            | the 1              16 + 24 = 40, 22 +  3 = 25     some random orders
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wlb.packing.makespan.moves import Draws
from wlb.packing.makespan.work import Int64

_HEAD = 256
_BUNDLES = 128
_TAIL = 8  # a replica


def dispatch(total: Int64, num_replicas: int, *, num_stages: int, restarts: int, seed: int) -> list[list[int]]:
    """Documents of each replica, longest first, for a small max over replicas of total + (num_stages - 1) x longest.

    total: (D,) work of each document, falling. restarts: random orders to try beside longest-first.

    In each order every document goes to the replica that is then least; the best order is taken, the first of
    equals. (Hydraulis, arXiv 2412.07894: 50 random orders in place of an integer program that was too slow.)
    """
    if num_replicas == 1:
        return [list(range(len(total)))]
    edges = _edges(total, num_replicas)
    work = np.diff(np.concatenate([[0], np.cumsum(total)])[edges])  # (I,) items
    longest = total[edges[:-1]]
    orders = _orders(len(work), len(work) - _num_last(total, num_replicas), restarts=restarts, seed=seed)
    owner, values = _greedy(work, longest, orders, num_replicas, warm_up=num_stages - 1)
    best = int(values.argmin())
    of_document = np.repeat(owner[:, best], np.diff(edges))
    return [np.flatnonzero(of_document == r).tolist() for r in range(num_replicas)]


def _num_last(total: Int64, num_replicas: int) -> int:
    """Shortest documents that come last in every order; 0 where documents are few enough to be shuffled one by one."""
    num_last = _TAIL * num_replicas
    return num_last if len(total) > _HEAD + _BUNDLES + num_last else 0


def _edges(total: Int64, num_replicas: int) -> NDArray[np.intp]:
    """(I + 1,) where items begin: a document each, or, where those are many, bundles of neighbours in the middle.

    DEVIATION from the paper, which shuffles every document: thousands one by one, 50 times over, would take as
    long as the rest of planning together. Bundles are of about equal work, and the shortest documents, one by one
    and last, even out what bundles leave.
    """
    num_last = _num_last(total, num_replicas)
    if num_last == 0:
        return np.arange(len(total) + 1)
    stop = len(total) - num_last
    work = np.cumsum(total[_HEAD:stop])
    inner = np.searchsorted(work, work[-1] * np.arange(1, _BUNDLES) // _BUNDLES)
    return np.unique(np.concatenate([np.arange(_HEAD + 1), _HEAD + inner, np.arange(stop, len(total) + 1)]))


def _orders(num_items: int, num_shuffled: int, *, restarts: int, seed: int) -> NDArray[np.intp]:
    """(I, 1 + restarts) the order given, and shuffles of its first `num_shuffled` items."""
    orders = np.repeat(np.arange(num_items)[:, None], 1 + restarts, axis=1)
    if restarts:
        keys = Draws(seed).below(1 << 62, num_shuffled * restarts).reshape(num_shuffled, restarts)
        orders[:num_shuffled, 1:] = np.argsort(keys, axis=0, kind="stable")
    return orders


def _greedy(
    work: Int64, longest: Int64, orders: NDArray[np.intp], num_replicas: int, *, warm_up: int
) -> tuple[NDArray[np.intp], Int64]:
    """(I, K) replica of each item and (K,) value for each of K orders, all orders at once."""
    num_orders = orders.shape[1]
    loads = np.zeros((num_orders, num_replicas), dtype=np.int64)
    tops = np.zeros_like(loads)  # warm-up of each replica
    owner = np.empty_like(orders)
    each = np.arange(num_orders)
    for items in orders:
        added = work[items][:, None]
        raised = np.maximum(tops, warm_up * longest[items][:, None])
        values = loads + added
        values += raised
        chosen = values.argmin(axis=1)
        owner[items, each] = chosen
        loads[each, chosen] += added[:, 0]
        tops[each, chosen] = raised[each, chosen]
    value: Int64 = (loads + tops).max(axis=1)
    return owner, value
