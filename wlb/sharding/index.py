"""What each rank sends, receives and computes under a plan: made once per plan, rank and window, in integers.

Only keys and values that a rank needs and does not hold travel. Both sides derive the same rows in the same order
from the plan, so nothing about sizes is ever sent. Two ranks, one document of 4 tokens cut head-tail: rank 0 holds
positions 0 and 3, rank 1 holds 1 and 2. Rank 0 receives 1 and 2; rank 1 receives 0; nobody receives 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from wlb.sharding.calls import LEAST_ROWS
from wlb.sharding.overlaps import Overlaps, Spans, overlaps, spans_of, wanted_of
from wlb.sharding.phases import Phase, PhaseBuilder
from wlb.sharding.plan import ShardPlan
from wlb.sharding.rows import Int64, Rows
from wlb.sharding.tasks import TaskTable

GATHER_SHARE = 1 / 3
"""Of the local work, beside the gather of the backward pass: as keys come in 16 bits and gradients go back in 32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GatherIndex:
    """One exchange of all that is missing, into a buffer with each document's keys in order.

    local: every span against itself; under a window only the spans that need no other keys.
    local_parts: the same in two phases, for a backward pass with two transfers to hide; in one where there are none.
    remote: the rest, on the gathered buffer.
    exchanges: whether any rank receives anything: the exchange is a collective.
    send_rows: local rows for each rank, back to back. send_counts: how many each.
    places: rows of the gathered buffer where received rows go, by sender. receive_counts: rows from each rank.
    own_rows, own_places: local rows that are copied into the gathered buffer, and where.
    """

    local: Phase
    local_parts: tuple[Phase, ...]
    remote: Phase
    exchanges: bool
    send_rows: Rows
    send_counts: tuple[int, ...]
    places: Rows
    receive_counts: tuple[int, ...]
    own_rows: Rows
    own_places: Rows

    @property
    def gathered_rows(self) -> int:
        return self.remote.num_keys

    @property
    def arrives_in_order(self) -> bool:
        """Whether what is received is the gathered buffer as it comes."""
        return len(self.places) == self.gathered_rows and self.places.are_all_in_order

    @property
    def exchanged_rows(self) -> tuple[Rows, ...]:
        return (self.send_rows, self.places, self.own_rows, self.own_places)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (self.local, self.remote)


@dataclass(frozen=True, kw_only=True, eq=False)
class RingStep:
    """Rows to the rank `distance` further on, rows from the one as far back, and what they are needed for."""

    distance: int
    send_rows: Rows
    phase: Phase

    @property
    def num_received(self) -> int:
        return self.phase.num_keys

    @property
    def is_idle(self) -> bool:
        return not len(self.send_rows) and not self.num_received


@dataclass(frozen=True, kw_only=True, eq=False)
class RingIndex:
    """local: on the rank's own keys, each span against itself and against the earlier ones of its document.

    steps: of distance 1, 2, ..., cp_size - 1.
    """

    local: tuple[Phase, ...]
    steps: tuple[RingStep, ...]

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (*self.local, *(s.phase for s in self.steps))


def gather_index(plan: ShardPlan, rank: int, window: int | None) -> GatherIndex:
    """Of `rank` under `plan`, kept as long as the plan lives."""
    return _kept(plan, ("gather", rank, window), lambda: _gather_index(plan, rank, window))


def ring_index(plan: ShardPlan, rank: int, window: int | None) -> RingIndex:
    """Of `rank` under `plan`, kept as long as the plan lives."""
    return _kept(plan, ("ring", rank, window), lambda: _ring_index(plan, rank, window))


