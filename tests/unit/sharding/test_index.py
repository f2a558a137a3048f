"""What is sent and where it lands, by literals."""

from __future__ import annotations

import gc
import pickle
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.sharding import SHARDERS, Sharding, index
from wlb.sharding.index import adopt, gather_index, prepare, prepared, ring_index, visible_window
from wlb.sharding.phases import Phase
from wlb.sharding.plan import ShardPlan, plan_of_chunks
from wlb.sharding.rows import Rows
from wlb.sharding.tasks import Keys, Task


def _head_tail() -> ShardPlan:
    """One document of 8 over 2 ranks: rank 0 holds 0 1 and 6 7, rank 1 holds 2 3 4 5."""
    return plan_of_chunks((8,), 2, [(0, 0, 0, 2), (1, 0, 2, 6), (0, 0, 6, 8)])


def _numbers(rows: Rows) -> list[int]:
    return rows.numbers.tolist()


def test_a_document_cut_head_tail() -> None:
    rank0, rank1 = (gather_index(_head_tail(), rank, None) for rank in (0, 1))
    # Rank 0's tail needs keys 0 to 5: its own 0 and 1, and 2 to 5 of rank 1.
    assert rank0.local.tasks == (Task(0, 2, 0, (Keys(0, 2, 0),)), Task(2, 4, 6, (Keys(2, 4, 6),)))
    assert rank0.remote.tasks == (Task(2, 4, 6, (Keys(0, 6, 0),)),)
    assert rank0.gathered_rows == 6
    assert (_numbers(rank0.own_rows), _numbers(rank0.own_places)) == ([0, 1], [0, 1])
    assert (_numbers(rank0.places), rank0.receive_counts) == ([2, 3, 4, 5], (0, 4))
    assert (_numbers(rank0.send_rows), rank0.send_counts) == ([0, 1], (0, 2))
    # Rank 1 needs keys 0 and 1, and nobody needs 6 and 7.
    assert rank1.remote.tasks == (Task(0, 4, 2, (Keys(0, 2, 0),)),)
    assert (_numbers(rank1.places), rank1.receive_counts) == ([0, 1], (2, 0))
    assert (_numbers(rank1.send_rows), rank1.send_counts) == ([0, 1, 2, 3], (4, 0))
    assert len(rank1.own_rows) == 0


def test_a_window_gathers_what_it_shows_with_the_queries_own() -> None:
    """A window of 3: query 6 sees 4 and 5 beside itself; rank 0's head needs nobody."""
    rank0 = gather_index(_head_tail(), 0, 3)
    assert rank0.local.tasks == (Task(0, 2, 0, (Keys(0, 2, 0),)),)
    assert rank0.remote.tasks == (Task(2, 4, 6, (Keys(0, 4, 4),)),)
    assert (_numbers(rank0.places), _numbers(rank0.own_rows), _numbers(rank0.own_places)) == ([0, 1], [2, 3], [2, 3])
    assert not any(gather_index(_head_tail(), rank, 1).exchanges for rank in (0, 1))


def test_a_ring_sends_straight_to_where_keys_are_needed() -> None:
    """Three ranks hold 2 tokens each of one document of 6: rank 2 needs both others, rank 0 nobody."""
    plan = plan_of_chunks((6,), 3, [(0, 0, 0, 2), (1, 0, 2, 4), (2, 0, 4, 6)])
    sent = {(r, s.distance): _numbers(s.send_rows) for r in range(3) for s in ring_index(plan, r, None).steps}
    assert sent == {(0, 1): [0, 1], (0, 2): [0, 1], (1, 1): [0, 1], (1, 2): [], (2, 1): [], (2, 2): []}
    received = {(r, s.distance): s.num_received for r in range(3) for s in ring_index(plan, r, None).steps}
    assert received == {(0, 1): 0, (0, 2): 0, (1, 1): 2, (1, 2): 0, (2, 1): 2, (2, 2): 2}
    # Rank 0 has nothing to do with step 2 but to send; rank 1 has nothing to do with it at all.
    assert [ring_index(plan, r, None).steps[1].is_idle for r in range(3)] == [False, True, False]


def test_an_index_is_made_once_and_dies_with_its_plan() -> None:
    plan, equal = _head_tail(), _head_tail()
    one = gather_index(plan, 0, None)
    assert gather_index(plan, 0, None) is one
    assert gather_index(plan, 0, 3) is not one
    assert gather_index(equal, 0, None) is not one
    kept = len(index._BY_PLAN)
    gone = weakref.ref(one.local)
    del plan, one
    gc.collect()
    assert gone() is None
    assert len(index._BY_PLAN) == kept - 1


def _held_by(plan: ShardPlan, rank: int) -> list[tuple[int, int]]:
    """(document, position) of each row."""
    return [(s.document, p) for s in plan.ranks[rank] for p in range(s.start, s.stop)]


def _seen(tokens: list[tuple[int, int]], window: int | None) -> set[tuple[int, int]]:
    """Keys that the first query of each run of `tokens` sees before itself, and those of the queries after it."""
    return {(d, k) for d, p in tokens for k in range(0 if window is None else max(0, p - window + 1), p)}


