"""What delaying keeps for any lengths: the budget of every step, the bound on every wait, queues in order, every
document, and the same plans after any resume."""

import json
import random
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.cost import CrossoverCost
from wlb.data.planner import StepPlanner
from wlb.data.stream import DocumentSource, DocumentStream
from wlb.documents import MicroBatch, StepPlan, total_tokens
from wlb.packing import PackerOptions, StepShape, build_packer
from wlb.packing.delay import TOLERANCE, Delay, HoldsBack
from wlb.schedule import PipelineModel

WINDOW = 200
COST = CrossoverCost(crossover_tokens=60, overhead_tokens=8)
DELAYING = {"makespan": {}, "two_stage": {}, "wlb": {"wlb_intake": "budget", "cap_windows": 1.5}}


@dataclass(frozen=True, kw_only=True)
class WholeStep(HoldsBack):
    """Trains what `Delay` chooses in one micro-batch, so that only the choice is tested."""

    shape: StepShape
    delay: Delay | None
    state_fields: tuple[str, ...] = field(default=("thresholds_tokens",))

    def plan_step(self, state, arrivals, *, steps_left=None):
        documents, after = self.taken_in(state, arrivals, steps_left=steps_left)
        replicas = ((MicroBatch(documents=documents),),)
        return StepPlan(step=state.step, replicas=replicas, waiting=after.waiting), after


