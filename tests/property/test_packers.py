"""What every registered packer promises, on random and on adversarial documents."""

import json
import random
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.cost import CrossoverCost, micro_batch_work_ns
from wlb.documents import Document, documents_from_lengths, total_tokens
from wlb.errors import PackingError
from wlb.packing import PACKERS, PackerOptions, PackerState, StepShape, build_packer
from wlb.schedule import PipelineModel

WINDOW = 64
COST = CrossoverCost(crossover_tokens=20)

ADVERSARIAL = {
    "all outliers": [60, 50, 61, 64, 55],
    "one giant with dust": [64] + [1] * 200,
    "one token each": [1],
    "all equal": [16],
    "just over half": [33],
    "full windows": [64],
    "halves and threes": [32, 3, 32, 3, 3],
}


def _packer(name, *, per_replica=2, replicas=2, greedy_window_batches=1, thresholds=(20, 40), cap=1.5):
    return build_packer(
        name,
        PackerOptions(
            shape=StepShape(window_tokens=WINDOW, micro_batches_per_replica=per_replica, num_replicas=replicas),
            cost=COST,
            cap_windows=cap,
            thresholds_tokens=thresholds,
            greedy_window_batches=greedy_window_batches,
            pipeline=PipelineModel.equal_stages(COST, 2),
            search_evaluations=200,
            solver_seconds=0.002,
        ),
    )


class _Source:
    """Documents of the given lengths, over and over; drawn whole until the tokens wanted are reached."""

    def __init__(self, lengths):
        self._lengths = lengths
        self.drawn = []

    def take(self, wanted_tokens, *, arrival):
        taken = []
        while total_tokens(taken) < wanted_tokens:
            number = len(self.drawn)
            taken.append(
                Document(
                    doc_id=number,
                    length=self._lengths[number % len(self._lengths)],
                    arrival=arrival,
                    sequence=number,
                    start=0,
                )
            )
            self.drawn.append(taken[-1])
        return tuple(taken)


def _run(packer, lengths, *, num_steps, known_end=True):
    """Per step: state before, arrivals, plan, state after."""
    source, state, steps = _Source(lengths), packer.initial_state(), []
    for step in range(num_steps):
        steps_left = num_steps - step if known_end else None
        arrivals = source.take(packer.wanted_tokens(state, steps_left=steps_left), arrival=step)
        plan, after = packer.plan_step(state, arrivals, steps_left=steps_left)
        steps.append((state, arrivals, plan, after))
        state = after
    return source, steps


def _trained(plan):
    return [d for m in plan.micro_batches for d in m.documents]


def _check_run(packer, lengths, *, num_steps, known_end=True):
    source, steps = _run(packer, lengths, num_steps=num_steps, known_end=known_end)
    shape = packer.shape
    seen = set()
    for number, (before, arrivals, plan, after) in enumerate(steps):
        trained = _trained(plan)
        # conservation: in + waiting before = out + waiting after, each document once
        there = sorted(d.doc_id for d in (*before.waiting, *arrivals))
        assert there == sorted(d.doc_id for d in (*trained, *after.waiting))
        assert sorted(d.doc_id for d in plan.waiting) == sorted(d.doc_id for d in after.waiting)
        assert not seen & {d.doc_id for d in trained}
        seen |= {d.doc_id for d in trained}
        assert (plan.step, after.step) == (number, number + 1)
        assert after.drawn_tokens == before.drawn_tokens + total_tokens(arrivals)
        # strict cap
        assert max(m.num_tokens for m in plan.micro_batches) <= packer.cap_tokens
        counts = {len(replica) for replica in plan.replicas}
        assert len(plan.replicas) == shape.num_replicas
        assert min(counts) >= 1
        if not packer.free_counts:
            # every replica runs equally many micro-batches, the configured number of them before the last step
            assert len(counts) == 1
            is_last = known_end and number == num_steps - 1
            assert min(counts) >= shape.micro_batches_per_replica
            assert is_last or counts == {shape.micro_batches_per_replica}
            # none is empty while documents suffice
            if not is_last and len(trained) >= shape.num_micro_batches:
                assert all(m.documents for m in plan.micro_batches)
        # lower bound: the largest is no smaller than the mean
        work = [micro_batch_work_ns(COST, m.lengths) for m in plan.micro_batches]
        assert max(work) * len(work) >= sum(work)
        # a queue gives up its oldest documents only
        bands = pairwise((*packer.thresholds_tokens, packer.cap_tokens))
        for queue_before, queue_after, (low, high) in zip(before.queues, after.queues, bands, strict=True):
            line = [*queue_before, *(d for d in arrivals if low <= d.length < high)]
            assert list(queue_after) == line[len(line) - len(queue_after) :]
    waiting = steps[-1][3].waiting
    assert seen | {d.doc_id for d in waiting} == set(range(len(source.drawn)))
    if known_end:
        assert waiting == ()
    return steps


