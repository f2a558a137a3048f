"""1F1B by hand: order, times, bubble, tokens in flight."""

import pytest

from wlb.cost import CrossoverCost, ScaledCost
from wlb.documents import MicroBatch, StepPlan, documents_from_lengths
from wlb.errors import ConfigError
from wlb.schedule import (
    PipelineShape,
    StepTimeline,
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
    plan_timeline,
    replica_timeline,
)
from wlb.schedule.order import peak_tokens_in_flight


def _names(passes):
    return " ".join(f"{p.kind[0].upper()}{p.micro_batch}" for p in passes)


@pytest.mark.parametrize(
    ("num_stages", "stage", "count", "expected"),
    [
        (1, 0, 3, "F0 B0 F1 B1 F2 B2"),
        (2, 0, 3, "F0 F1 B0 F2 B1 B2"),
        (2, 1, 3, "F0 B0 F1 B1 F2 B2"),
        (4, 0, 5, "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"),
        (4, 2, 5, "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"),
        (4, 0, 2, "F0 F1 B0 B1"),  # fewer micro-batches than stages
        (4, 0, 0, ""),
    ],
)
def test_order(num_stages, stage, count, expected):
    assert _names(one_forward_one_backward(num_stages=num_stages, stage=stage, num_micro_batches=count)) == expected


def test_order_refuses_nonsense():
    with pytest.raises(ConfigError, match="num_stages must be >= 1, got 0"):
        one_forward_one_backward(num_stages=0, stage=0, num_micro_batches=1)
    with pytest.raises(ConfigError, match=r"stage must be in \[0, num_stages = 2\), got 2"):
        one_forward_one_backward(num_stages=2, stage=2, num_micro_batches=1)


@pytest.mark.parametrize(
    ("stage", "count", "expected"),
    [
        (0, 2, "F0 F1 F0' F1' B0' B1' B0 B1"),
        (1, 2, "F0 F1 F0' B0' F1' B1' B0 B1"),
        (0, 4, "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3"),
    ],
)
def test_interleaved_order(stage, count, expected):
    passes = interleaved_one_forward_one_backward(
        num_stages=2, stage=stage, num_micro_batches=count, num_chunks=2, group_size=2
    )
    names = [f"{p.kind[0].upper()}{p.micro_batch}{chr(39) * p.chunk}" for p in passes]
    assert " ".join(names) == expected


def test_a_chunk_holds_its_share_of_the_tokens():
    # F0 F1 F0' F1' held at once: both chunks of both
    passes = interleaved_one_forward_one_backward(
        num_stages=2, stage=0, num_micro_batches=2, num_chunks=2, group_size=2
    )
    assert peak_tokens_in_flight(passes, [5, 2], num_chunks=2) == 7


def test_tokens_in_flight():
    tokens = [5, 1, 4, 2]
    peaks = [
        peak_tokens_in_flight(one_forward_one_backward(num_stages=pp, stage=0, num_micro_batches=4), tokens)
        for pp in (1, 2, 3, 4)
    ]
    assert peaks == [5, 6, 10, 12]


def test_two_stages_two_micro_batches():
    timeline = replica_timeline([[1, 1], [1, 1]], [[2, 2], [2, 2]])
    assert [[(p.kind[0], p.micro_batch, p.start_s, p.end_s) for p in s] for s in timeline.stages] == [
        [("f", 0, 0, 1), ("f", 1, 1, 2), ("b", 0, 4, 6), ("b", 1, 7, 9)],
        [("f", 0, 1, 2), ("b", 0, 2, 4), ("f", 1, 4, 5), ("b", 1, 5, 7)],
    ]
    assert timeline.makespan_s == 9
    assert timeline.busy_s == (6, 6)
    assert timeline.bubble == pytest.approx(1 / 3)


@pytest.mark.parametrize(("pp", "count"), [(1, 3), (2, 4), (4, 4), (4, 9)])
def test_equal_micro_batches_give_the_textbook_makespan(pp, count):
    timeline = replica_timeline([[1.0] * pp] * count, [[2.0] * pp] * count)
    assert timeline.makespan_s == 3 * (count + pp - 1)
    assert timeline.bubble == pytest.approx((pp - 1) / (count + pp - 1))


def test_one_large_micro_batch_stalls_every_stage():
    timeline = replica_timeline([[1, 1], [10, 10], [1, 1]], [[0, 0]] * 3)
    # stage 0: F0 0-1, F1 1-11, B0 after stage 1's, F2; stage 1: F0 1-2, F1 11-21, F2 21-22
    assert [(p.start_s, p.end_s) for p in timeline.stages[1] if p.kind == "forward"] == [(1, 2), (11, 21), (21, 22)]
    assert timeline.makespan_s == 22