def _gather_index(plan: ShardPlan, rank: int, window: int | None) -> GatherIndex:
    held, wanted = _spans(plan), _wanted(plan, window)
    mine, intervals = held.of_rank(rank), wanted.of_rank(rank)
    places = _starts_of(intervals.lengths)
    arriving = overlaps(intervals.at_every_rank(), held)  # (rank, interval) with spans
    place = places[arriving.first % max(len(intervals), 1)] + arriving.from_first
    place_stop, own = place + arriving.lengths, held.ranks[arriving.second] == rank
    own_row = held.rows[arriving.second[own]] + arriving.from_second[own]
    sent_rows, sent_stops, sent_to = _sent(plan, rank, window)

    low, end = _visible(mine, window)
    alone, beyond = (low == mine.starts) | (window is None), low < mine.starts
    queries = np.stack([mine.rows, mine.rows + mine.lengths, mine.starts], axis=1)
    at = mine.at[beyond] - mine.starts[beyond] + low[beyond]
    interval = np.searchsorted(intervals.at, at, side="right") - 1
    first_key = places[interval] + at - intervals.at[interval]
    keys = np.stack([first_key, first_key + end[beyond] - low[beyond], low[beyond]], axis=1)
    builder = PhaseBuilder(plan.rank_tokens, window)
    local = builder.phase(
        TaskTable.of_single_pieces(queries[alone], queries[alone]), num_keys=plan.rank_tokens, causal=True
    )
    return GatherIndex(
        local=local,
        local_parts=_parts(local) if len(sent_rows) or not own.all() else (local,),
        remote=builder.phase(
            TaskTable.of_single_pieces(queries[beyond], keys),
            num_keys=int(intervals.lengths.sum()),
            causal=window is not None,
        ),
        exchanges=len(wanted) > 0,
        send_rows=Rows.between(sent_rows, sent_stops),
        send_counts=_sums(sent_stops - sent_rows, sent_to, plan.cp_size),
        places=Rows.between(place[~own], place_stop[~own]),
        receive_counts=_sums(arriving.lengths[~own], held.ranks[arriving.second[~own]], plan.cp_size),
        own_rows=Rows.between(own_row, own_row + arriving.lengths[own]),
        own_places=Rows.between(place[own], place_stop[own]),
    )


def _parts(local: Phase) -> tuple[Phase, ...]:
    """The shortest tasks, of about `GATHER_SHARE` of the work, and the others; in one where one task has most of it."""
    queries = local.table.queries
    # Kernels compute whole tiles.
    num_rows = np.maximum(local.table.query_lengths, LEAST_ROWS)
    work = num_rows * (num_rows if local.window is None else np.minimum(num_rows, local.window))
    order = np.argsort(work, kind="stable")
    done = np.concatenate([[0], np.cumsum(work[order])])
    count = int(np.argmin(np.abs(done - GATHER_SHARE * done[-1])))
    if count in (0, len(queries)):
        return (local,)
    is_first = np.zeros(len(queries), dtype=np.bool_)
    is_first[order[:count]] = True
    return tuple(
        PhaseBuilder(local.num_queries, local.window).phase(
            TaskTable.of_single_pieces(rows, rows), num_keys=local.num_keys, causal=True
        )
        for rows in (queries[is_first], queries[~is_first])
    )


def _ring_index(plan: ShardPlan, rank: int, window: int | None) -> RingIndex:
    size, held = plan.cp_size, _spans(plan)
    mine, intervals = held.of_rank(rank), _wanted(plan, window).of_rank(rank)
    builder = PhaseBuilder(plan.rank_tokens, window)
    queries = np.stack([mine.rows, mine.rows + mine.lengths, mine.starts], axis=1)
    local = [
        builder.phase(TaskTable.of_single_pieces(queries, queries), num_keys=plan.rank_tokens, causal=True),
    ]
    seen = mine.before(_visible(mine, window)[0])
    earlier = _tables(queries, overlaps(seen, mine), mine.rows, mine, 1)[0]
    if len(earlier):
        local.append(builder.phase(earlier, num_keys=plan.rank_tokens, causal=False))

    arriving = overlaps(intervals.at_every_rank(), held)
    arrived = arriving.as_spans(held)
    # Rows of the buffer of each sender.
    edges = np.searchsorted(arrived.ranks, np.arange(size + 1))
    before = np.concatenate([[0], np.cumsum(arrived.lengths)])
    rows = before[:-1] - before[edges[:-1]][arrived.ranks]
    tables = _tables(queries, overlaps(seen.at_every_rank(), arrived), rows, arrived, size)
    sent_rows, sent_stops, sent_to = _sent(plan, rank, window)
    sent_edges = np.searchsorted(sent_to, np.arange(size + 1))
    steps = []
    for distance in range(1, size):
        sender, receiver = (rank - distance) % size, (rank + distance) % size
        sent = slice(sent_edges[receiver], sent_edges[receiver + 1])
        steps.append(
            RingStep(
                distance=distance,
                send_rows=Rows.between(sent_rows[sent], sent_stops[sent]),
                phase=builder.phase(
                    tables[sender], num_keys=int(before[edges[sender + 1]] - before[edges[sender]]), causal=False
                ),
            )
        )
    return RingIndex(local=tuple(local), steps=tuple(steps))


