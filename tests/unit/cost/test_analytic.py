"""Crossover model, and the shapes whose crossovers are known."""

import pytest

from wlb.cost import CrossoverCost, TransformerShape
from wlb.errors import ConfigError


def test_crossover_model_by_hand():
    cost = CrossoverCost(crossover_tokens=4, overhead_tokens=2)
    assert cost.attention_s(4, 4) == 1.0
    assert cost.attention_s(8, 8) == 4.0
    assert cost.attention_s(2, 4) == 0.75  # the lower half of the triangle
    assert cost.linear_s(4) == 1.0
    assert cost.fixed_s == 0.5
    assert cost.forward_s([4, 2]) == 1.25 + 1.5 + 0.5
    assert cost.backward_s([4, 2]) == 2.5 * 1.25 + 2 * (1.5 + 0.5)
    assert cost.forward_s([]) == 0.5


def test_the_unit_of_time_changes_seconds_but_no_ratio():
    relative = CrossoverCost(crossover_tokens=4, overhead_tokens=2)
    measured = CrossoverCost(crossover_tokens=4, overhead_tokens=2, linear_token_s=1e-3)
    for lengths in ([1], [4, 4], [7, 2, 1]):
        assert measured.forward_s(lengths) == pytest.approx(relative.forward_s(lengths) * 4e-3, rel=1e-12)
        assert measured.backward_s(lengths) == pytest.approx(relative.backward_s(lengths) * 4e-3, rel=1e-12)


@pytest.mark.parametrize(
    ("field", "value"),
    [("crossover_tokens", 0), ("overhead_tokens", -1), ("linear_token_s", 0.0), ("bytes_per_s", -2.0)],
)
def test_bad_crossover_arguments(field, value):
    with pytest.raises(ConfigError, match=f"{field} must be .*got {value}"):
        CrossoverCost(**{"crossover_tokens": 4, field: value})


def _shape(hidden, ffn, layers, heads, groups, vocab=0, gated=True):
    return TransformerShape(
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_layers=layers,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_size=128,
        vocab_size=vocab,
        gated=gated,
    )


@pytest.mark.parametrize(
    ("shape", "crossover_k"),
    [
        (_shape(4096, 11008, 32, 32, 32), 48),  # Llama-2-7B
        (_shape(5120, 13824, 40, 40, 40), 60),  # Llama-2-13B
        (_shape(4096, 14336, 32, 32, 8), 52),  # Llama-3-8B
        (_shape(8192, 28672, 80, 64, 8), 102),  # Llama-3-70B
        (_shape(16384, 53248, 126, 128, 8), 190),  # Llama-3-405B
    ],
)
def test_crossovers_of_known_models_counting_layers_only(shape, crossover_k):
    assert shape.crossover_tokens / 1024 == pytest.approx(crossover_k, abs=0.6)


def test_flops_by_hand():
    shape = TransformerShape(
        hidden_size=8,
        ffn_hidden_size=16,
        num_layers=3,
        num_attention_heads=4,
        num_query_groups=2,
        head_size=2,
        vocab_size=10,
        gated=False,
    )
    # projections 8 x 8 (query), 8 x 8 (output), 2 of 8 x 4; MLP 2 of 8 x 16
    assert shape.layer_flops_per_token == 2 * (64 + 64 + 2 * 32 + 2 * 128)
    assert shape.linear_flops_per_token == 3 * 896 + 2 * 80
    assert shape.attention_flops_per_pair == 4 * 3 * 8
    assert shape.forward_flops([4, 2]) == 96 * (8 + 2) + 2848 * 6


def test_the_cost_of_a_shape_takes_its_flops():
    shape = _shape(256, 512, 2, 2, 1, vocab=1000)
    lengths = [100, 900, 5]
    seconds = shape.cost(flops_per_s=1e9).forward_s(lengths)
    assert seconds == pytest.approx(shape.forward_flops(lengths) / 1e9, rel=1e-12)


def test_bad_shapes():
    with pytest.raises(ConfigError, match="num_query_groups must divide num_attention_heads = 8, got 3"):
        _shape(64, 64, 1, 8, 3)
    with pytest.raises(ConfigError, match="num_layers must be >= 1, got 0"):
        _shape(64, 64, 0, 8, 2)
    with pytest.raises(ConfigError, match="vocab_size must be >= 0, got -1"):
        _shape(64, 64, 1, 8, 2, vocab=-1)