def _read(phase: Phase, buffer: list[tuple[int, int]], held: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Keys that tasks read, each checked to lie where its position says and to be of the queries' document."""
    read = set()
    for task in phase.tasks:
        document, first = held[task.start]
        assert first == task.position
        assert held[task.start : task.stop] == [(document, first + i) for i in range(task.stop - task.start)]
        for keys in task.keys:
            there = buffer[keys.start : keys.stop]
            assert there == [(document, keys.position + i) for i in range(keys.stop - keys.start)]
            read |= set(there)
    return read


@settings(deadline=None, max_examples=150)
@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 3, 7, 16, 29, 64]), min_size=1, max_size=6),
    cp_size=st.sampled_from([1, 2, 3, 4]),
    name=st.sampled_from(sorted(SHARDERS)),
    window=st.one_of(st.none(), st.integers(1, 40)),
)
def test_what_arrives_is_what_queries_see(lengths: list[int], cp_size: int, name: str, window: int | None) -> None:
    """Row by row: rows that others send land where tasks read them, and tasks read all that a query sees."""
    padding = -sum(lengths) % cp_size
    plan = Sharding(name=name, cp_size=cp_size).plan((*lengths, padding) if padding else lengths)
    window = visible_window(plan, window)
    held = [_held_by(plan, r) for r in range(cp_size)]
    gathers = [gather_index(plan, r, window) for r in range(cp_size)]
    rings = [ring_index(plan, r, window) for r in range(cp_size)]
    for rank in range(cp_size):
        index, ring, mine = gathers[rank], rings[rank], held[rank]
        buffer: list[tuple[int, int]] = [(-1, -1)] * index.gathered_rows
        arrived = []
        for sender in range(cp_size):
            begin = sum(gathers[sender].send_counts[:rank])
            rows = _numbers(gathers[sender].send_rows)[begin : begin + gathers[sender].send_counts[rank]]
            assert len(rows) == index.receive_counts[sender] * (sender != rank)
            arrived += [held[sender][row] for row in rows]
        for place, token in zip(_numbers(index.places), arrived, strict=True):
            buffer[place] = token
        for place, row in zip(_numbers(index.own_places), _numbers(index.own_rows), strict=True):
            buffer[place] = mine[row]
        assert (-1, -1) not in buffer
        needed = _seen([mine[t.start] for t in index.local.tasks + index.remote.tasks], window)
        own = _read(index.local, mine, mine)
        parts = [task for part in index.local_parts for task in part.tasks]
        assert sorted(parts, key=lambda t: t.start) == sorted(index.local.tasks, key=lambda t: t.start)
        assert _read(index.remote, buffer, mine) | own >= needed
        ring_keys = set().union(*(_read(phase, mine, mine) for phase in ring.local))
        for step in ring.steps:
            sender = (rank - step.distance) % cp_size
            rows = _numbers(rings[sender].steps[step.distance - 1].send_rows)
            ring_keys |= _read(step.phase, [held[sender][row] for row in rows], mine)
        assert ring_keys >= needed
        assert ring_keys == set(mine) | needed


def test_the_local_part_is_divided_by_work() -> None:
    """Document 0 is cut, 1 to 5 are whole on rank 0. Squares of lengths, of 128 rows at least, in units of 128^2:
    head and tail 4 each, then 9, 1, 1, 1, 1. A third of 21 is 7: the five short ones make 4, a head more 8."""
    spans = [(0, 0, 0, 256), (1, 0, 256, 1552), (0, 0, 1552, 1808), (0, 1, 0, 384)]
    plan = plan_of_chunks((1808, 384, 100, 100, 100, 100), 2, [*spans, *((0, d, 0, 100) for d in range(2, 6))])
    first, second = gather_index(plan, 0, None).local_parts
    assert [t.stop - t.start for t in first.tasks] == [256, 100, 100, 100, 100]
    assert [t.stop - t.start for t in second.tasks] == [256, 384]
    assert len(gather_index(plan, 1, None).local_parts) == 1, "one span has all the work"


def test_a_prepared_index_survives_a_process_boundary() -> None:
    """As arrays, and without the objects of the plan being made."""
    plan = Sharding(name="per_document", cp_size=4).plan((64, 1, 29, 34))
    prepare(plan, 1, [("all_gather", None), ("p2p", None), ("all_gather", 9), ("all_gather", 64)])
    indexes = pickle.loads(pickle.dumps(prepared(plan)))
    assert len(indexes) == 3  # a window of 64 hides nothing
    there = ShardPlan.from_table(plan.table, lengths=plan.lengths, cp_size=4)
    adopt(there, indexes)
    for window in (None, 9):
        one, two = gather_index(plan, 1, window), gather_index(there, 1, window)
        assert two in indexes.values()
        assert _numbers(one.places) == _numbers(two.places)
        assert one.local.tasks == two.local.tasks
        assert one.remote.blocks == two.remote.blocks
    assert [s.phase.tasks for s in ring_index(there, 1, None).steps] == [
        s.phase.tasks for s in ring_index(plan, 1, None).steps
    ]
    assert "ranks" not in vars(there)
    assert there == plan


def test_an_index_is_made_without_the_objects_of_a_plan() -> None:
    made = Sharding(name="hybrid", cp_size=3).plan((64, 1, 29, 2))
    plan = ShardPlan.from_table(made.table, lengths=made.lengths, cp_size=3)
    prepare(plan, 2, [("all_gather", None), ("p2p", 5)])
    assert not {"tasks", "ranks"} & {*vars(plan), *vars(gather_index(plan, 2, None).remote)}
