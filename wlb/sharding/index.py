"""What each rank sends, receives and computes under a plan: made once per plan, rank and window, in integers.

Only keys and values that a rank needs and does not hold travel. Both sides derive the same rows in the same order
from the plan, so nothing about sizes is ever sent. Two ranks, one document of 4 tokens cut head-tail: rank 0 holds
positions 0 and 3, rank 1 holds 1 and 2. Rank 0 receives 1 and 2; rank 1 receives 0; nobody receives 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from wlb.sharding.phases import Keys, Phase, PhaseBuilder, Task
from wlb.sharding.plan import ShardPlan
from wlb.sharding.rows import Rows, ranges

# By document: (start, stop, row of the first) of what a rank holds, or (start, stop, start) of what it wants.
_Pieces = Mapping[int, list[tuple[int, int, int]]]


@dataclass(frozen=True, kw_only=True)
class GatherIndex:
    """One exchange of all that is missing, into a buffer with each document's keys in order.

    local: every span against itself; under a window only the spans that need no other keys.
    remote: the rest, on the gathered buffer.
    exchanges: whether any rank receives anything: the exchange is a collective.
    rows_by_receiver: local rows for each rank. send_rows: the same, back to back. send_counts: how many each.
    places: rows of the gathered buffer where received rows go, by sender. receive_counts: rows from each rank.
    own_rows, own_places: local rows that are copied into the gathered buffer, and where.
    """

    local: Phase
    remote: Phase
    exchanges: bool
    rows_by_receiver: tuple[Rows, ...]
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
    def phases(self) -> tuple[Phase, ...]:
        return (self.local, self.remote)


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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
    held = _held(plan)
    wanted = [_wanted(spans, window) for spans in held]
    # (document, interval) -> first row of the gathered buffer.
    gathered: dict[int, list[tuple[int, int, int]]] = {}
    num_gathered = 0
    for document, intervals in wanted[rank].items():
        for start, stop, _ in intervals:
            gathered.setdefault(document, []).append((start, stop, num_gathered))
            num_gathered += stop - start

    sends = [list(_overlaps(wanted[r], held[rank])) if r != rank else [] for r in range(plan.cp_size)]
    received = [list(_overlaps(gathered, spans)) if r != rank else [] for r, spans in enumerate(held)]
    own = list(_overlaps(gathered, held[rank]))

    local, remote = [], []
    for document, spans in held[rank].items():
        for start, stop, row in spans:
            low = _lowest_key(start, window)
            if low == start or window is None:
                local.append(_self_task(start, stop, row))
            if low < start:
                first, _, place = next(g for g in gathered[document] if g[0] <= low < g[1])
                end = start if window is None else stop
                keys = Keys(place + low - first, place + end - first, low)
                remote.append(Task(row, row + stop - start, start, (keys,)))
    builder = PhaseBuilder(plan.rank_tokens, window)
    return GatherIndex(
        local=builder.phase(local, num_keys=plan.rank_tokens, causal=True),
        remote=builder.phase(remote, num_keys=num_gathered, causal=window is not None),
        exchanges=any(wanted),
        rows_by_receiver=tuple(Rows(ranges((o.row, o.row + o.length) for o in peer)) for peer in sends),
        send_rows=Rows(ranges((o.row, o.row + o.length) for peer in sends for o in peer)),
        send_counts=tuple(sum(o.length for o in peer) for peer in sends),
        places=Rows(ranges((o.place, o.place + o.length) for peer in received for o in peer)),
        receive_counts=tuple(sum(o.length for o in peer) for peer in received),
        own_rows=Rows(ranges((o.row, o.row + o.length) for o in own)),
        own_places=Rows(ranges((o.place, o.place + o.length) for o in own)),
    )


def _ring_index(plan: ShardPlan, rank: int, window: int | None) -> RingIndex:
    held = _held(plan)
    mine = held[rank]
    wanted = [_wanted(spans, window) for spans in held]
    builder = PhaseBuilder(plan.rank_tokens, window)
    themselves = [_self_task(start, stop, row) for spans in mine.values() for start, stop, row in spans]
    local = [builder.phase(themselves, num_keys=plan.rank_tokens, causal=True)]
    earlier = list(_tasks(mine, mine, window))
    if earlier:
        local.append(builder.phase(earlier, num_keys=plan.rank_tokens, causal=False))
    steps = []
    for distance in range(1, plan.cp_size):
        sender, receiver = (rank - distance) % plan.cp_size, (rank + distance) % plan.cp_size
        sent = list(_overlaps(wanted[receiver], mine))
        received: dict[int, list[tuple[int, int, int]]] = {}
        num_received = 0
        for o in _overlaps(wanted[rank], held[sender]):
            received.setdefault(o.document, []).append((o.start, o.start + o.length, num_received))
            num_received += o.length
        steps.append(
            RingStep(
                distance=distance,
                send_rows=Rows(ranges((o.row, o.row + o.length) for o in sent)),
                phase=builder.phase(_tasks(mine, received, window), num_keys=num_received, causal=False),
            )
        )
    return RingIndex(local=tuple(local), steps=tuple(steps))


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Positions [start, start + length) of a document; `row` where they are held, `place` where they are wanted."""

    document: int
    start: int
    length: int
    row: int
    place: int


