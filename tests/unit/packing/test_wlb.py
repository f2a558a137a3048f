"""Algorithm 1 by hand: window 8, cap 12, so that a micro-batch holds at most 11."""

import pytest

from wlb.cost import CrossoverCost
from wlb.documents import documents_from_lengths
from wlb.errors import ConfigError, PackingError, StateError
from wlb.packing import PackerState, StepShape
from wlb.packing.wlb import WlbPacker


def _packer(*, thresholds=(6,), per_replica=2, replicas=1, window=8, cap=1.5):
    return WlbPacker(
        shape=StepShape(window_tokens=window, micro_batches_per_replica=per_replica, num_replicas=replicas),
        cost=CrossoverCost(crossover_tokens=8),
        cap_windows=cap,
        thresholds_tokens=thresholds,
    )


def _lengths(plan):
    return sorted(sorted(m.lengths) for m in plan.micro_batches)


def _ids(documents):
    return [d.doc_id for d in documents]


def test_outliers_wait_until_there_is_one_for_each_micro_batch():
    packer = _packer()
    plan, state = packer.plan_step(packer.initial_state(), documents_from_lengths([7, 2, 3, 1]))
    assert _lengths(plan) == [[1, 2], [3]]
    assert [_ids(q) for q in state.queues] == [[0]]
    assert plan.waiting == state.waiting
    plan, state = packer.plan_step(state, documents_from_lengths([6, 6, 2, 3], arrival=1, first_id=4))
    # 7 and the older 6 are released, then 3 goes to the 6 and 2 to the 7; the younger 6 waits
    assert _lengths(plan) == [[2, 7], [3, 6]]
    assert [_ids(q) for q in state.queues] == [[5]]


def test_a_document_waits_in_the_queue_of_its_band():
    packer = _packer(thresholds=(4, 6, 8))
    _, state = packer.plan_step(packer.initial_state(), documents_from_lengths([8, 3, 4, 6]))
    assert [_ids(q) for q in state.queues] == [[2], [3], [0]]


def test_a_queue_releases_no_more_than_one_document_for_each_micro_batch():
    packer = _packer()
    plan, state = packer.plan_step(packer.initial_state(), documents_from_lengths([6, 7, 8, 6, 7]))
    assert _lengths(plan) == [[6], [7]]
    assert [_ids(q) for q in state.queues] == [[2, 3, 4]]


def test_a_full_micro_batch_sends_the_document_to_the_shortest_then_to_the_next_step():
    packer = _packer(thresholds=())
    # 7 | 6, then 5 with 6 (11 tokens), then 4 with 7 (11 tokens), then the other 4 fits nowhere
    plan, state = packer.plan_step(packer.initial_state(), documents_from_lengths([7, 6, 5, 4, 4]))
    assert _lengths(plan) == [[4, 7], [5, 6]]
    assert _ids(state.carried) == [4]
    # the carried 4 is placed before the longer arrivals, so one of those is left
    plan, state = packer.plan_step(state, documents_from_lengths([8, 8], arrival=1, first_id=5))
    assert _lengths(plan) == [[4], [8]]
    assert _ids(state.carried) == [6]


def test_the_fit_is_strict_as_in_the_paper():
    packer = _packer(thresholds=(), per_replica=1)
    plan, state = packer.plan_step(packer.initial_state(), documents_from_lengths([8, 4]))
    assert _lengths(plan) == [[8]]
    assert [d.length for d in state.carried] == [4]
    plan, _ = packer.plan_step(packer.initial_state(), documents_from_lengths([8, 3]))
    assert _lengths(plan) == [[3, 8]]
    plan, _ = packer.plan_step(packer.initial_state(), documents_from_lengths([8, 4]), steps_left=1)
    assert _lengths(plan) == [[4], [8]]


def test_every_step_draws_its_budget_whatever_the_queues_hold():
    packer = _packer()
    state = PackerState(step=3, drawn_tokens=50, budget_tokens=48, queues=(documents_from_lengths([8, 8]),))
    assert packer.wanted_tokens(state) == 4 * 16 - 50


def test_towards_the_end_queues_are_emptied_over_several_steps():
    packer = _packer(per_replica=2)
    state = PackerState(step=5, drawn_tokens=0, queues=(documents_from_lengths([7] * 6),))
    # 42 tokens wait, 2 * (12 - 8) spare a step, half of it used: 11 steps
    _, later = packer.plan_step(state, [], steps_left=12)
    assert len(later.queues[0]) == 4  # no end in sight: a release of 2
    for steps_left, left in ((6, 4), (3, 4), (2, 2), (1, 0)):
        plan, after = packer.plan_step(state, [], steps_left=steps_left)
        trained = sum(len(m.documents) for m in plan.micro_batches)
        assert len(after.queues[0]) + len(after.carried) == 6 - trained
        assert len(after.queues[0]) == left


def test_a_queue_that_is_not_full_is_released_towards_the_end():
    packer = _packer(per_replica=4)
    state = PackerState(step=5, drawn_tokens=0, queues=(documents_from_lengths([7] * 3),))
    assert len(packer.plan_step(state, [])[1].queues[0]) == 3
    assert len(packer.plan_step(state, [], steps_left=2)[1].queues[0]) == 0


def test_the_last_step_opens_micro_batches_for_what_the_cap_keeps_out():
    packer = _packer(per_replica=1, replicas=2)
    state = PackerState(step=5, drawn_tokens=0, queues=(documents_from_lengths([7] * 3),))
    plan, after = packer.plan_step(state, documents_from_lengths([2, 2], arrival=5, first_id=3), steps_left=1)
    assert [len(replica) for replica in plan.replicas] == [2, 2]
    assert _lengths(plan) == [[2, 2], [7], [7], [7]]
    assert after.waiting == ()


@pytest.mark.parametrize("cap", [1.0, 0.5, 1.01, float("inf"), float("nan")])
def test_a_cap_without_room_above_the_window_is_refused(cap):
    with pytest.raises(ConfigError, match=rf"cap_windows must be > 1 .* got {cap}: .*grow without end"):
        _packer(cap=cap, thresholds=())


@pytest.mark.parametrize("thresholds", [(6, 6), (7, 6), (0, 6), (-1,), (12,), (6, 40)])
def test_thresholds_out_of_order_are_refused(thresholds):
    with pytest.raises(ConfigError, match=rf"thresholds_tokens must increase strictly .*{thresholds[-1]}\]"):
        _packer(thresholds=thresholds)


def test_a_document_that_fits_nowhere_is_refused():
    packer = _packer()
    with pytest.raises(PackingError, match=r"length must be below the cap of 12 tokens, got 12 \(document 0\)"):
        packer.plan_step(packer.initial_state(), documents_from_lengths([12]))


def test_a_state_of_other_queues_is_refused():
    with pytest.raises(StateError, match=r"as many as thresholds_tokens \[6\], got 2"):
        _packer().plan_step(_packer(thresholds=(6, 7)).initial_state(), [])
