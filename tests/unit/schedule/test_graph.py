"""The graph behind the timelines: exact, the same for one candidate and for many, and what it says is critical."""

from itertools import pairwise

import numpy as np
import pytest

from wlb.cost import CrossoverCost, ScaledCost
from wlb.documents import MicroBatch, StepPlan, documents_from_lengths
from wlb.errors import ConfigError
from wlb.schedule import PipelineModel, PipelineShape, model_timeline, pass_graph, replica_timeline

SHAPES = [
    PipelineShape(),
    PipelineShape(num_stages=2),
    PipelineShape(num_stages=4, sends="buffered"),
    PipelineShape(num_stages=4),
    PipelineShape(num_stages=2, num_chunks=2, sends="overlapped"),
    PipelineShape(num_stages=4, num_chunks=3),
    PipelineShape(num_stages=2, num_chunks=2, group_size=4, sends="overlapped"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_many_candidates_are_timed_as_one_by_one(shape):
    rng = np.random.default_rng(5)
    count, stretches = 8, shape.num_virtual_stages
    forward = rng.integers(1, 50, (7, count, stretches))
    backward = 2 * forward
    graph = pass_graph(shape, count, instant_messages=True)
    rows = graph.rows(range(stretches))
    durations = np.concatenate([forward.transpose(2, 1, 0), backward.transpose(2, 1, 0)])  # (2V, M, C)
    times = graph.makespans(durations.reshape(2 * stretches * count, 7), rows)
    for c in range(7):
        timeline = replica_timeline(forward[c].tolist(), backward[c].tolist(), shape=shape)
        assert times[c] == timeline.makespan_s
        # nothing runs twice at once on a stage, and nothing is left out
        for passes in timeline.stages:
            assert len(passes) == 2 * count * shape.num_chunks
            assert all(a.end_s <= b.start_s for a, b in pairwise(passes))
        # a pass needs what the stretch before it has made
        ends = {(p.kind, p.micro_batch, p.chunk * shape.num_stages + p.stage): p for s in timeline.stages for p in s}
        for (kind, i, v), p in ends.items():
            before = v - 1 if kind == "forward" else v + 1
            if 0 <= before < stretches:
                assert ends[kind, i, before].end_s <= p.start_s
            if kind == "backward":
                assert ends["forward", i, v].end_s <= p.start_s


@pytest.mark.parametrize("shape", SHAPES)
def test_messages_that_take_next_to_no_time_change_nothing(shape):
    rng = np.random.default_rng(6)
    forward = rng.integers(1, 50, (4, shape.num_virtual_stages)).tolist()
    instant = replica_timeline(forward, forward, shape=shape)
    slow = replica_timeline(forward, forward, shape=shape, send_s=[1e-9] * 4)
    for a, b in zip(instant.stages, slow.stages, strict=True):
        assert [p.end_s for p in a] == pytest.approx([p.end_s for p in b], abs=1e-6)
    slower = replica_timeline(forward, forward, shape=shape, send_s=[3] * 4)
    assert slower.makespan_s >= instant.makespan_s + (6 if shape.num_stages > 1 else 0)


def test_the_critical_path_is_a_chain_without_gaps():
    graph = pass_graph(PipelineShape(num_stages=3), 4, instant_messages=True)
    rows = graph.rows([0, 0, 0])
    durations = np.array([5, 1, 9, 2, 10, 2, 18, 4])[:, None]
    ends = graph.ends(durations, rows)[:, 0].tolist()
    path = graph.critical_path(ends)
    assert ends[path[0]] == graph.makespans(durations, rows)[0]
    own = durations[rows, 0].tolist()
    assert [ends[n] - own[n] for n in path[:-1]] == [ends[n] for n in path[1:]]
    assert ends[path[-1]] == own[path[-1]]
    assert sum(own[n] for n in path) == ends[path[0]]


@pytest.mark.parametrize(("count", "fits"), [(4, True), (8, True), (2, False), (6, False)])
def test_counts_that_virtual_stages_take(count, fits):
    shape = PipelineShape(num_stages=4, num_chunks=2)
    assert shape.takes(count) == fits
    if not fits:
        with pytest.raises(ConfigError, match=f"num_micro_batches must be a multiple of 4, .* got {count}"):
            pass_graph(shape, count, instant_messages=True)


def test_a_group_may_be_larger_than_the_pipeline():
    shape = PipelineShape(num_stages=2, num_chunks=2, group_size=3)
    assert [count for count in range(1, 10) if shape.takes(count)] == [3, 5, 6, 8, 9]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_stages": 0}, "num_stages must be >= 1, got 0"),
        ({"num_chunks": 2}, r"num_chunks must be 1 without a pipeline \(num_stages 1\), got 2"),
        ({"num_stages": 4, "group_size": 3}, "group_size must be >= num_stages = 4, got 3"),
        ({"sends": "pigeon"}, "sends must be 'blocking', 'overlapped' or 'buffered', got 'pigeon'"),
        ({"num_stages": 2, "sends": "overlapped"}, "sends must not be 'overlapped' without virtual stages"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        PipelineShape(**fields)


def test_a_model_of_unequal_stretches():
    whole = CrossoverCost(crossover_tokens=4, bytes_per_s=8.0)
    model = PipelineModel(
        shape=PipelineShape(num_stages=2),
        stretch_costs=(ScaledCost(whole=whole, share=0.5), ScaledCost(whole=whole, share=1.0)),
        bytes_per_token=2,
        sync_s=0.25,
    )
    assert model.forward_s([4]) == [1, 2]
    assert model.backward_s([4]) == [2.25, 4.5]
    assert model.message_s(4) == 1
    plan = StepPlan(step=0, replicas=((MicroBatch(documents=documents_from_lengths([4])),),), waiting=())
    assert model_timeline(plan, model).makespan_s == 1 + 1 + 2 + 4.5 + 1 + 2.25 + 0.25
    with pytest.raises(ConfigError, match="stretch_costs must have num_stages x num_chunks = 2 entries, got 1"):
        PipelineModel(shape=PipelineShape(num_stages=2), stretch_costs=(whole,))
    with pytest.raises(ConfigError, match="bytes_per_token must be >= 0, got -1"):
        PipelineModel(stretch_costs=(whole,), bytes_per_token=-1)
    with pytest.raises(ConfigError, match="sync_s must be finite and >= 0, got -1"):
        PipelineModel(stretch_costs=(whole,), sync_s=-1)
