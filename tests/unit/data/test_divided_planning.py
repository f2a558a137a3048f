"""Planning for context-parallel ranks: the same beside training and in place, and each micro-batch planned once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness.data import learnable_documents, write_index
from wlb.cost import CrossoverCost
from wlb.data.collate import padded_lengths
from wlb.data.index_file import IndexRows
from wlb.data.plan_process import ProcessSource
from wlb.data.plan_source import InlineSource, PlannerSpec
from wlb.metrics import imbalance_degree
from wlb.packing import PACKERS, PackerOptions, StepShape
from wlb.schedule import PipelineModel
from wlb.sharding import SHARDERS, Division, ShardCosts, Sharding
from wlb.sharding.micro_batch_cost import ShardedCost, statistics_cost

NUM_STEPS = 4
COST = CrossoverCost(crossover_tokens=20)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("plan") / "text_document"
    write_index(prefix, learnable_documents(count=600, seed=3, longest=150))
    return (IndexRows(prefix=str(prefix), first=0, stop=600, weight=1.0, sequence_base=0),)


def _spec(rows, packer, sharder):
    sharding = Sharding(name=sharder, cp_size=4, costs=ShardCosts(tile_tokens=4, received_token_pairs=2))
    division = Division.of(sharding, pad_to_multiple=8, typical_tokens=64)
    return PlannerSpec(
        rows=rows,
        window_tokens=64,
        cut="stream",
        seed=11,
        packer=packer,
        options=PackerOptions(
            shape=StepShape(window_tokens=64, micro_batches_per_replica=3, num_replicas=2),
            cost=COST,
            thresholds_tokens=(30,) if packer == "wlb" else (),
            pipeline=PipelineModel.equal_stages(COST, 2),
            search_evaluations=64,
            division=division,
            shard_plans=60,
        ),
        num_steps=NUM_STEPS,
        replica=1,
        cost=statistics_cost(COST, division, num_micro_batches=4),
        pad_to_multiple=8,
        sharding=sharding,
    )


@pytest.mark.parametrize("packer", PACKERS)
def test_a_process_plans_what_is_planned_in_place(packer, rows):
    spec = _spec(rows, packer, "per_sequence")
    inline, process = InlineSource(spec), ProcessSource(spec, steps_ahead=2, rank=0, timeout_s=60)
    try:
        for _ in range(NUM_STEPS):
            here, there = inline.next_step(), process.next_step()
            assert replace(there, plan_s=0.0) == replace(here, plan_s=0.0)
            assert there.shard_plans == tuple(spec.sharding.plan(padded_lengths(m, 8)) for m in there.micro_batches)
    finally:
        process.close()


def test_statistics_are_of_the_slowest_ranks(rows):
    spec = _spec(rows, "plain", "per_sequence")
    exact = ShardedCost(whole=COST, division=spec.options.division)
    one_replica = replace(
        spec,
        replica=0,
        options=replace(spec.options, shape=replace(spec.options.shape, micro_batches_per_replica=6, num_replicas=1)),
    )
    step = InlineSource(one_replica).next_step()
    divided, whole = (imbalance_degree([c.forward_s(m.lengths) for m in step.micro_batches]) for c in (exact, COST))
    assert step.statistics.imbalance_micro_batches == pytest.approx(divided)
    assert divided != pytest.approx(whole, rel=1e-2)


@pytest.mark.parametrize("sharder", SHARDERS)
def test_what_makespan_has_planned_is_not_planned_again(sharder, rows, monkeypatch):
    planned = []
    monkeypatch.setitem(SHARDERS, "counted", lambda *a: planned.append(tuple(a[0])) or SHARDERS[sharder](*a))
    source = InlineSource(_spec(rows, "makespan", "counted"))
    source.next_step()
    planned.clear()
    step = source.next_step()
    executed = {plan.lengths for plan in step.shard_plans}
    assert executed & set(planned)
    assert all(planned.count(lengths) <= 1 for lengths in executed)
