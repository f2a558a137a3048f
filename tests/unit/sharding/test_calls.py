"""Which tasks go into one call, and what its arrays hold."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity.sharded_cases import padded, plan_named
from wlb.sharding import SHARDERS, calls
from wlb.sharding.calls import KernelCall, bucket, calls_apart, one_call, rounded
from wlb.sharding.index import gather_index, ring_index
from wlb.sharding.phases import Phase
from wlb.sharding.tasks import Keys, Task, TaskTable


def call_of(*tasks: tuple[int, int, int, int]) -> KernelCall:
    """Of (query start, query stop, key start, key stop)."""
    return one_call(TaskTable.of(Task(q, r, 50, (Keys(k, m, 0),)) for q, r, k, m in tasks))


def test_keys_that_two_tasks_see_are_written_by_two_calls() -> None:
    call = call_of((0, 2, 0, 4), (2, 5, 0, 9), (5, 6, 9, 12))
    first, second = calls_apart(call)
    assert first.keys.tolist() == [[0, 4], [9, 12]]
    assert first.queries.tolist() == [[0, 2], [5, 6]]
    assert second.keys.tolist() == [[0, 9]]
    assert second.queries.tolist() == [[2, 5]]


def test_tasks_that_share_nothing_stay_in_the_call_as_it_is() -> None:
    call = call_of((0, 2, 0, 4), (2, 5, 4, 9), (5, 6, 9, 12))
    assert calls_apart(call) == (call,)


def test_what_a_kernel_is_handed() -> None:
    """Three tasks; rounded, one without rows makes them four."""
    exact = call_of((0, 2, 0, 4), (3, 6, 4, 9), (6, 7, 20, 220))
    assert exact.num_tasks == 3
    assert exact.query_starts.numbers.tolist() == [0, 3, 6, 7]
    assert exact.key_lengths.numbers.tolist() == [4, 5, 200]
    assert (exact.most_queries, exact.most_keys) == (3, 200)
    call = rounded(exact)
    assert call.num_tasks == 4
    assert call.query_starts.numbers.tolist() == [0, 3, 6, 7, 7]
    assert call.key_starts.numbers.tolist() == [0, 4, 20, 220, 220]
    assert call.query_lengths.numbers.tolist() == [2, 3, 1, 0]
    assert call.key_lengths.numbers.tolist() == [4, 5, 200, 0]
    assert call.query_edges.numbers.tolist() == [0, 2, 5, 6, 6]
    assert call.key_edges.numbers.tolist() == [0, 4, 9, 209, 209]
    arrays = (
        call.query_starts,
        call.key_starts,
        call.query_lengths,
        call.key_lengths,
        call.query_edges,
        call.key_edges,
    )
    assert {rows.numbers.dtype for rows in arrays} == {np.dtype("int32")}
    assert call.query_rows.numbers.tolist() == [0, 1, 3, 4, 5, 6]
    assert [rows.numbers.tolist() for rows in call.query_places] == [[0, 0, 1, 1, 1, 2], [0, 1, 0, 1, 2, 0]]
    assert (call.most_queries, call.most_keys) == (128, 256)
    assert not call.keys_are_queries
    assert call_of((0, 2, 4, 6), (2, 3, 6, 7)).keys_are_queries


def test_a_task_whose_keys_do_not_follow_each_other_is_refused() -> None:
    apart = Task(0, 1, 9, (Keys(0, 2, 0), Keys(3, 4, 2)))
    with pytest.raises(AssertionError, match="must follow each other"):
        one_call(TaskTable.of([apart]))
    together = [Task(0, 1, 9, (Keys(0, 2, 0), Keys(2, 4, 5))), Task(1, 2, 9, (Keys(7, 8, 0),))]
    assert one_call(TaskTable.of(together)).keys.tolist() == [[0, 4], [7, 8]]


def test_rounding_up() -> None:
    assert [bucket(n) for n in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert [bucket(n, 128) for n in (1, 128, 129)] == [128, 128, 256]


def _phases(lengths: list[int], cp_size: int, name: str, seed: int, window: int | None) -> list[Phase]:
    plan = plan_named(name, padded(lengths, cp_size), cp_size, seed=seed)
    phases = [p for rank in range(cp_size) for p in gather_index(plan, rank, window).phases]
    if window is None:  # of a ring under a window no such kernel computes
        phases += [p for rank in range(cp_size) for p in ring_index(plan, rank, None).phases]
    return [p for p in phases if p.num_tasks]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 3, 7, 11, 29, 64]), min_size=1, max_size=8),
    cp_size=st.sampled_from([1, 2, 3, 4, 8]),
    name=st.sampled_from([*SHARDERS, "random"]),
    seed=st.integers(0, 2**31),
    window=st.one_of(st.none(), st.integers(1, 40)),
)
def test_calls_of_any_plan(lengths: list[int], cp_size: int, name: str, seed: int, window: int | None) -> None:
    """Keys of every task lie in one run; calls keep them apart, hold every task once, and are as few as can be."""
    for phase in _phases(lengths, cp_size, name, seed, window):
        calls = phase.calls_apart
        for call in calls:
            for ranges in (call.queries, call.keys):
                assert (ranges[:-1, 1] <= ranges[1:, 0]).all()
                assert (ranges[:, 0] < ranges[:, 1]).all()
        tasks = [task for c in calls for task in np.concatenate((c.queries, c.keys), axis=1).tolist()]
        assert sorted(tasks) == np.concatenate((phase.call.queries, phase.call.keys), axis=1).tolist()
        seen = np.zeros(phase.num_keys, dtype=np.int64)
        np.add.at(seen, phase.call.key_rows.numbers, 1)
        assert len(calls) == seen.max()


def test_heads_and_tails_are_two_calls_however_many_documents() -> None:
    phases = _phases([900, 300, 1200, 700, 500], 4, "per_document", 0, None)
    assert sorted({len(p.calls_apart) for p in phases}) == [1, 2]


def test_calls_cross_a_process_boundary_with_their_phase() -> None:
    phase = _phases([90, 30], 2, "per_document", 0, None)[1]
    wanted = [c.key_starts.numbers.tolist() for c in phase.calls_apart]
    copy = pickle.loads(pickle.dumps(phase))
    assert [c.key_starts.numbers.tolist() for c in copy.calls_apart] == wanted


@settings(deadline=None, max_examples=60)
@given(ranges=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=12))
def test_groups_and_first_fit_need_equally_many_calls(ranges: list[tuple[int, int]]) -> None:
    tasks = [(i, i + 1, start, start + length) for i, (start, length) in enumerate(sorted(ranges))]
    call = call_of(*tasks)
    grouped, fitted = calls._numbers_in_groups(call), calls._first_fit(call)
    seen = np.zeros(64, dtype=np.int64)
    for _, _, start, stop in tasks:
        seen[start:stop] += 1
    assert fitted.max() + 1 == seen.max()
    if grouped is not None:
        assert grouped.max() == fitted.max()
        for number in range(grouped.max() + 1):
            chosen = call.keys[grouped == number]
            assert (chosen[:-1, 1] <= chosen[1:, 0]).all()


def test_queries_that_come_in_another_order_than_their_keys() -> None:
    """Accumulators of queries lie in the order of a call's tasks, so such tasks need two calls."""
    assert [c.queries.tolist() for c in calls_apart(call_of((2, 3, 0, 4), (0, 2, 4, 9)))] == [[[2, 3]], [[0, 2]]]