def test_without_a_pipeline_nothing_waits():
    timeline = replica_timeline([[3], [1]], [[5], [2]])
    assert (timeline.makespan_s, timeline.bubble) == (11, 0)


def test_a_sender_waits_for_its_receiver():
    """Stage 1 takes micro-batch 1 once it has handed on micro-batch 0, and until then stage 0 cannot start its next
    forward; a buffered send lets it."""
    forward_s, backward_s = [[1, 5, 1], [1, 1, 1], [4, 1, 1]], [[0, 0, 0]] * 3
    begin_s = {
        sends: replica_timeline(forward_s, backward_s, shape=PipelineShape(num_stages=3, sends=sends))
        .stages[0][2]
        .start_s
        for sends in ("blocking", "buffered")
    }
    assert begin_s == {"blocking": 6, "buffered": 2}


@pytest.mark.parametrize("sends", ["blocking", "overlapped", "buffered"])
def test_virtual_stages_shrink_the_bubble(sends):
    # equal micro-batches: pp - 1 passes of one chunk idle instead of pp - 1 of a whole stage
    shape = PipelineShape(num_stages=4, num_chunks=2, sends=sends)
    timeline = replica_timeline([[0.5] * 8] * 8, [[1.0] * 8] * 8, shape=shape)
    assert timeline.makespan_s == 3 * 8 + 3 * 1.5
    assert {p.chunk for p in timeline.stages[0]} == {0, 1}


def test_the_last_stretch_may_be_longer():
    # a loss head of 1 second on the last of two stages: it is the bottleneck, every micro-batch waits for it
    timeline = replica_timeline([[1, 2]] * 3, [[2, 4]] * 3)
    assert timeline.busy_s == (9, 18)
    assert timeline.makespan_s == 1 + 18 + 2


def test_sending_delays_the_next_stage():
    timeline = replica_timeline([[1, 1]], [[2, 2]], send_s=[0.5])
    assert timeline.makespan_s == 1 + 0.5 + 1 + 2 + 0.5 + 2


def test_the_slowest_replica_sets_the_step():
    fast, slow = replica_timeline([[1]], [[2]]), replica_timeline([[2]], [[4]])
    step = StepTimeline(replicas=(fast, slow), sync_s=1.0)
    assert step.makespan_s == 7
    assert step.busy_s == ((3,), (6,))
    assert step.wait_s == ((3,), (0,))
    assert step.bubble == 0.25


def test_no_micro_batches_take_no_time():
    timeline = replica_timeline([], [], num_stages=2)
    assert (len(timeline.stages), timeline.makespan_s, timeline.bubble) == (2, 0.0, 0.0)
    assert StepTimeline(replicas=(timeline,), sync_s=0.0).bubble == 0.0


def test_shapes_that_differ_are_refused():
    with pytest.raises(ConfigError, match=r"backward_s must be \(1 micro-batches, 2 stages\), got 2 rows"):
        replica_timeline([[1, 1]], [[1, 1], [1, 1]])
    with pytest.raises(ConfigError, match=r"forward_s must be .* got 2 rows of lengths \[1, 2\]"):
        replica_timeline([[1, 1], [1]], [[1, 1], [1, 1]])
    with pytest.raises(ConfigError, match="send_s must have 1 entries, one a micro-batch, got 2"):
        replica_timeline([[1]], [[1]], send_s=[0, 0])


def test_a_plan_is_timed_with_the_cost_of_each_stage():
    plan = StepPlan(
        step=0,
        replicas=tuple(
            (MicroBatch(documents=documents_from_lengths([n])), MicroBatch(documents=documents_from_lengths([4])))
            for n in (4, 8)
        ),
        waiting=(),
    )
    whole = CrossoverCost(crossover_tokens=4, bytes_per_s=1.0)
    step = plan_timeline(plan, [ScaledCost(whole=whole, share=0.5)] * 2, sync_s=0.25)
    # forward of 4 tokens: (1 + 1) / 2 a stage; backward (2.5 + 2) / 2; of 8 tokens: (4 + 2) / 2 and (10 + 4) / 2
    assert step.busy_s == ((6.5, 6.5), (13.25, 13.25))
    assert step.makespan_s == replica_timeline([[3, 3], [1, 1]], [[7, 7], [2.25, 2.25]]).makespan_s + 0.25
    slower = plan_timeline(plan, [ScaledCost(whole=whole, share=0.5)] * 2, bytes_per_token=1)
    assert slower.makespan_s > step.makespan_s + 8
    with pytest.raises(ConfigError, match="stage_costs must hold at least one cost model"):
        plan_timeline(plan, [])
