"""Delay by hand: window 8, 4 micro-batches, so that a step holds 32 tokens and may differ by less than one."""

import pytest

from wlb.cost import CrossoverCost
from wlb.documents import documents_from_lengths, total_tokens
from wlb.errors import ConfigError, StateError
from wlb.packing import PackerOptions, PackerState, StepShape, build_packer
from wlb.packing.delay import Delay, HoldsBack
from wlb.schedule import PipelineModel

SHAPE = StepShape(window_tokens=8, micro_batches_per_replica=4, num_replicas=1)


def _delay(*, thresholds=(6,), bound=50):
    return Delay(shape=SHAPE, thresholds_tokens=thresholds, max_delay_steps=bound)


def _state(*, step=0, queues=((),), carried=(), behind=0):
    waiting_tokens = sum(total_tokens(q) for q in queues) + total_tokens(carried)
    drawn_tokens = 32 * step + waiting_tokens - behind
    return PackerState(step=step, drawn_tokens=drawn_tokens, budget_tokens=32 * step, queues=queues, carried=carried)


def _documents(lengths, *, arrival=0, first_id=0):
    return documents_from_lengths(lengths, arrival=arrival, first_id=first_id)


def _lengths(documents):
    return [d.length for d in documents]


def test_outliers_wait_and_others_fill_the_step():
    delay = _delay()
    intake = delay.intake(_state(), _documents([7, 2, 6, 3, 1]), steps_left=None)
    assert _lengths(intake.trained) == [2, 3, 1]
    assert _lengths(intake.queues[0]) == [7, 6]
    assert (intake.wanted_tokens, intake.cut_tokens) == (32 - 6, 0)
    done = delay.intake(_state(), _documents([7, 2, 6, 3, 1, *[5] * 5, 1]), steps_left=None)
    assert total_tokens(done.trained) == 32
    assert done.wanted_tokens == 0


def test_a_queue_of_one_document_for_each_micro_batch_is_released_and_arrivals_fill_the_rest():
    delay = _delay()
    state = _state(step=3, queues=(_documents([7, 6, 6, 7, 8]),))
    intake = delay.intake(state, (), steps_left=None)
    assert _lengths(intake.trained) == [7, 6, 6, 7]
    assert _lengths(intake.queues[0]) == [8]
    assert intake.wanted_tokens == 6
    intake = delay.intake(state, _documents([4, 7, 3, 2], arrival=3, first_id=9), steps_left=None)
    assert _lengths(intake.trained) == [7, 6, 6, 7, 4, 2]
    assert _lengths(intake.queues[0]) == [8, 7]
    assert _lengths(intake.carried) == [3]  # 33 tokens would be one too many
    assert intake.wanted_tokens == 0


def test_a_carried_document_comes_first():
    state = _state(step=1, carried=_documents([5]), queues=(_documents([7, 7, 7], first_id=1),))
    intake = _delay().intake(state, _documents([4], arrival=1, first_id=4), steps_left=None)
    assert _lengths(intake.trained) == [5, 4]
    assert intake.carried == ()


def test_a_release_lets_queues_of_shorter_documents_go_along():
    state = _state(step=2, queues=(_documents([4, 4]), _documents([6, 6, 6, 7], first_id=2)))
    intake = _delay(thresholds=(4, 6)).intake(state, _documents([5, 4], arrival=2, first_id=9), steps_left=None)
    assert _lengths(intake.trained) == [6, 6, 6, 7, 4]  # 29; the other 4 does not fit
    assert [_lengths(q) for q in intake.queues] == [[4, 5, 4], []]
    assert intake.wanted_tokens == 32 - 29


def test_no_arrival_overtakes_a_document_that_waits_in_its_queue():
    state = _state(step=2, queues=(_documents([4, 4]), _documents([6, 6, 6, 7], first_id=2)))
    intake = _delay(thresholds=(3, 6)).intake(state, _documents([3, 2], arrival=2, first_id=9), steps_left=None)
    assert _lengths(intake.trained) == [6, 6, 6, 7, 4, 2]  # 3 would have fitted, behind a 4 that did not
    assert [_lengths(q) for q in intake.queues] == [[4, 3], []]


