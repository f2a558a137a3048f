"""Two-stage packing by hand: what each stage finds, against brute force where that is possible, and what it refuses."""

import pickle
import random
from itertools import product

import numpy as np
import pytest

from wlb.cost import CrossoverCost
from wlb.documents import documents_from_lengths
from wlb.errors import ConfigError, PackingError
from wlb.packing import PackerOptions, StepShape, build_packer
from wlb.packing.makespan.timer import ReplicaTimer
from wlb.packing.makespan.work import StepWork
from wlb.packing.two_stage.dispatch import dispatch
from wlb.packing.two_stage.fill import MAX_COUNTS, ClosedForm, Filler
from wlb.packing.two_stage.level import level
from wlb.packing.two_stage.packer import TwoStagePacker
from wlb.schedule import PipelineModel

COST = CrossoverCost(crossover_tokens=8)


def _packer(pipeline, *, window=8, per_replica=2, replicas=1, **more):
    shape = StepShape(window_tokens=window, micro_batches_per_replica=per_replica, num_replicas=replicas)
    return build_packer("two_stage", PackerOptions(shape=shape, cost=COST, pipeline=pipeline, **more))


def _plan(packer, lengths):
    return packer.plan_step(packer.initial_state(), documents_from_lengths(lengths))[0]


def _lengths(plan):
    return [[m.lengths for m in replica] for replica in plan.replicas]


def _work(totals, tokens=None):
    """Documents of this work, longest first, and of as many tokens unless said otherwise."""
    tokens = totals if tokens is None else tokens
    return StepWork(
        documents=documents_from_lengths(tokens),
        tokens=np.array(tokens, dtype=np.int64),
        rows=np.array([totals, totals], dtype=np.int64),
        total=np.array(totals, dtype=np.int64),
        fixed=np.zeros(2, dtype=np.int64),
    )


def _filler(totals, *, cap_tokens=100, in_flight_tokens=10**6, num_stages=4, overhead=0, takes=lambda _: True):
    timer = ReplicaTimer(
        PipelineModel.equal_stages(COST, num_stages), cap_tokens=cap_tokens, in_flight_tokens=in_flight_tokens
    )
    return Filler(_work(totals), timer, ClosedForm(num_stages=num_stages, overhead=overhead), takes=takes)


def _stage_one(totals, parts, num_stages):
    return max(sum(totals[d] for d in p) + (num_stages - 1) * max((totals[d] for d in p), default=0) for p in parts)


def test_long_documents_share_a_replica_and_so_its_warm_up():
    totals = np.array([8, 8, *[1] * 22], dtype=np.int64)
    by_length = dispatch(totals, 2, num_stages=4, restarts=0, seed=0)
    assert [totals[p].tolist() for p in by_length] == [[8, *[1] * 11]] * 2  # 19 + 3 x 8 = 43 each
    parts = dispatch(totals, 2, num_stages=4, restarts=50, seed=0)
    assert [0, 1] in [p[:2] for p in parts]
    assert _stage_one(totals, parts, 4) < 43
    # without a pipeline nothing warms up, and longest first is even
    assert sorted(int(totals[p].sum()) for p in dispatch(totals, 2, num_stages=1, restarts=0, seed=0)) == [19, 19]


def test_more_random_orders_are_never_worse_and_a_seed_gives_the_same_again():
    rng = random.Random(3)
    totals = np.array(sorted((rng.randint(1, 40) ** 2 for _ in range(30)), reverse=True), dtype=np.int64)
    values = []
    for restarts in (0, 5, 50):
        parts = dispatch(totals, 3, num_stages=4, restarts=restarts, seed=7)
        assert parts == dispatch(totals, 3, num_stages=4, restarts=restarts, seed=7)
        assert sorted(d for p in parts for d in p) == list(range(30))
        assert all(p == sorted(p) for p in parts)
        values.append(_stage_one(totals, parts, 4))
    assert values[0] > values[2]  # for these documents longest first is not the best
    assert values[1] >= values[2]


def test_stage_one_against_every_assignment():
    """Up to 7 documents on 2 or 3 replicas of 4 stages; seed 5."""
    rng = random.Random(5)
    gaps = []
    for _ in range(40):
        totals = sorted((rng.randint(1, 12) ** 2 for _ in range(rng.randint(1, 7))), reverse=True)
        num_replicas = rng.choice([2, 3])
        best = min(
            _stage_one(totals, [[d for d in range(len(totals)) if owners[d] == r] for r in range(num_replicas)], 4)
            for owners in product(range(num_replicas), repeat=len(totals))
        )
        parts = dispatch(np.array(totals, dtype=np.int64), num_replicas, num_stages=4, restarts=50, seed=0)
        found = _stage_one(totals, parts, 4)
        assert found >= best
        gaps.append(found / best - 1)
    assert len(gaps) == 40
    assert sum(gap == 0 for gap in gaps) >= 36
    assert max(gaps) < 0.05