def _lengths(kind, seed=0, count=400):
    rng = random.Random(seed)
    natural = [min(WINDOW, 1 + int(rng.lognormvariate(2, 1.1))) for _ in range(count)]
    return {
        "long tail": [n if rng.random() > 0.03 else rng.randint(60, WINDOW) for n in natural],
        "all outliers": [rng.randint(80, WINDOW) for _ in range(count)],
        "all over half": [120] * count,
        "one outlier an epoch": [*natural[:60], WINDOW],
        "lengths rising": sorted(natural + [rng.randint(1, WINDOW) for _ in range(count // 4)]),
        "lengths falling": sorted(natural, reverse=True),
        "window-long only": [WINDOW] * 7,
        "one token each": [1] * 700,
        "just below the threshold": [59] * count,
        "beyond the window": [rng.randint(1, 5 * WINDOW) for _ in range(count)],
        "outliers in a row": [*natural[: count // 2], *[rng.randint(100, WINDOW) for _ in range(60)]],
    }[kind]


KINDS = tuple(sorted([
    "long tail", "all outliers", "all over half", "one outlier an epoch", "lengths rising", "lengths falling",
    "window-long only", "one token each", "just below the threshold", "beyond the window", "outliers in a row",
]))  # fmt: skip


def _planner(packer, lengths, *, num_steps, shuffle=True, cut="window"):
    source = DocumentSource(lengths=np.array(lengths), label_tokens=0)
    stream = DocumentStream([source], window_tokens=WINDOW, cut=cut, seed=3, shuffle=shuffle)
    return StepPlanner(stream=stream, packer=packer, num_steps=num_steps)


def _whole_step(*, per_replica=4, replicas=1, thresholds=(60, 140), bound=8):
    shape = StepShape(window_tokens=WINDOW, micro_batches_per_replica=per_replica, num_replicas=replicas)
    return WholeStep(shape=shape, delay=Delay(shape=shape, thresholds_tokens=thresholds, max_delay_steps=bound))


def _trained(plan):
    return [d for m in plan.micro_batches for d in m.documents]


def _check(packer, lengths, *, bound, num_steps=30, known_end=True, **stream):
    """Run, and check every step; the plans."""
    planner = _planner(packer, lengths, num_steps=num_steps if known_end else None, **stream)
    budget_tokens = packer.shape.budget_tokens
    seen, plans, order = [], [], {}
    for number in range(num_steps):
        plan = planner.next_step()
        plans.append(plan)
        documents = _trained(plan)
        assert abs(plan.num_tokens - budget_tokens) <= TOLERANCE * budget_tokens, (number, plan.num_tokens)
        for d in documents:
            assert 0 <= number - d.arrival <= bound
            order.setdefault(bisect_right(packer.thresholds_tokens, d.length) - 1, []).append((number, d))
        seen += [d.doc_id for d in documents]
        assert len(set(seen)) == len(seen)
        assert {d.doc_id for d in plan.waiting} == set(range(planner.counters.pieces_drawn)) - set(seen)
        assert all(number - d.arrival < bound for d in plan.waiting)
    # Of what waited in a queue, no document is trained in an earlier step than one that came before it.
    waited = {band: [(n, d) for n, d in pairs if n > d.arrival] for band, pairs in order.items() if band >= 0}
    for pairs in waited.values():
        by_arrival = [n for n, d in sorted(pairs, key=lambda p: p[1].doc_id)]
        assert by_arrival == sorted(by_arrival)
    if known_end:
        assert plans[-1].waiting == ()
        assert sum(p.num_tokens for p in plans) == num_steps * budget_tokens
    return plans


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bound", [1, 2, 5, 64])
def test_budget_bound_and_order_hold_for_any_lengths(kind, bound):
    for per_replica in (1, 4):
        packer = _whole_step(per_replica=per_replica, bound=bound)
        _check(packer, _lengths(kind), bound=bound, shuffle=per_replica == 1)
        _check(packer, _lengths(kind, seed=1), bound=bound, shuffle=per_replica == 4, known_end=False, num_steps=20)


@pytest.mark.parametrize("kind", ["long tail", "all outliers", "outliers in a row"])
def test_they_hold_for_large_steps_too(kind):
    packer = _whole_step(per_replica=8, replicas=3, bound=6)
    _check(packer, _lengths(kind), bound=6, num_steps=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 2 * WINDOW), st.integers(1, 40)), min_size=1, max_size=80),
    thresholds=st.sets(st.integers(1, WINDOW), max_size=4).map(lambda s: tuple(sorted(s))),
    bound=st.integers(1, 12),
    per_replica=st.integers(1, 9),
    num_steps=st.integers(1, 25),
    known_end=st.booleans(),
    cut=st.sampled_from(["window", "stream"]),
)
def test_budget_bound_and_order_hold_for_random_lengths(
    lengths, thresholds, bound, per_replica, num_steps, known_end, cut
):
    packer = _whole_step(per_replica=per_replica, thresholds=thresholds, bound=bound)
    _check(packer, lengths, bound=bound, num_steps=num_steps, known_end=known_end, cut=cut)


@pytest.mark.parametrize("name", DELAYING)
@pytest.mark.parametrize("kind", ["long tail", "all outliers", "one outlier an epoch", "lengths rising"])
def test_real_packers_keep_both_caps_as_well(name, kind):
    packer = _packer(name, bound=5)
    plans = _check(packer, _lengths(kind), bound=5, num_steps=12)
    for plan in plans:
        assert max(m.num_tokens for m in plan.micro_batches) <= packer.cap_tokens
        if name != "wlb":
            for replica in plan.replicas:
                held = packer.pipeline.shape.first_stage_peak_tokens([m.num_tokens for m in replica])
                assert held <= packer.in_flight_tokens
        else:
            assert len({len(replica) for replica in plan.replicas}) == 1


@pytest.mark.parametrize("name", DELAYING)
def test_saved_at_any_step_the_run_goes_on_exactly(name):
    num_steps = 9
    for kind in ("long tail", "all outliers"):
        unbroken, waited = _planner(_packer(name), _lengths(kind), num_steps=num_steps), 0
        plans, states = [], []
        for _ in range(num_steps):
            states.append(json.loads(json.dumps(unbroken.state())))
            plans.append(unbroken.next_step())
            waited += len(plans[-1].waiting)
        assert waited > 10
        for step, state in enumerate(states):
            resumed = _planner(_packer(name), _lengths(kind), num_steps=num_steps)
            resumed.restore(state)
            later = min(step + 2, num_steps)
            assert [resumed.next_step() for _ in range(step, later)] == plans[step:later]


def _packer(name, *, bound=5, thresholds=(60, 140)):
    return build_packer(
        name,
        PackerOptions(
            shape=StepShape(window_tokens=WINDOW, micro_batches_per_replica=4, num_replicas=2),
            cost=COST,
            pipeline=PipelineModel.equal_stages(COST, 2),
            search_evaluations=100,
            max_delay_steps=bound,
            thresholds_tokens=thresholds,
            **DELAYING[name],
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_lower_bound_met_on_the_way_is_kept_as_soon_as_it_can_be(kind):
    """Documents drawn under a bound of 20 steps, and the run goes on under 2."""
    before = _planner(_whole_step(bound=20), _lengths(kind), num_steps=40)
    for _ in range(12):
        before.next_step()
    after = _planner(_whole_step(bound=2), _lengths(kind), num_steps=40)
    after.restore(before.state())
    for step in range(12, 40):
        plan = after.next_step()
        assert all(step - d.arrival <= 2 for d in _trained(plan) if d.arrival > 20)
        assert step < 22 or all(step - d.arrival <= 2 for d in _trained(plan))


def test_every_document_of_every_epoch_is_trained_once():
    lengths = _lengths("one outlier an epoch")
    planner = _planner(_whole_step(bound=6), lengths, num_steps=40)
    trained = [d for _ in range(40) for d in _trained(planner.next_step())]
    epochs = planner.counters.epochs[0]
    assert epochs >= 10
    for row, length in enumerate(lengths):
        covered = sum(d.length for d in trained if d.sequence == row)
        assert epochs * length <= covered <= (epochs + 1) * length


def test_decisions_do_not_depend_on_how_documents_are_drawn():
    """One at a time, or as many as are asked for."""
    packer = _whole_step(bound=6)
    lengths = _lengths("long tail")
    planner = _planner(packer, lengths, num_steps=None)
    stream = DocumentStream(
        [DocumentSource(lengths=np.array(lengths), label_tokens=0)], window_tokens=WINDOW, cut="window", seed=3
    )
    state = packer.initial_state()
    for step in range(25):
        arrivals = ()
        while packer.wanted_tokens(state, arrivals) > 0:
            arrivals += stream.take(1, arrival=step)
        arrivals += stream.take(packer.cut_tokens(state, arrivals), arrival=step, cut_last=True)
        plan, state = packer.plan_step(state, arrivals)
        assert plan == planner.next_step()
    assert total_tokens(state.waiting) > 0
