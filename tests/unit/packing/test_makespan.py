"""The makespan packer by hand: what it does about a bubble, a long document and a slow replica, and what it refuses."""

import pickle

import numpy as np
import pytest

from wlb.cost import CrossoverCost
from wlb.documents import documents_from_lengths
from wlb.errors import ConfigError, PackingError
from wlb.packing import PackerOptions, StepShape, build_packer
from wlb.packing.makespan.fill import by_length, spread
from wlb.packing.makespan.moves import Draws
from wlb.packing.makespan.start import orders
from wlb.packing.makespan.work import WorkTable
from wlb.schedule import PipelineModel, PipelineShape, model_timeline

COST = CrossoverCost(crossover_tokens=8)


def _packer(pipeline, *, window=8, per_replica=2, replicas=1, **more):
    shape = StepShape(window_tokens=window, micro_batches_per_replica=per_replica, num_replicas=replicas)
    return build_packer("makespan", PackerOptions(shape=shape, cost=COST, pipeline=pipeline, **more))


def _plan(packer, lengths):
    return packer.plan_step(packer.initial_state(), documents_from_lengths(lengths))[0]


def _lengths(plan):
    return [[m.lengths for m in replica] for replica in plan.replicas]


def test_a_bubble_is_shrunk_by_more_micro_batches():
    pipeline = PipelineModel.equal_stages(COST, 4)
    plan = _plan(_packer(pipeline), [1] * 16)
    # plain: 2 micro-batches of 8 tokens over 4 stages take 5 slots of 8; 8 micro-batches of 2 take 11 slots of 2, and
    # with one token at each end the pipeline fills and drains faster still
    assert _lengths(plan) == [[(1,), *[(1, 1)] * 7, (1,)]]
    slot_s = (COST.forward_s([1]) + COST.backward_s([1])) / 4
    assert model_timeline(plan, pipeline).makespan_s < 11 * 2 * slot_s


def test_without_a_pipeline_micro_batches_are_as_few_as_the_cap_allows():
    assert [len(m) for m in _lengths(_plan(_packer(None), [1] * 16))[0]] == [8, 8]


def test_a_fixed_cost_keeps_micro_batches_few():
    dear = CrossoverCost(crossover_tokens=8, overhead_tokens=1000)
    plan = _plan(_packer(PipelineModel.equal_stages(dear, 4)), [1] * 16)
    assert len(plan.replicas[0]) == 2


def test_the_replica_with_the_long_document_gets_little_else():
    plan = _plan(_packer(PipelineModel.equal_stages(COST, 4), replicas=2), [8, *[1] * 24])
    sums = [sum(m.num_tokens for m in replica) for replica in plan.replicas]
    assert sorted(sums)[0] == min(
        s for s, r in zip(sums, plan.replicas, strict=True) if max(m.max_seqlen for m in r) == 8
    )
    assert sorted(sums)[0] < 16 < sorted(sums)[1]


def test_long_documents_share_a_replica():
    work = WorkTable(PipelineModel.equal_stages(COST, 4)).step_work(documents_from_lengths([1] * 56 + [8, 8]))
    parts = by_length(work, 2, fill_tenths=30)
    assert sorted(work.tokens[parts[0]].tolist())[-2:] == [8, 8]
    assert sorted(d for part in parts for d in part) == list(range(58))
    assert set(work.tokens[parts[1]].tolist()) == {1}


def test_equal_counts_and_multiples():
    pipeline = PipelineModel.equal_stages(COST, 4)
    lengths = [8, *[1] * 24]
    free = _plan(_packer(pipeline, replicas=2), lengths)
    assert len({len(r) for r in free.replicas}) == 2
    equal = _plan(_packer(pipeline, replicas=2, equal_counts=True), lengths)
    assert len({len(r) for r in equal.replicas}) == 1
    even = _plan(_packer(pipeline, replicas=2, count_multiple=2), lengths)
    assert {len(r) % 2 for r in even.replicas} == {0}


def test_virtual_stages_get_whole_groups():
    pipeline = PipelineModel.equal_stages(COST, 2, num_chunks=2, sends="overlapped")
    plan = _plan(_packer(pipeline), [3, 1, 2, 2, 1, 1, 4, 2])
    assert len(plan.replicas[0]) % 2 == 0


def test_documents_that_were_not_cut_for_it_stay_within_the_in_flight_cap():
    # two stages hold two micro-batches, and the cap of one window leaves room for one of these
    packer = _packer(PipelineModel.equal_stages(COST, 2), per_replica=1)
    assert packer.in_flight_tokens == 8
    plan = _plan(packer, [7, 8])
    assert _lengths(plan) == [[(7,), (), (8,)]]


def test_in_flight_default_is_what_plain_holds():
    def held(num_stages, per_replica, num_chunks=1):
        pipeline = PipelineModel.equal_stages(COST, num_stages, num_chunks=num_chunks)
        return _packer(pipeline, per_replica=per_replica).in_flight_tokens

    assert [held(1, 4), held(4, 2), held(4, 8)] == [8, 16, 32]
    # 6 + 4 forwards of half the layers before the first backward, which the eleventh precedes
    assert held(4, 8, num_chunks=2) == 11 * 8 // 2