def _overlaps(wanted: _Pieces, held: _Pieces) -> Iterator[_Overlap]:
    for document, intervals in wanted.items():
        for start, stop, place in intervals:
            for first, end, row in held.get(document, ()):
                low, high = max(start, first), min(stop, end)
                if low < high:
                    yield _Overlap(document, low, high - low, row + low - first, place + low - start)


def _held(plan: ShardPlan) -> list[dict[int, list[tuple[int, int, int]]]]:
    def build() -> list[dict[int, list[tuple[int, int, int]]]]:
        held = []
        for spans in plan.ranks:
            pieces: dict[int, list[tuple[int, int, int]]] = {}
            row = 0
            for s in spans:
                pieces.setdefault(s.document, []).append((s.start, s.stop, row))
                row += s.num_tokens
            held.append(pieces)
        return held

    return _kept(plan, ("held",), build)


def _lowest_key(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _wanted(held: _Pieces, window: int | None) -> _Pieces:
    """Keys before each span that needs any, and under a window the span's own, so that they lie in one piece."""
    wanted = {}
    for document, spans in held.items():
        joined: list[tuple[int, int, int]] = []
        for start, stop, _ in spans:
            low, end = _lowest_key(start, window), start if window is None else stop
            if low == start:
                continue
            if joined and low <= joined[-1][1]:
                low = joined.pop()[0]
            joined.append((low, end, low))
        if joined:
            wanted[document] = joined
    return wanted


def _self_task(start: int, stop: int, row: int) -> Task:
    end = row + stop - start
    return Task(row, end, start, (Keys(row, end, start),))


def _tasks(queries: _Pieces, keys: _Pieces, window: int | None) -> Iterator[Task]:
    """Each span of queries with all keys before it that it sees."""
    for document, spans in queries.items():
        for start, stop, row in spans:
            low = _lowest_key(start, window)
            seen = tuple(
                Keys(place + max(low, first) - first, place + min(start, end) - first, max(low, first))
                for first, end, place in keys.get(document, ())
                if max(low, first) < min(start, end)
            )
            if seen:
                yield Task(row, row + stop - start, start, seen)


_BY_PLAN: dict[int, tuple[weakref.ref[ShardPlan], dict[tuple[object, ...], object]]] = {}


def _kept[T](plan: ShardPlan, key: tuple[object, ...], build: Callable[[], T]) -> T:
    """Kept by the plan's identity: comparing or hashing a plan would visit all its spans in every layer."""
    number = id(plan)
    entry = _BY_PLAN.get(number)
    if entry is None or entry[0]() is not plan:
        entry = (weakref.ref(plan, lambda _: _BY_PLAN.pop(number, None)), {})
        _BY_PLAN[number] = entry
    if key not in entry[1]:
        entry[1][key] = build()
    return entry[1][key]  # type: ignore[return-value]
