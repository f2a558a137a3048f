"""Greedy fixed-length packing by hand."""

import pytest

from wlb.cost import CrossoverCost
from wlb.documents import documents_from_lengths
from wlb.errors import ConfigError, PackingError
from wlb.packing import StepShape
from wlb.packing.greedy import GreedyPacker

COST = CrossoverCost(crossover_tokens=8)


def _packer(*, batches=1, replicas=1, per_replica=2, window=8):
    shape = StepShape(window_tokens=window, micro_batches_per_replica=per_replica, num_replicas=replicas)
    return GreedyPacker(shape=shape, cost=COST, window_batches=batches)


def _lengths(plan):
    return sorted(sorted(m.lengths) for m in plan.micro_batches)


def test_longest_first_to_the_least_sum_of_squares():
    packer = _packer()
    plan, state = packer.plan_step(packer.initial_state(), documents_from_lengths([1, 5, 4, 3, 2]))
    # 5 | 4, then 3 with 4 (16 < 25), then 2 with 5 (both 25, but 4 + 3 + 2 is over 8), then 1 with 4 and 3
    assert _lengths(plan) == [[1, 3, 4], [2, 5]]
    assert state.waiting == ()


def test_what_fits_nowhere_comes_first_in_the_next_step():
    packer = _packer()
    plan, state = packer.plan_step(packer.initial_state(), documents_from_lengths([5, 5, 5]))
    assert _lengths(plan) == [[5], [5]]
    assert [d.doc_id for d in state.carried] == [2]
    assert packer.wanted_tokens(state) == 16 - 5
    plan, state = packer.plan_step(state, documents_from_lengths([6, 6], arrival=1, first_id=3))
    assert _lengths(plan) == [[5], [6]]
    assert [d.doc_id for d in state.carried] == [4]


def test_a_window_of_two_batches_puts_like_with_like():
    packer = _packer(batches=2)
    state = packer.initial_state()
    assert packer.wanted_tokens(state) == 32
    plan, state = packer.plan_step(state, documents_from_lengths([8, 5, 4, 4, 4, 1]))
    # sums of squares in order of filling: 64, 25, 32, 17
    assert _lengths(plan) == [[4, 4], [8]]
    assert packer.wanted_tokens(state) == 0
    assert len(state.waiting) == 3
    plan, state = packer.plan_step(state, [])
    assert _lengths(plan) == [[1, 4], [5]]
    assert state.waiting == ()
    assert packer.wanted_tokens(state) == 32


def test_no_window_reaches_beyond_the_end():
    packer = _packer(batches=4)
    assert packer.wanted_tokens(packer.initial_state(), steps_left=2) == 32
    _, state = packer.plan_step(packer.initial_state(), documents_from_lengths([8, 8, 8, 8]), steps_left=2)
    assert len(state.planned) == 1
    plan, state = packer.plan_step(state, [], steps_left=1)
    assert plan.num_tokens == 16
    assert state.waiting == ()


def test_the_last_step_takes_what_was_planned_for_later_steps_too():
    packer = _packer(batches=3)
    _, state = packer.plan_step(packer.initial_state(), documents_from_lengths([8] * 6))  # end not known yet
    plan, state = packer.plan_step(state, documents_from_lengths([2], arrival=1, first_id=6), steps_left=1)
    assert _lengths(plan) == [[2], [8], [8], [8], [8]]
    assert state.waiting == ()


def test_bad_arguments():
    with pytest.raises(ConfigError, match="window_batches must be >= 1, got 0"):
        _packer(batches=0)
    packer = _packer()
    with pytest.raises(PackingError, match=r"length must be <= 8, .* got 9 \(document 0\)"):
        packer.plan_step(packer.initial_state(), documents_from_lengths([9]))