def test_wanted_tokens_is_plains():
    packer = _packer(None, replicas=3)
    state = packer.initial_state()
    assert packer.wanted_tokens(state) == 48
    _, state = packer.plan_step(state, documents_from_lengths([8] * 6))
    assert (packer.wanted_tokens(state), state.waiting) == (48, ())


def test_documents_are_spread_longest_first_and_the_cap_holds():
    work = WorkTable(PipelineModel(stretch_costs=(COST,))).step_work(documents_from_lengths([4, 3, 3, 2]))
    assert spread(work, [0, 1, 2, 3], 2, cap_tokens=6) == [[0, 3], [1, 2]]
    assert spread(work, [0, 1, 2, 3], 2, cap_tokens=5) is None


def test_many_documents_are_dealt_about_evenly():
    lengths = np.random.default_rng(2).integers(1, 60, 3000).tolist()
    work = WorkTable(PipelineModel(stretch_costs=(COST,))).step_work(documents_from_lengths(lengths))
    filled = spread(work, list(range(3000)), 40, cap_tokens=10**6)
    assert sorted(d for m in filled for d in m) == list(range(3000))
    loads = [int(work.total[m].sum()) for m in filled]
    assert max(loads) < 1.05 * min(loads)
    # and one by one where that would break the cap
    tokens = sum(lengths)
    tight = spread(work, list(range(3000)), 40, cap_tokens=tokens // 40 + 10)
    assert max(int(work.tokens[m].sum()) for m in tight) <= tokens // 40 + 10


def test_orders_hold_every_micro_batch_once():
    tried = list(orders([5, 1, 4, 2, 3]))
    assert tried[0] == [3, 2, 0, 4, 1]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in tried)
    assert [sorted(order) for order in orders([7])] == [[0]] * 3


def test_draws_are_the_same_everywhere():
    draws = Draws(0)
    assert draws.below(100, 5).tolist() == [35, 8, 12, 66, 85]
    assert set(draws.weighted(np.array([0, 3, 0, 1]), 200).tolist()) == {1, 3}


def test_work_is_rounded_per_document_and_remembered():
    table = WorkTable(PipelineModel.equal_stages(COST, 2))
    work = table.step_work(documents_from_lengths([2, 8, 2]))
    assert [d.doc_id for d in work.documents] == [1, 0, 2]
    assert work.tokens.tolist() == [8, 2, 2]
    # forward (1 + 1) / 2 s, backward (2.5 + 2) / 2 s of the first; both stages are of one class
    assert work.rows[:, 0].tolist() == [10**9, 2_250_000_000]
    assert work.total[0] == 2 * (10**9 + 2_250_000_000)
    assert work.fixed.tolist() == [0, 0]


def test_messages_are_rows_of_their_own():
    slow = CrossoverCost(crossover_tokens=8, latency_s=0.5, bytes_per_s=4.0)
    pipeline = PipelineModel.equal_stages(slow, 2, bytes_per_token=2)
    work = WorkTable(pipeline).step_work(documents_from_lengths([8]))
    assert (work.rows[2, 0], work.fixed[2]) == (4 * 10**9, 5 * 10**8)
    packer = _packer(pipeline)
    plan = _plan(packer, [4, 4, 2, 2, 2, 2])
    assert sorted(n for m in plan.replicas[0] for n in m.lengths) == [2, 2, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("pipeline", "options", "message"),
    [
        (None, {"cap_windows": 0.5}, "cap_tokens must be >= the window of 8 tokens, got 4"),
        (None, {"in_flight_windows": 0.5}, "in_flight_tokens must be >= cap_tokens = 8, .* got 4"),
        (None, {"search_evaluations": -1}, "search_evaluations must be >= 0, got -1"),
        (None, {"count_multiple": 0}, "count_multiple must be >= 1, got 0"),
        (None, {"count_multiple": 3}, "micro_batches_per_replica must be a multiple of count_multiple = 3 .* got 2"),
        (
            PipelineModel.equal_stages(COST, 4, num_chunks=2),
            {},
            "micro_batches_per_replica must be .* 4 stages with 2 chunks takes, got 2",
        ),
    ],
)
def test_options_that_break_a_rule_are_refused(pipeline, options, message):
    with pytest.raises(ConfigError, match=message):
        _packer(pipeline, **options)


def test_a_document_over_the_cap_is_refused():
    with pytest.raises(PackingError, match=r"length must be <= 8, .* got 9 \(document 0\)"):
        _plan(_packer(None), [9])


def test_a_packer_survives_the_way_to_another_process():
    packer = _packer(PipelineModel.equal_stages(COST, 4), replicas=2)
    lengths = [8, 3, 5, *[1] * 16]
    plan = _plan(packer, lengths)  # and fills its tables
    assert _plan(pickle.loads(pickle.dumps(packer)), lengths) == plan


def test_the_shape_of_a_pipeline_is_part_of_the_packer():
    assert _packer(PipelineModel.equal_stages(COST, 2)).pipeline.shape == PipelineShape(num_stages=2)