shapes = st.fixed_dictionaries(
    {
        "per_replica": st.integers(1, 3),
        "replicas": st.integers(1, 3),
        "greedy_window_batches": st.integers(1, 3),
        "thresholds": st.sets(st.integers(1, WINDOW), max_size=3).map(lambda s: tuple(sorted(s))),
        "cap": st.sampled_from([1.1, 1.5, 3.0]),
    }
)
many_lengths = st.one_of(
    st.lists(st.integers(1, WINDOW), min_size=1, max_size=60),
    st.lists(st.sampled_from([1, 2, 3, 31, 32, 33, 63, 64]), min_size=1, max_size=60),
    st.sampled_from(list(ADVERSARIAL.values())),
)


@pytest.mark.parametrize("name", PACKERS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=many_lengths, shape=shapes, num_steps=st.integers(1, 7), known_end=st.booleans())
def test_nothing_is_lost_and_no_cap_is_exceeded(name, lengths, shape, num_steps, known_end):
    _check_run(_packer(name, **shape), lengths, num_steps=num_steps, known_end=known_end)


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("case", ADVERSARIAL)
@pytest.mark.parametrize("known_end", [True, False])
def test_adversarial_lengths(name, case, known_end):
    _check_run(_packer(name), ADVERSARIAL[case], num_steps=12, known_end=known_end)


@pytest.mark.parametrize("name", PACKERS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=many_lengths, shape=shapes, resume_at=st.integers(0, 5))
def test_a_resumed_run_plans_what_the_unbroken_run_planned(name, lengths, shape, resume_at):
    num_steps = 6
    _, steps = _run(_packer(name, **shape), lengths, num_steps=num_steps)
    state = PackerState.from_json(json.loads(json.dumps(steps[resume_at][0].to_json())))
    packer = _packer(name, **shape)
    for number in range(resume_at, num_steps):
        _, arrivals, plan, after = steps[number]
        assert packer.wanted_tokens(state, steps_left=num_steps - number) == packer.wanted_tokens(
            steps[number][0], steps_left=num_steps - number
        )
        again, state = packer.plan_step(state, arrivals, steps_left=num_steps - number)
        assert again == plan
        assert again.fingerprint == plan.fingerprint
        assert state == after


@pytest.mark.parametrize("name", PACKERS)
def test_what_waits_stays_bounded(name):
    rng = random.Random(7)
    lengths = [min(WINDOW, int(rng.lognormvariate(2, 1)) + 1) for _ in range(500)]
    packer = _packer(name, thresholds=(24, 44))
    _, steps = _run(packer, lengths, num_steps=300, known_end=False)
    waiting = [total_tokens(after.waiting) for *_, after in steps]
    # two queues of at most 3 documents each after a release, and what was carried: less than two steps' tokens
    assert max(waiting) < 2 * packer.shape.budget_tokens
    trained = sum(plan.num_tokens for _, _, plan, _ in steps)
    assert trained >= (300 - 2) * packer.shape.budget_tokens * (0.8 if name == "plain" else 0.95)


@pytest.mark.parametrize("name", PACKERS)
def test_a_document_over_the_cap_is_an_error_naming_it(name):
    packer = _packer(name)
    with pytest.raises(PackingError, match=rf"length must be .* got {packer.cap_tokens + 1} \(document 1\)"):
        packer.plan_step(packer.initial_state(), documents_from_lengths([3, packer.cap_tokens + 1]))


@pytest.mark.parametrize("name", PACKERS)
def test_a_step_without_documents_is_a_step_of_empty_micro_batches(name):
    packer = _packer(name)
    plan, state = packer.plan_step(packer.initial_state(), [])
    expected = [[0], [0]] if packer.free_counts else [[0, 0], [0, 0]]
    assert [[m.num_tokens for m in replica] for replica in plan.replicas] == expected
    assert state.step == 1


def _least_possible_max(lengths, work, *, count):
    """By trying every assignment of the documents to `count` micro-batches."""
    best = None
    for assignment in product(range(count), repeat=len(lengths)):
        loads = [0] * count
        for n, target in zip(lengths, assignment, strict=True):
            loads[target] += work(n)
        best = max(loads) if best is None else min(best, max(loads))
    return best


@pytest.mark.parametrize(
    ("name", "work"),
    [("greedy", lambda n: n * n), ("wlb", lambda n: micro_batch_work_ns(COST, [n]))],
)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=8), count=st.integers(2, 3))
def test_gap_to_the_best_possible_step(name, work, lengths, count):
    """Longest first to least work is within 4/3 - 1/(3 N) of the best (Graham 1969), as long as no cap binds.

    Eight documents of at most 8 tokens always fit the window of 64.
    """
    packer = _packer(name, per_replica=count, replicas=1, thresholds=())
    plan, state = packer.plan_step(packer.initial_state(), documents_from_lengths(lengths))
    assert state.waiting == ()
    largest = max(sum(work(n) for n in m.lengths) for m in plan.micro_batches)
    best = _least_possible_max(lengths, work, count=count)
    assert best <= largest
    assert 3 * count * largest <= (4 * count - 1) * best