def test_only_so_many_queues_are_released_as_fit_the_one_with_the_oldest_document_first():
    older = _documents([7, 7, 7, 7])
    younger = _documents([5, 5, 5, 5], arrival=1, first_id=4)
    intake = _delay(thresholds=(5, 7)).intake(_state(step=2, queues=(younger, older)), (), steps_left=None)
    assert _lengths(intake.trained) == [7, 7, 7, 7]
    younger = _documents([7, 7, 7, 7], arrival=1, first_id=4)
    intake = _delay(thresholds=(5, 7)).intake(
        _state(step=2, queues=(_documents([5, 5, 5, 5]), younger)), (), steps_left=None
    )
    assert _lengths(intake.trained) == [5, 5, 5, 5]


def test_a_queue_whose_oldest_document_reaches_the_bound_releases_what_it_has():
    queue = (*_documents([7]), *_documents([6, 8], arrival=2, first_id=1))
    assert _lengths(_delay(bound=4).intake(_state(step=3, queues=(queue,)), (), steps_left=None).trained) == []
    intake = _delay(bound=4).intake(_state(step=4, queues=(queue,)), (), steps_left=None)
    assert _lengths(intake.trained) == [7, 6, 8]
    # and one more may pass, so that there is one for each micro-batch
    arrivals = _documents([2, 6, 6], arrival=4, first_id=3)
    intake = _delay(bound=4).intake(_state(step=4, queues=(queue,)), arrivals, steps_left=None)
    assert _lengths(intake.trained) == [7, 6, 8, 2, 6]
    assert _lengths(intake.queues[0]) == [6]


def test_documents_that_could_not_all_be_in_time_are_trained_early():
    """Ten documents of 7 due in step 3: four fit a step, so two must be trained in step 1."""
    queue = _documents([7] * 10)
    delay = Delay(
        shape=StepShape(window_tokens=8, micro_batches_per_replica=4, num_replicas=1),
        thresholds_tokens=(6,),
        max_delay_steps=3,
    )
    early = delay.intake(_state(step=1, queues=(queue[:8],)), (), steps_left=None)
    assert [d.doc_id for d in early.trained[:4]] == [0, 1, 2, 3]
    intake = delay.intake(_state(step=1, queues=(queue,)), (), steps_left=None)
    assert [d.doc_id for d in intake.trained[:2]] == [0, 1]
    later = delay.intake(_state(step=2, queues=(queue[:5],)), (), steps_left=None)
    assert [d.doc_id for d in later.trained] == [0, 1, 2, 3]


def test_where_only_outliers_come_they_fill_the_step_and_the_last_is_cut():
    delay = _delay()
    intake = delay.intake(_state(), _documents([7] * 8), steps_left=None)
    assert _lengths(intake.trained) == [7] * 4
    assert (intake.wanted_tokens, intake.cut_tokens) == (0, 4)
    intake = delay.intake(_state(), (*_documents([7] * 8), *_documents([4], first_id=8)), steps_left=None)
    assert _lengths(intake.trained) == [7, 7, 7, 7, 4]
    assert (intake.wanted_tokens, intake.cut_tokens) == (0, 0)


def test_the_last_step_trains_whatever_waits_and_the_rest_of_the_budget():
    state = _state(step=9, queues=(_documents([7, 6]),), carried=_documents([5], first_id=2))
    intake = _delay().intake(state, (), steps_left=1)
    assert _lengths(intake.trained) == [7, 6, 5]
    assert (intake.wanted_tokens, intake.cut_tokens) == (0, 32 - 18)
    # a step before the last no more is drawn than fits the last one
    state = _state(step=8, queues=(_documents([7, 7, 7, 7, 7]),))
    trained = _delay().intake(state, (), steps_left=2).trained
    assert _lengths(trained) == [7, 7, 7, 7]


