"""What is sent and where it lands, by literals."""

from __future__ import annotations

import gc
import weakref

from wlb.sharding import index
from wlb.sharding.index import gather_index, ring_index
from wlb.sharding.phases import Keys, Task
from wlb.sharding.plan import ShardPlan, plan_of_chunks
from wlb.sharding.rows import Rows


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