def test_many_documents_are_dispatched_in_bundles():
    lengths = np.sort(np.random.default_rng(2).integers(1, 3000, 3000))[::-1]
    totals = lengths.astype(np.int64) ** 2
    parts = dispatch(totals, 4, num_stages=4, restarts=50, seed=0)
    assert sorted(d for p in parts for d in p) == list(range(3000))
    values = [int(totals[p].sum() + 3 * totals[p].max()) for p in parts]
    assert max(values) < 1.002 * min(values)


def test_a_document_and_a_shorter_one_change_places():
    work = _work([5, 4, 3, 3, 3])
    placed = [[0, 3], [1, 2, 4]]  # longest first: 5 3 | 4 3 3
    assert sorted(map(sorted, level(work, placed, cap_tokens=9, close_to=0))) == [[0, 1], [2, 3, 4]]
    assert level(work, placed, cap_tokens=9, close_to=10) == placed
    # micro-batches of 10 and 8 tokens: were the 5 one of 7 tokens, it and the 4 would not fit together in 10
    heavy = _work([5, 4, 3, 3, 3], tokens=[7, 4, 3, 3, 3])
    assert level(heavy, placed, cap_tokens=10, close_to=0) == placed


def test_a_document_moves_where_no_swap_helps():
    assert level(_work([3, 3, 3]), [[0, 1, 2], []], cap_tokens=9, close_to=0) == [[1, 2], [0]]


