"""The step planner over a packer small enough to follow: next-fit, and documents over 6 wait one step."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

from wlb.cost.analytic import CrossoverCost
from wlb.data.planner import StepPlanner, ledger_line
from wlb.data.stream import DocumentSource, DocumentStream
from wlb.documents import MicroBatch, StepPlan, total_tokens
from wlb.errors import ConfigError, StateError
from wlb.packing.options import PackerOptions
from wlb.packing.packer import PackerState, StepShape
from wlb.packing.registry import PACKERS, build_packer

SHAPE = StepShape(window_tokens=8, micro_batches_per_replica=2, num_replicas=2)
LENGTHS = [5, 3, 7, 1, 8, 2, 2, 13, 6, 4, 30, 1, 0, 9]


@dataclass(frozen=True, kw_only=True)
class NextFit:
    """Fills micro-batches in order; holds documents of more than `hold_over` tokens back for a step."""

    shape: StepShape
    hold_over: int = 6
    cost: object = None

    state_fields = ("hold_over",)

    def initial_state(self):
        return PackerState(queues=((),))

    def wanted_tokens(self, state, arrivals=(), *, steps_left=None):
        return state.budget_tokens + self.shape.budget_tokens - state.drawn_tokens - total_tokens(arrivals)

    def plan_step(self, state, arrivals, *, steps_left=None):
        fresh = (*state.carried, *arrivals)
        held = tuple(d for d in fresh if d.length > self.hold_over and steps_left != 1)
        todo = [*state.queues[0], *(d for d in fresh if d not in held)]
        bins = [[]]
        while todo and (steps_left == 1 or len(bins) <= self.shape.num_micro_batches):
            if total_tokens(bins[-1]) + todo[0].length > self.shape.window_tokens:
                bins.append([])
            else:
                bins[-1].append(todo.pop(0))
        if steps_left != 1:
            del bins[self.shape.num_micro_batches :]
        bins += [[]] * (-len(bins) % self.shape.num_replicas)
        micro_batches = [MicroBatch(documents=tuple(b)) for b in bins]
        after = PackerState(
            step=state.step + 1,
            drawn_tokens=state.drawn_tokens + total_tokens(arrivals),
            budget_tokens=state.budget_tokens + self.shape.budget_tokens,
            queues=(held,),
            carried=tuple(todo),
        )
        replicas = tuple(tuple(micro_batches[r :: self.shape.num_replicas]) for r in range(self.shape.num_replicas))
        return StepPlan(step=state.step, replicas=replicas, waiting=after.waiting), after


def build(*, num_steps=None, cut="stream", packer=None, lengths=LENGTHS, seed=1, **kwargs):
    source = DocumentSource(lengths=np.array(lengths, dtype=np.int32), label_tokens=0)
    stream = DocumentStream([source], window_tokens=8, cut=cut, seed=seed)
    return StepPlanner(stream=stream, packer=packer or NextFit(shape=SHAPE), num_steps=num_steps, **kwargs)


def trained(plans):
    return [d for plan in plans for m in plan.micro_batches for d in m.documents]


@pytest.mark.parametrize("cut", ["stream", "window"])
def test_a_whole_run_trains_each_drawn_document_once_and_no_more_than_the_budget(cut):
    planner = build(num_steps=7, cut=cut)
    plans = [planner.next_step() for _ in range(7)]
    assert planner.finished
    assert [p.step for p in plans] == list(range(7))
    documents = trained(plans)
    assert sorted(d.doc_id for d in documents) == list(range(len(documents)))
    assert plans[-1].waiting == ()
    assert any(p.waiting for p in plans[:-1])  # the packer did hold documents back
    budget_tokens = 7 * SHAPE.budget_tokens
    if cut == "stream":
        assert total_tokens(documents) == budget_tokens
    else:
        assert budget_tokens - 8 < total_tokens(documents) <= budget_tokens


def test_every_packer_trains_the_same_documents_over_a_run():
    by_packer = []
    for hold_over in (3, 6, 8):
        planner = build(num_steps=5, packer=NextFit(shape=SHAPE, hold_over=hold_over))
        documents = trained([planner.next_step() for _ in range(5)])
        by_packer.append(sorted((d.sequence, d.start, d.length, d.doc_id) for d in documents))
    assert by_packer[0] == by_packer[1] == by_packer[2]


@pytest.mark.parametrize("cut", ["stream", "window"])
@pytest.mark.parametrize("saved_step", range(8))
def test_saved_at_any_step_the_run_goes_on_exactly(cut, saved_step):
    unbroken = build(num_steps=8, cut=cut)
    for _ in range(saved_step):
        unbroken.next_step()
    saved = json.loads(json.dumps(unbroken.state()))
    resumed = build(num_steps=8, cut=cut)
    resumed.next_step()  # wherever it stood before
    resumed.restore(saved)
    assert resumed.step == saved_step
    for _ in range(saved_step, 8):
        assert resumed.next_step() == unbroken.next_step()


def test_a_checkpoint_of_a_trained_step_ignores_the_steps_planned_ahead():
    planner = build(num_steps=9, kept_steps=3)
    states = []
    for _ in range(6):
        states.append(planner.state())
        planner.next_step()
    assert [planner.state_before(k) for k in (3, 4, 5)] == states[3:]
    assert planner.state_before(6) == planner.state()
    with pytest.raises(StateError, match=r"step must be one of \[3, 4, 5\], the last ones planned, got 2"):
        planner.state_before(2)
    with pytest.raises(StateError, match="got 7"):
        planner.state_before(7)


def test_steps_planned_before_a_restore_are_forgotten():
    planner = build()
    saved = planner.state()
    for _ in range(3):
        planner.next_step()
    planner.restore(saved)
    with pytest.raises(StateError, match=r"step must be one of \[\], the last ones planned, got 2"):
        planner.state_before(2)


def test_plan_seconds_come_from_the_clock():
    ticks = iter([10.0, 10.25, 20.0, 20.5])
    planner = build(clock=lambda: next(ticks))
    planner.next_step()
    planner.next_step()
    assert (planner.plan_s(0), planner.plan_s(1)) == (0.25, 0.5)


def test_ledger_names_every_document_where_it_is_trained():
    planner = build(lengths=[8])
    plans = [planner.next_step(), planner.next_step()]
    # A document of 8 waits one step here, so step 0 trains nothing and step 1 the four of step 0.
    first, second = map(ledger_line, plans)
    assert first == '{"step":0,"replicas":[[[]],[[]]]}\n'
    assert second == '{"step":1,"replicas":[[[[0,0,0,8]],[[2,0,0,8]]],[[[1,0,0,8]],[[3,0,0,8]]]]}\n'
    assert [d.doc_id for d in trained(plans)] == [0, 2, 1, 3]


def test_no_step_after_the_last():
    planner = build(num_steps=1)
    planner.next_step()
    with pytest.raises(ConfigError, match="step must be below num_steps 1, got 1"):
        planner.next_step()


def test_bad_configuration_is_named():
    wide = NextFit(shape=replace(SHAPE, window_tokens=16))
    with pytest.raises(ConfigError, match="window_tokens of the stream and of the packer must be equal, got 8 and 16"):
        build(packer=wide)
    with pytest.raises(ConfigError, match="num_steps must be >= 1 or None, got 0"):
        build(num_steps=0)
    with pytest.raises(ConfigError, match="kept_steps must be >= 1, got 0"):
        build(kept_steps=0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"packer": NextFit(shape=SHAPE, hold_over=5)}, "packer hold_over .* saved '6', present '5'"),
        ({"packer": NextFit(shape=replace(SHAPE, num_replicas=3))}, "num_micro_batches .* saved 4, present 6"),
        ({"seed": 2}, "stream seed .* saved 1, present 2"),
        ({"lengths": [5, 3]}, "num_sequences of source 0 .* saved 14, present 2"),
    ],
)
def test_state_of_another_run_is_refused_and_changes_nothing(other, message):
    planner = build()
    planner.next_step()
    present = build(**other)
    with pytest.raises(StateError, match=message):
        present.restore(planner.state())
    assert present.step == 0


def test_another_division_among_replicas_and_another_cost_model_are_accepted():
    planner = build()
    planner.next_step()
    shape = replace(SHAPE, num_replicas=4, micro_batches_per_replica=1)
    present = build(packer=NextFit(shape=shape, cost=object()))
    present.restore(planner.state())
    here, there = planner.next_step(), present.next_step()
    assert (len(here.replicas), len(there.replicas)) == (2, 4)
    assert sorted(d.doc_id for d in trained([here])) == sorted(d.doc_id for d in trained([there]))


@pytest.mark.parametrize("field", ["version", "packer", "packer_state", "stream"])
def test_incomplete_state_is_refused(field):
    planner = build()
    saved = {k: v for k, v in planner.state().items() if k != field}
    with pytest.raises(StateError, match=f"must be complete.*{field}"):
        planner.restore(saved)


def test_states_of_stream_and_packer_must_be_of_one_moment():
    planner = build()
    early = planner.state()
    planner.next_step()
    with pytest.raises(StateError, match=r"drawn tokens .* saved 32, present 0"):
        planner.restore({**planner.state(), "stream": early["stream"]})


@pytest.mark.parametrize("cut", ["stream", "window"])
@pytest.mark.parametrize("name", PACKERS)
def test_registered_packers_conserve_documents_over_a_run_with_a_resume_at_every_step(name, cut):
    options = PackerOptions(
        shape=SHAPE,
        cost=CrossoverCost(crossover_tokens=4),
        thresholds_tokens=(6,),
        greedy_window_batches=2,
    )
    planner, documents, waited = build(num_steps=10, cut=cut, packer=build_packer(name, options)), [], 0
    for step in range(10):
        plan = planner.next_step()
        documents += trained([plan])
        assert len({d.doc_id for d in documents}) == len(documents), step
        waited += len(plan.waiting)
        saved = json.loads(json.dumps(planner.state_before(step + 1)))
        planner = build(num_steps=10, cut=cut, packer=build_packer(name, options))
        planner.restore(saved)
    assert planner.finished
    assert sorted(d.doc_id for d in documents) == list(range(len(documents)))
    assert total_tokens(documents) <= 10 * SHAPE.budget_tokens
    unbroken = build(num_steps=10, cut=cut, packer=build_packer(name, options))
    assert trained([unbroken.next_step() for _ in range(10)]) == documents
    assert waited > 0 or name in ("plain", "makespan", "two_stage", "solver")


def test_steps_are_filled_up_to_a_number_that_the_schedule_takes():
    """Two micro-batches a replica and virtual stages that want three: an empty one comes last."""
    as_packed, filled = build(num_steps=3), build(num_steps=3, takes=lambda count: count % 3 == 0)
    for _ in range(3):
        before, after = as_packed.next_step(), filled.next_step()
        assert trained([after]) == trained([before])
        assert after.waiting == before.waiting
        for replica, fuller in zip(before.replicas, after.replicas, strict=True):
            assert len(fuller) == -(-len(replica) // 3) * 3 > len(replica)
            assert fuller[: len(replica)] == replica
            assert not any(m.documents for m in fuller[len(replica) :])
    assert filled.state() == as_packed.state()
