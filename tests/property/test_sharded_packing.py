"""Packing that knows how context-parallel ranks divide a micro-batch: never slower for it, and the same documents."""

import pickle
import random
from itertools import pairwise

import pytest

from wlb.cost import CrossoverCost, ScaledCost
from wlb.documents import documents_from_lengths
from wlb.errors import ConfigError
from wlb.packing import PACKERS, PackerOptions, StepShape, build_packer
from wlb.schedule import PipelineModel, PipelineShape, model_timeline
from wlb.sharding import SHARDERS, Division, ShardCosts, Sharding
from wlb.sharding.micro_batch_cost import sharded

WINDOW = 256
COST = CrossoverCost(crossover_tokens=40, overhead_tokens=2)
UNEQUAL = PipelineModel(
    shape=PipelineShape(num_stages=4),
    stretch_costs=tuple(ScaledCost(whole=COST, share=s) for s in (0.3, 0.2, 0.2, 0.3)),
    bytes_per_token=1,
)
PIPELINES = {
    "1 stage": PipelineModel.equal_stages(COST, 1),
    "4 stages": PipelineModel.equal_stages(COST, 4),
    "unequal": UNEQUAL,
    "virtual": PipelineModel.equal_stages(COST, 2, num_chunks=2),
}


def _division(name, cp=4, *, received=3):
    costs = ShardCosts(tile_tokens=4, received_token_pairs=received)
    sharding = Sharding(name=name, cp_size=cp, costs=costs)
    return Division(sharding=sharding, pad_to_multiple=cp, typical_tokens=WINDOW)


def _packer(pipeline, division, *, name="makespan", per_replica=4, replicas=1, shard_plans=200, **more):
    return build_packer(
        name,
        PackerOptions(
            shape=StepShape(window_tokens=WINDOW, micro_batches_per_replica=per_replica, num_replicas=replicas),
            cost=COST,
            pipeline=pipeline,
            division=division,
            search_evaluations=200,
            shard_plans=shard_plans,
            **more,
        ),
    )


def _plan(packer, lengths):
    return packer.plan_step(packer.initial_state(), documents_from_lengths(lengths))[0]


def _time_s(plan, pipeline, division):
    return model_timeline(plan, sharded(pipeline, division)).makespan_s


def _lengths(seed, *, windows):
    """Documents that fill so many windows, cut where the windows end."""
    rng = random.Random(seed)
    lengths = []
    for _ in range(windows):
        room = WINDOW
        while room:
            lengths.append(min(room, 1 + int(rng.lognormvariate(2.5, 1.3))))
            room -= lengths[-1]
    return lengths


@pytest.mark.parametrize("name", SHARDERS)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_never_slower_than_without_knowing_or_than_plain(name, pipeline, replicas):
    model, division = PIPELINES[pipeline], _division(name)
    gains = []
    for seed in range(3):
        lengths = _lengths(seed, windows=4 * replicas)
        knowing = _plan(_packer(model, division, replicas=replicas), lengths)
        others = [
            _plan(_packer(model, None, replicas=replicas), lengths),
            _plan(_packer(model, None, name="plain", replicas=replicas), lengths),
        ]
        time_s, *others_s = (_time_s(plan, model, division) for plan in (knowing, *others))
        assert time_s <= min(others_s) * (1 + 1e-6), (seed, lengths)
        gains.append(others_s[0] / time_s)
        assert sorted(d.doc_id for m in knowing.micro_batches for d in m.documents) == list(range(len(lengths)))
        assert max(m.num_tokens for m in knowing.micro_batches) <= WINDOW
        assert all(model.shape.takes(len(r)) for r in knowing.replicas)
        held = [model.shape.first_stage_peak_tokens([m.num_tokens for m in r]) for r in knowing.replicas]
        assert max(held) <= _packer(model, division, replicas=replicas).in_flight_tokens
    print(f"{name}, {pipeline}, {replicas} replicas: {gains}")
    assert max(gains) > 1


@pytest.mark.parametrize("name", SHARDERS)
def test_more_shard_plans_never_give_a_slower_step_and_none_are_needed(name):
    model, division = PIPELINES["4 stages"], _division(name)
    lengths = _lengths(11, windows=4)
    times_s = []
    for shard_plans in (20, 40, 100, 400, 2000):
        plan = _plan(_packer(model, division, shard_plans=shard_plans), lengths)
        times_s.append(_time_s(plan, model, division))
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times_s))
    unplanned = _plan(_packer(model, division, shard_plans=0), lengths)
    assert sorted(d.doc_id for m in unplanned.micro_batches for d in m.documents) == list(range(len(lengths)))