def _tables(queries: Int64, seen: Overlaps, rows: Int64, pieces: Spans, size: int) -> list[TaskTable]:
    """By sender, each run of queries with all keys before it that it sees.

    seen: (rank, query) with pieces. rows: of each piece in the buffer of its sender.
    """
    key_rows = rows[seen.second] + seen.from_second
    keys = np.stack([key_rows, key_rows + seen.lengths, pieces.starts[seen.second] + seen.from_second], axis=1)
    num_queries = max(len(queries), 1)
    counts = np.bincount(seen.first, minlength=size * num_queries)
    edges = np.concatenate([[0], np.cumsum(counts)])
    tables = []
    for sender in range(size):
        begin, end = sender * num_queries, (sender + 1) * num_queries
        with_keys = np.flatnonzero(counts[begin:end])
        key_edges = edges[begin:end][with_keys]
        key_edges = np.append(key_edges, edges[end]) - edges[begin]
        tables.append(TaskTable(queries[with_keys], keys[edges[begin] : edges[end]], key_edges))
    return tables


def _sent(plan: ShardPlan, rank: int, window: int | None) -> tuple[Int64, Int64, Int64]:
    """First row, last row + 1 and receiver of each piece that leaves `rank`, by receiver, document and start."""
    wanted, mine = _wanted(plan, window), _spans(plan).of_rank(rank)
    leaving = overlaps(wanted.at_rank(rank), mine)
    receivers = wanted.ranks[leaving.first]
    rows = mine.rows[leaving.second] + leaving.from_second
    others = receivers != rank
    return rows[others], (rows + leaving.lengths)[others], receivers[others]


def _visible(spans: Spans, window: int | None) -> tuple[Int64, Int64]:
    """Keys [low, end) of the same document that a span needs beside its own block, its own ones under a window."""
    if window is None:
        return np.zeros_like(spans.starts), spans.starts
    return np.maximum(spans.starts - window + 1, 0), spans.stops


def _starts_of(lengths: Int64) -> Int64:
    """Where each begins when they lie back to back."""
    starts: Int64 = np.cumsum(lengths) - lengths
    return starts


def _sums(numbers: Int64, groups: Int64, num_groups: int) -> tuple[int, ...]:
    sums = np.zeros(num_groups, dtype=np.int64)
    np.add.at(sums, groups, numbers)
    return tuple(sums.tolist())


def _spans(plan: ShardPlan) -> Spans:
    return _kept(plan, ("spans",), lambda: spans_of(plan))


def _wanted(plan: ShardPlan, window: int | None) -> Spans:
    def build() -> Spans:
        spans = _spans(plan)
        return wanted_of(spans, *_visible(spans, window))

    return _kept(plan, ("wanted", window), build)


IndexKind = Literal["all_gather", "p2p"]
Index = GatherIndex | RingIndex


def visible_window(plan: ShardPlan, window: int | None) -> int | None:
    """None where it hides no key of any document."""
    return None if window is not None and window >= max(plan.lengths, default=1) else window


def prepare(plan: ShardPlan, rank: int, uses: Iterable[tuple[IndexKind, int | None]]) -> None:
    """Make what layers of these communication types and windows will look up."""
    for kind, window in uses:
        of = gather_index if kind == "all_gather" else ring_index
        of(plan, rank, visible_window(plan, window))


def prepared(plan: ShardPlan) -> dict[tuple[object, ...], Index]:
    """All indexes that are kept for the plan: for an equal plan in another process, see `adopt`."""
    return {key: kept for key, kept in _store(plan).items() if isinstance(kept, GatherIndex | RingIndex)}


def adopt(plan: ShardPlan, indexes: Mapping[tuple[object, ...], Index]) -> None:
    """Keep the `prepared` indexes of an equal plan."""
    _store(plan).update(indexes)


_BY_PLAN: dict[int, tuple[weakref.ref[ShardPlan], dict[tuple[object, ...], object]]] = {}


def _store(plan: ShardPlan) -> dict[tuple[object, ...], object]:
    """By the plan's identity: comparing or hashing a plan would visit all its spans in every layer."""
    number = id(plan)
    entry = _BY_PLAN.get(number)
    if entry is None or entry[0]() is not plan:
        entry = (weakref.ref(plan, lambda _: _BY_PLAN.pop(number, None)), {})
        _BY_PLAN[number] = entry
    return entry[1]


def _kept[T](plan: ShardPlan, key: tuple[object, ...], build: Callable[[], T]) -> T:
    store = _store(plan)
    if key not in store:
        store[key] = build()
    return store[key]  # type: ignore[return-value]
