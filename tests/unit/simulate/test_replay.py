"""Replays: by hand on a tiny trace, and against the numbers of a measured one."""

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from wlb.cost import CrossoverCost
from wlb.data.stream import DocumentSource, DocumentStream
from wlb.errors import ConfigError, PackingError
from wlb.packing import PACKERS, PackerOptions, StepShape, build_packer, derive_thresholds
from wlb.sharding import Division, ShardCosts, Sharding
from wlb.simulate import Cluster, replay

DATA = Path(__file__).parents[4] / "shared" / "data" / "lengths"
needs_trace = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"{DATA} is not here: the published baseline and our targets on it are not checked"
)


def _replay(name, lengths, *, window=8, pp=1, dp=1, micro_batches=2, steps=4, shuffle=False, **more):
    cost = CrossoverCost(crossover_tokens=more.pop("crossover", 8), overhead_tokens=more.pop("overhead", 0))
    shape = StepShape(window_tokens=window, micro_batches_per_replica=micro_batches, num_replicas=dp)
    packer = build_packer(name, PackerOptions(shape=shape, cost=cost, thresholds_tokens=more.pop("thresholds", ())))
    stream = DocumentStream(
        [DocumentSource(lengths=np.asarray(lengths), label_tokens=0)],
        window_tokens=window,
        cut=packer.natural_cut,
        seed=1,
        shuffle=shuffle,
    )
    cluster = Cluster(
        cost=cost,
        num_stages=pp,
        in_flight_tokens=more.pop("in_flight_tokens", None),
        division=more.pop("division", None),
    )
    return replay(packer, stream, cluster, num_steps=steps, **more)


def test_plain_by_hand():
    # every step: [8] and [4, 4]; forward 2 and 1.5 seconds; backward 4.5 and 3.25; one rank, so no bubble
    result = _replay("plain", [8, 4, 4])
    assert result.imbalance_degree == pytest.approx(2 * 2 / 3.5)
    assert result.step_time_over_ideal == pytest.approx(1)
    assert result.lower_bound_over_ideal == pytest.approx(1)  # the 8 alone takes 6.5 of 11.25 seconds
    assert result.time_per_token == pytest.approx(11.25 / 16)
    assert (result.mean_delay_steps, result.max_delay_steps, result.step_tokens_cv) == (0, 0, 0)
    assert (result.max_micro_batch_tokens, result.max_in_flight_tokens) == (8, 8)
    assert (result.documents_in, result.documents_out, result.documents_waiting) == (12, 12, 0)
    assert (result.steps, result.warm_up_steps, result.micro_batches_mean, result.tokens_per_step) == (4, 0, 2, 16)


def test_divided_micro_batches_by_hand():
    # Two ranks. 8 tokens are 36 pairs, 18 a rank. Of 4 and 4 tokens each rank has the first 2 rows of one and the last
    # 2 of the other: 1 + 2 + 3 + 4 pairs.
    sharding = Sharding(name="per_sequence", cp_size=2, costs=ShardCosts(tile_tokens=1))
    division = Division(sharding=sharding, pad_to_multiple=2, typical_tokens=8)
    one, two = (_replay("plain", [8, 4, 4], division=d) for d in (None, division))
    # the cost model counts half of the diagonal: 32 pairs, and 8 and 8
    attention_s, rest_s = (1 * 18 / 32 + 0.5 * 10 / 16) * 3.5, 2 * 3 / 2
    assert two.time_per_token == pytest.approx((attention_s + rest_s) / 16)
    assert two.step_time_over_ideal == pytest.approx((attention_s + rest_s) / (11.25 / 2))
    assert two.imbalance_degree == pytest.approx((1 * 18 / 32 + 0.5) * 2 / (18 / 32 + 0.5 * 10 / 16 + 1))
    assert (two.lower_bound_over_ideal, two.documents_in) == (one.lower_bound_over_ideal, one.documents_in)


def test_the_slowest_replica_and_the_overhead_count_against_plain():
    # [8] on one replica, [4, 4] on the other; overhead of 8 tokens: 1 second forward, 2 backward
    result = _replay("plain", [8, 4, 4], dp=2, micro_batches=1, overhead=8)
    assert result.step_time_over_ideal == pytest.approx((2 + 4.5 + 3) / (11.25 / 2))
    assert result.lower_bound_over_ideal == result.step_time_over_ideal  # nothing can be done about the 8