@pytest.mark.parametrize("shard_plans", [0, 7, 30, 300])
@pytest.mark.parametrize("name", SHARDERS)
def test_no_more_shard_plans_are_made_than_allowed(name, shard_plans, monkeypatch):
    planned = []
    monkeypatch.setitem(SHARDERS, "counted", lambda *a: planned.append(tuple(a[0])) or SHARDERS[name](*a))
    packer = _packer(PIPELINES["4 stages"], _division("counted"), shard_plans=shard_plans)
    assert packer.division.order_matters in (True, False)
    assert all(packer.division.even_pairs(n) for n in range(1, WINDOW + 1))  # what estimates are measured on
    planned.clear()
    _plan(packer, _lengths(2, windows=4))
    assert len(planned) <= shard_plans


@pytest.mark.parametrize("name", SHARDERS)
def test_what_was_planned_before_changes_no_plan(name):
    steps = [_lengths(seed, windows=4) for seed in (3, 4, 3)]
    packer = _packer(UNEQUAL, _division(name), shard_plans=60)
    plans = [_plan(packer, lengths) for lengths in steps]
    assert plans[0] == plans[2]  # the third finds its prices remembered
    for lengths, plan in zip(steps, plans, strict=True):
        travelled = pickle.loads(pickle.dumps(packer))
        assert _plan(travelled, lengths) == plan
        assert _plan(_packer(UNEQUAL, _division(name), shard_plans=60), lengths) == plan


def test_replicas_that_must_run_equally_many_do():
    packer = _packer(PIPELINES["4 stages"], _division("per_sequence"), replicas=2, equal_counts=True)
    for seed in range(4):
        assert len({len(r) for r in _plan(packer, _lengths(seed, windows=8)).replicas}) == 1


def test_knowing_the_sharding_keeps_long_documents_from_short_ones():
    """Two of 128 tokens and 256 of one, in two windows of 256 over 2 ranks, cut by position in 4 chunks of 64.

    A long document beside short ones is chunks 0 and 1, of which rank 1 gets the one with three quarters of the pairs.
    Alone, or beside the other long one, both ranks have a part of its beginning and a part of its end.
    """
    model, division = PIPELINES["1 stage"], _division("per_sequence", 2, received=0)
    lengths = [128, *[1] * 128] * 2
    knowing, blind = (_plan(_packer(model, d, per_replica=2), lengths) for d in (division, None))
    assert sorted(m.max_seqlen for m in blind.micro_batches) == [128, 128]
    assert [len(set(m.lengths)) for m in blind.micro_batches] == [2, 2]
    assert {len(set(m.lengths)) for m in knowing.micro_batches} == {1}
    assert _time_s(knowing, model, division) < 0.9 * _time_s(blind, model, division)


@pytest.mark.parametrize("name", [n for n in PACKERS if n != "plain"])
def test_one_rank_changes_nothing(name):
    lengths = _lengths(5, windows=8)
    division = Division.of(Sharding(name="per_sequence", cp_size=1), pad_to_multiple=1, typical_tokens=WINDOW)
    options = {"name": name, "replicas": 2, "cap_windows": 1.5}
    assert division is None
    assert _packer(UNEQUAL, division, **options).plan_step(
        _packer(UNEQUAL, division, **options).initial_state(), documents_from_lengths(lengths)
    ) == _packer(UNEQUAL, None, **options).plan_step(
        _packer(UNEQUAL, None, **options).initial_state(), documents_from_lengths(lengths)
    )


@pytest.mark.parametrize("name", ["greedy", "wlb"])
def test_packers_that_add_work_compare_what_divided_documents_cost(name):
    """Cut in 8 the shortest cost as much as longer ones: a tile a chunk."""
    costs = ShardCosts(tile_tokens=32)
    cut = Division(
        sharding=Sharding(name="per_document", cp_size=4, costs=costs), pad_to_multiple=4, typical_tokens=256
    )
    packer = _packer(None, cut, name=name, cap_windows=1.5)
    assert packer.cost.attention_s(64, 64) > 2 * COST.attention_s(64, 64) / 4
    assert packer.cost.attention_s(256, 256) < 2 * COST.attention_s(256, 256) / 4


def test_a_negative_number_of_shard_plans_is_refused():
    with pytest.raises(ConfigError, match="shard_plans must be >= 0, got -1"):
        _packer(None, _division("per_sequence"), shard_plans=-1)