def test_steps_make_up_for_what_earlier_ones_lacked_or_exceeded():
    shape = StepShape(window_tokens=100, micro_batches_per_replica=4, num_replicas=1)
    delay = Delay(shape=shape, thresholds_tokens=(60,), max_delay_steps=5)
    for behind, wanted in ((0, 400), (3, 403), (-3, 397), (50, 404), (-50, 396)):  # at most half the tolerance
        state = PackerState(step=2, drawn_tokens=800 - behind, budget_tokens=800, queues=((),))
        intake = delay.intake(state, _documents([1] * (wanted - 1)), steps_left=None)
        assert intake.wanted_tokens == 1 or abs(total_tokens(intake.trained) - wanted) <= 1
        assert total_tokens(delay.intake(state, _documents([1] * 500), steps_left=None).trained) <= wanted + 4


def test_bad_values_are_named():
    with pytest.raises(ConfigError, match="max_delay_steps must be >= 1 where documents wait, got 0"):
        _delay(bound=0)
    for thresholds in ((0,), (6, 6), (7, 6), (9,)):
        with pytest.raises(ConfigError, match="thresholds_tokens must increase strictly from 1 to at most the window"):
            _delay(thresholds=thresholds)
    with pytest.raises(StateError, match=r"queues of the state must be as many as thresholds_tokens \[6\], got 2"):
        _delay().intake(_state(queues=(_documents([7]), ())), (), steps_left=None)
    # a run in which nothing waited may go on with any queues
    assert _delay().intake(_state(queues=()), (), steps_left=None).queues == ((),)


def _options(**more):
    pipeline = PipelineModel.equal_stages(CrossoverCost(crossover_tokens=4), 2)
    return PackerOptions(shape=SHAPE, cost=CrossoverCost(crossover_tokens=4), pipeline=pipeline, **more)


@pytest.mark.parametrize("name", ["makespan", "two_stage"])
def test_packers_delay_only_when_told_to(name):
    exact = build_packer(name, _options(thresholds_tokens=(6,)))
    assert isinstance(exact, HoldsBack)
    assert (exact.delay, exact.thresholds_tokens) == (None, ())
    delaying = build_packer(name, _options(thresholds_tokens=(6,), max_delay_steps=50))
    assert (delaying.delay, delaying.thresholds_tokens) == (_delay(), (6,))
    plan, _ = delaying.plan_step(delaying.initial_state(), _documents([7, 3, 2]))
    assert (plan.num_tokens, _lengths(plan.waiting)) == (5, [7])
    assert delaying.wanted_tokens(delaying.initial_state(), _documents([7, 3, 2])) == 32 - 5
    assert exact.wanted_tokens(exact.initial_state(), _documents([7, 3, 2])) == 32 - 12
    assert exact.cut_tokens(exact.initial_state(), ()) == 0


def test_wlb_delays_as_published_unless_it_is_told_to_keep_its_budget():
    published = build_packer("wlb", _options(thresholds_tokens=(6,), max_delay_steps=3))
    assert published.delay is None
    arrivals = _documents([7, 7, 7, 7, 8, 8, 8, 8])
    assert published.plan_step(published.initial_state(), arrivals)[0].num_tokens == 28
    budget = build_packer("wlb", _options(thresholds_tokens=(6,), max_delay_steps=3, wlb_intake="budget"))
    plan, state = budget.plan_step(budget.initial_state(), arrivals)
    assert (plan.num_tokens, budget.cut_tokens(budget.initial_state(), arrivals)) == (28, 4)
    assert len(state.waiting) == 4
    with pytest.raises(ConfigError, match="max_delay_steps must be >= 1 with wlb_intake budget, got 0"):
        build_packer("wlb", _options(wlb_intake="budget"))
    with pytest.raises(ConfigError, match="wlb_intake must be algorithm1 or budget, got 'both'"):
        build_packer("wlb", _options(wlb_intake="both"))


def test_wlb_opens_micro_batches_rather_than_leave_documents_of_its_budget():
    """Five of 6 tokens in micro-batches that hold at most 11: the fixed four would leave one."""
    budget = build_packer("wlb", _options(max_delay_steps=3, wlb_intake="budget"))
    plan, state = budget.plan_step(budget.initial_state(), _documents([6, 6, 6, 6, 6]))
    assert state.waiting == ()
    assert sorted(m.num_tokens for m in plan.micro_batches) == [6] * 5