def test_delay_counts_trained_and_waiting_tokens():
    # window 8, two micro-batches: a 6 arrives with each 10 tokens of dust and waits for the second one
    result = _replay("wlb", [6, *[1] * 10], thresholds=(6,), steps=3)
    assert result.warm_up_steps == 2
    # step 2: dust, and its 6 waits; step 3: two of 6, one late by a step; step 4: its 6 waits, at age 1
    assert result.mean_delay_steps == pytest.approx((6 + 6) / (10 + 22 + 10 + 6))
    assert result.max_delay_steps == 1
    assert result.documents_waiting == 1
    assert result.documents_in == result.documents_out + 1 == 55


def test_planning_time_is_that_of_the_packer_alone():
    ticks = count()
    result = _replay("plain", [8, 4, 4], clock=lambda: 0.001 * next(ticks))
    assert result.plan_ms_median == pytest.approx(1)


def test_progress_is_told_of_each_counted_step():
    calls = []
    _replay("wlb", [6, *[2] * 5], thresholds=(6,), steps=3, on_step=lambda: calls.append(1))
    assert len(calls) == 3


def test_limits_are_errors():
    with pytest.raises(PackingError, match=r"tokens in flight on the first stage must be <= 15, got 16 \(step 0\)"):
        _replay("plain", [8, 4, 4], pp=2, in_flight_tokens=15)
    with pytest.raises(ConfigError, match=r"release within max_warm_up_steps = 5 steps, got 7: its queue has not"):
        _replay("wlb", [6, 2, 2], thresholds=(6, 7), max_warm_up_steps=5)
    with pytest.raises(ConfigError, match="num_steps must be >= 1, got 0"):
        _replay("plain", [8], steps=0)
    with pytest.raises(ConfigError, match="num_stages must be >= 1, got 0"):
        _replay("plain", [8], pp=0)


@pytest.mark.parametrize("name", PACKERS)
def test_documents_in_are_out_or_waiting(name):
    rng = np.random.default_rng(3)
    lengths = np.minimum(rng.lognormal(2, 1, 3000).astype(int) + 1, 200)
    result = _replay(name, lengths, window=100, pp=2, dp=2, thresholds=(30, 60), steps=40, shuffle=True)
    assert result.documents_in > 500
    assert result.documents_in == result.documents_out + result.documents_waiting


def _trace():
    return np.array(json.loads((DATA / "wlb_llm_128k.json").read_text()))


def _measured(name, lengths, layout, **more):
    pp, dp, micro_batches = layout
    return _replay(
        name,
        lengths,
        window=131072,
        pp=pp,
        dp=dp,
        micro_batches=micro_batches,
        steps=100,
        crossover=36000,
        overhead=1000,
        **more,
    )


@needs_trace
@pytest.mark.parametrize(("layout", "expected"), [((4, 1, 4), 1.97), ((4, 1, 16), 1.55), ((1, 8, 4), 1.35)])
def test_plain_takes_as_much_over_ideal_as_was_computed_independently(layout, expected):
    lengths = _trace()
    shuffled = lengths[np.random.default_rng(1).permutation(len(lengths))]
    assert _measured("plain", shuffled, layout).step_time_over_ideal == pytest.approx(expected, abs=0.0075)


@needs_trace
@pytest.mark.parametrize("seed", [1, 2])
def test_wlb_reaches_its_target(seed):
    lengths = _trace()
    shuffled = lengths[np.random.default_rng(seed).permutation(len(lengths))]
    thresholds = derive_thresholds(lengths, 131072)
    result = _measured("wlb", shuffled, (4, 1, 4), thresholds=thresholds, in_flight_tokens=6 * 131072)
    assert result.imbalance_degree <= 1.035
    assert result.mean_delay_steps <= 0.6
    assert result.max_micro_batch_tokens < 1.5 * 131072
    plain = _measured("plain", shuffled, (4, 1, 4))
    assert plain.imbalance_degree > 1.25
    assert result.time_per_token < plain.time_per_token
