"""Thresholds by replay: what is tried, what is chosen, and what is said of useless ones."""

import random
from dataclasses import replace

import numpy as np
import pytest

from wlb.cost import CrossoverCost
from wlb.errors import DataError
from wlb.packing import PackerOptions, StepShape
from wlb.packing.delay_thresholds import (
    ChosenThresholds,
    Tradeoff,
    choose_thresholds,
    front_table,
    threshold_remarks,
)
from wlb.schedule import PipelineModel

WINDOW = 1600
COST = CrossoverCost(crossover_tokens=400, overhead_tokens=12)


def _options(*, stages=4, replicas=1, bound=64):
    return PackerOptions(
        shape=StepShape(window_tokens=WINDOW, micro_batches_per_replica=4, num_replicas=replicas),
        cost=COST,
        pipeline=PipelineModel.equal_stages(COST, stages),
        max_delay_steps=bound,
    )


@pytest.fixture(scope="module")
def lengths():
    """A body of short documents and one long one among a hundred."""
    rng = random.Random(4)
    return [rng.randint(500, WINDOW) if rng.random() < 0.01 else rng.randint(1, 100) for _ in range(3000)]


@pytest.fixture(scope="module")
def choice(lengths):
    return choose_thresholds(_options(), lengths)


def test_queues_are_chosen_where_a_long_document_holds_a_pipeline_up(choice):
    (none,) = (t for t in choice.tried if t.thresholds_tokens == ())
    assert choice.chosen.thresholds_tokens
    assert choice.chosen.time_over_ideal < 0.9 * none.time_over_ideal
    assert 0.1 < choice.chosen.mean_delay_steps <= 0.6
    assert none.mean_delay_steps < 0.1


def test_a_lower_limit_of_the_mean_delay_is_kept(lengths, choice):
    limited = choose_thresholds(_options(), lengths, max_mean_delay_steps=0.3)
    assert limited.chosen.mean_delay_steps <= 0.3 < choice.chosen.mean_delay_steps
    assert limited.chosen.time_over_ideal > choice.chosen.time_over_ideal
    nothing = choose_thresholds(_options(), lengths, max_mean_delay_steps=0.0)
    assert nothing.chosen.thresholds_tokens == ()


def test_the_same_lengths_give_the_same_choice(lengths, choice):
    assert choose_thresholds(_options(), np.array(lengths, dtype=np.int32)) == choice


def test_no_queue_where_nothing_is_gained(lengths):
    """One stage and one replica: no placing makes a step shorter, so no document waits."""
    assert choose_thresholds(_options(stages=1), lengths).chosen.thresholds_tokens == ()


def test_replicas_beyond_16_micro_batches_are_not_replayed(lengths):
    many = choose_thresholds(_options(stages=1, replicas=64), lengths)
    assert many == choose_thresholds(_options(stages=1, replicas=4), lengths)


def test_thresholds_that_no_document_reaches_are_not_tried():
    choice = choose_thresholds(_options(), [90] * 500)
    assert [t.thresholds_tokens for t in choice.tried] == [()]
    with pytest.raises(DataError, match="lengths must hold at least one document of more than 0 tokens"):
        choose_thresholds(_options(), [0, 0])


def test_the_front_holds_what_nothing_beats_and_the_table_marks_the_choice():
    def tradeoff(thresholds, time, delay):
        return Tradeoff(thresholds_tokens=thresholds, time_over_ideal=time, mean_delay_steps=delay, num_steps=10)

    tried = (tradeoff((), 1.8, 0.0), tradeoff((9,), 1.9, 0.2), tradeoff((5,), 1.5, 0.3), tradeoff((3, 6), 1.4, 0.5))
    choice = ChosenThresholds(chosen=tried[2], tried=tried)
    assert choice.front == (tried[0], tried[2], tried[3])
    lines = front_table(choice).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["none", "1.800", "0.00", "10"],
        ["*", "5", "1.500", "0.30", "10"],
        ["3", "6", "1.400", "0.50", "10"],
    ]
    beaten = replace(choice, chosen=tried[1])
    assert front_table(beaten).splitlines()[-1].split() == ["*", "9", "1.900", "0.20", "10"]


def test_useless_thresholds_are_named():
    assert threshold_remarks((300, 900), [100, 1000, 0], WINDOW) == []
    (above,) = threshold_remarks((300, 1500), [100, 1000], WINDOW)
    assert above == (
        "thresholds_tokens: no document of the sample has 1500 tokens, the longest piece has 1000: its queue would "
        "stay empty"
    )
    (all_wait,) = threshold_remarks((100, 900), [100, 1000], WINDOW)
    assert "every document of the sample has at least 100 tokens, the shortest 100: all of them would wait" in all_wait
    assert threshold_remarks((1600,), [5000], WINDOW) == []  # 5000 is three windows and 200