def test_the_closed_form_chooses_the_number_of_micro_batches():
    # 16 documents of work 1 on 4 stages: (16 / v)(3 + v) falls up to v = 16, one document each
    assert [len(m) for m in _filler([1] * 16).fill([list(range(16))])[0]] == [1] * 16
    # with a fixed cost of 3 as well, (16 / v + 3)(3 + v) is least at v = 4: 4 is the root of 16 x 3 / 3
    form = ClosedForm(num_stages=4, overhead=3)
    assert [form.value(-(-16 // v), v) for v in (2, 4, 8, 16)] == [55, 49, 55, 76]
    assert form.best_count(16, 1) == 4
    assert [len(m) for m in _filler([1] * 16, overhead=3).fill([list(range(16))])[0]] == [4] * 4
    # beside a document of work 8 more than two micro-batches cannot be shorter than it
    assert sorted(map(len, _filler([8, *[1] * 8]).fill([list(range(9))])[0])) == [1, 8]


def test_counts_are_few_and_what_the_cap_and_the_schedule_ask_for():
    filler = _filler([1] * 300, cap_tokens=10, takes=lambda count: count % 4 == 0)
    counts = filler.counts([list(range(300))])
    assert counts[0] == 32  # 300 tokens need 30 micro-batches of 10
    assert len(counts) <= MAX_COUNTS
    assert {count % 4 for count in counts} == {0}
    assert counts[-1] == 300
    assert _filler([5, 5], cap_tokens=5).counts([[0, 1]]) == [2]


def test_parts_filled_together_have_equally_many_micro_batches():
    filler = _filler([8, *[1] * 24])
    parts = [[0, 1, 2], list(range(3, 25))]
    apart = [filler.fill([part])[0] for part in parts]
    assert len({len(m) for m in apart}) == 2
    assert len({len(m) for m in filler.fill(parts)}) == 1


def test_a_step_by_hand():
    plan = _plan(_packer(PipelineModel.equal_stages(COST, 4), replicas=2), [8, *[1] * 24])
    # the 8 works 16 and warms 3 x 16 up, what all the 1 together work 27: they leave its replica to it
    assert _lengths(plan) == [[(8,)], [(1,)] * 24]


def test_least_work_runs_first_and_last():
    plan = _plan(_packer(PipelineModel.equal_stages(COST, 2), window=16), [4, 4, 4, 4, 3, 3])
    assert _lengths(plan) == [[(3,), (4,), (4,), (4,), (4,), (3,)]]


def test_multiples_and_equal_counts():
    pipeline = PipelineModel.equal_stages(COST, 4)
    lengths = [8, *[1] * 24]
    assert {len(r) % 2 for r in _plan(_packer(pipeline, replicas=2, count_multiple=2), lengths).replicas} == {0}
    equal = _plan(_packer(pipeline, replicas=2, equal_counts=True), lengths)
    assert len({len(r) for r in equal.replicas}) == 1
    virtual = PipelineModel.equal_stages(COST, 2, num_chunks=2, sends="overlapped")
    plan = _plan(_packer(virtual), [3, 1, 2, 2, 1, 1, 4, 2])
    assert len(plan.replicas[0]) % 2 == 0


def test_empty_micro_batches_keep_the_in_flight_cap():
    # two stages hold two micro-batches, and the cap of one window leaves room for one of these
    packer = _packer(PipelineModel.equal_stages(COST, 2), per_replica=1)
    assert packer.in_flight_tokens == 8
    assert _lengths(_plan(packer, [7, 8])) == [[(8,), (), (7,), ()]]
    both = _packer(PipelineModel.equal_stages(COST, 2), per_replica=1, replicas=2, equal_counts=True)
    assert len({len(r) for r in _plan(both, [7, 8, 6]).replicas}) == 1


def test_every_document_is_trained_in_its_step():
    packer = _packer(None, replicas=3)
    state = packer.initial_state()
    assert packer.wanted_tokens(state) == 48
    plan, state = packer.plan_step(state, documents_from_lengths([8, 8, 8, 5, 5, 5, 5, 4]))
    assert plan.waiting == ()
    assert sorted(d.doc_id for m in plan.micro_batches for d in m.documents) == list(range(8))
    assert (packer.wanted_tokens(state), state.waiting) == (48, ())


def test_documents_wait_as_they_do_for_makespan():
    """Whole documents longer than 5 wait for up to 3 steps; both packers then train the same ones in every step."""
    shape = StepShape(window_tokens=8, micro_batches_per_replica=2, num_replicas=2)
    options = PackerOptions(shape=shape, cost=COST, thresholds_tokens=(6,), max_delay_steps=3, search_evaluations=0)
    two_stage, makespan = (build_packer(name, options) for name in ("two_stage", "makespan"))
    rng = random.Random(1)
    state, next_id, num_waiting = two_stage.initial_state(), 0, 0
    for step in range(12):
        arrivals = ()
        while two_stage.wanted_tokens(state, arrivals, steps_left=12 - step) > 0:
            arrivals += documents_from_lengths([rng.randint(1, 8)], arrival=step, first_id=next_id)
            next_id += 1
        plan, after = two_stage.plan_step(state, arrivals, steps_left=12 - step)
        other, same = makespan.plan_step(state, arrivals, steps_left=12 - step)
        assert same == after
        trained = sorted(d.doc_id for m in plan.micro_batches for d in m.documents)
        assert trained == sorted(d.doc_id for m in other.micro_batches for d in m.documents)
        assert all(step - d.arrival <= 3 for m in plan.micro_batches for d in m.documents)
        assert max(m.num_tokens for m in plan.micro_batches) <= 8
        num_waiting += len(plan.waiting)
        state = after
    assert num_waiting > 0
    assert state.waiting == ()


def _make(**more):
    shape = StepShape(window_tokens=8, micro_batches_per_replica=2, num_replicas=1)
    pipeline = PipelineModel(stretch_costs=(COST,))
    return TwoStagePacker(**{"shape": shape, "pipeline": pipeline, "cap_tokens": 8, "in_flight_tokens": 8, **more})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cap_tokens": 4}, "cap_tokens must be >= the window of 8 tokens, got 4"),
        ({"in_flight_tokens": 4}, "in_flight_tokens must be >= cap_tokens = 8, .* got 4"),
        ({"restarts": -1}, "restarts must be >= 0, got -1"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"count_multiple": 0}, "count_multiple must be >= 1, got 0"),
        ({"count_multiple": 3}, "micro_batches_per_replica must be a multiple of count_multiple = 3 .* got 2"),
        (
            {"pipeline": PipelineModel.equal_stages(COST, 4, num_chunks=2)},
            "micro_batches_per_replica must be .* 4 stages with 2 chunks takes, got 2",
        ),
    ],
)
def test_options_that_break_a_rule_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        _make(**options)


def test_a_document_over_the_cap_is_refused():
    with pytest.raises(PackingError, match=r"length must be <= 8, .* got 9 \(document 0\)"):
        _plan(_make(), [9])


def test_a_packer_survives_the_way_to_another_process():
    packer = _packer(PipelineModel.equal_stages(COST, 4), replicas=2)
    lengths = [8, 3, 5, *[1] * 16]
    plan = _plan(packer, lengths)  # and fills its tables
    assert _plan(pickle.loads(pickle.dumps(packer)), lengths) == plan
