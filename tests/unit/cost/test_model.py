"""Pairs, messages, integer work, shares of a model."""

from itertools import pairwise

import pytest

from wlb.cost import CrossoverCost, ScaledCost, document_work_ns, micro_batch_work_ns
from wlb.cost.model import causal_pairs
from wlb.errors import ConfigError


def test_causal_pairs_of_parts_add_up_to_the_whole():
    assert causal_pairs(8, 8) == 32
    assert causal_pairs(3, 3) + causal_pairs(5, 8) == causal_pairs(8, 8)
    assert causal_pairs(0, 8) == 0
    with pytest.raises(ConfigError, match=r"q_tokens must be in \[0, kv_tokens = 4\], got 5"):
        causal_pairs(5, 4)


def test_work_is_integer_nanoseconds_that_add_up():
    cost = CrossoverCost(crossover_tokens=10)
    assert document_work_ns(cost, 10) == 2_000_000_000  # one second for each half
    assert document_work_ns(cost, 5) == 750_000_000
    assert micro_batch_work_ns(cost, [10, 5]) == 2_750_000_000
    assert type(document_work_ns(cost, 3)) is int


def test_every_document_has_some_work():
    assert document_work_ns(CrossoverCost(crossover_tokens=10, linear_token_s=1e-15), 1) == 1


def test_two_lengths_never_compare_equal_at_the_crossovers_of_real_models():
    cost = CrossoverCost(crossover_tokens=194_560)
    work = [document_work_ns(cost, n) for n in range(1, 2000)]
    assert all(a < b for a, b in pairwise(work))


def test_scaled_cost_is_a_share_but_messages_keep_their_size():
    whole = CrossoverCost(crossover_tokens=4, overhead_tokens=8, latency_s=1.0, bytes_per_s=10.0)
    stage = ScaledCost(whole=whole, share=1 / 4)
    assert stage.fixed_s == 0.5
    assert stage.attention_s(4, 4) == 0.25
    assert stage.linear_s(4) == 0.25
    assert stage.forward_s([4]) == 1.0
    assert stage.backward_s([4]) == (2.5 * 1 + 2 * (1 + 2)) / 4
    assert stage.communication_s(20) == 3.0
    with pytest.raises(ConfigError, match=r"share must be finite and >= 0, got -0\.5"):
        ScaledCost(whole=whole, share=-0.5)


def test_communication():
    cost = CrossoverCost(crossover_tokens=4, latency_s=0.5, bytes_per_s=100.0)
    assert cost.communication_s(0) == 0.0
    assert cost.communication_s(50) == 1.0
    assert CrossoverCost(crossover_tokens=4, latency_s=0.5).communication_s(50) == 0.5
    with pytest.raises(ConfigError, match="num_bytes must be >= 0, got -1"):
        cost.communication_s(-1)
