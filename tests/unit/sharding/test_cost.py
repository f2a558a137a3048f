"""wlb.sharding.cost on tiles that can be counted by hand."""

import pytest

from wlb.errors import ConfigError
from wlb.sharding import ShardCosts, per_document
from wlb.sharding.plan import plan_of_chunks


@pytest.mark.parametrize(
    ("start", "stop", "tiles"),
    [
        # Rows 0-3 against 1 tile of keys, rows 4, 5 against 2.
        (0, 6, 1 + 2),
        # One row, against keys 0-5.
        (5, 6, 2),
        # Rows 3-6 against keys 0-6, row 7 against keys 0-7.
        (3, 8, 2 + 2),
        (4, 12, 2 + 3),
        (0, 1, 1),
        (6, 6, 0),
    ],
)
def test_tiles(start, stop, tiles):
    assert ShardCosts(tile_tokens=4).tile_pairs(start, stop) == tiles * 16


def test_tiles_of_one_are_exact_pairs():
    assert ShardCosts(tile_tokens=1).tile_pairs(2, 5) == 3 + 4 + 5


def test_a_cut_at_a_tile_adds_nothing():
    costs = ShardCosts(tile_tokens=4)
    assert costs.tile_pairs(0, 8) + costs.tile_pairs(8, 13) == costs.tile_pairs(0, 13)
    assert costs.tile_pairs(0, 9) + costs.tile_pairs(9, 12) > costs.tile_pairs(0, 12)


def test_prices_of_a_plan():
    # rank 0: 0:[0, 2) 0:[4, 5) 1:[2, 3), 11 pairs, receives 4. rank 1: 0:[2, 4) 1:[0, 2), 10 pairs, receives 2.
    plan = per_document.shard((5, 3), 2)
    costs = ShardCosts(tile_tokens=1, received_token_pairs=10, span_pairs=100, exchange_pairs=1000)
    assert [costs.attention_pairs(plan, rank) for rank in (0, 1)] == [311, 210]
    assert [costs.rank_pairs(plan, rank) for rank in (0, 1)] == [1351, 1230]
    assert costs.slowest_pairs(plan) == 1351


def test_all_wait_for_the_rank_that_receives_most():
    # rank 0: 0:[0, 6), 21 pairs, receives none. rank 1: 0:[6, 8) 1:[0, 4), 15 + 10 pairs, receives 6.
    plan = plan_of_chunks((8, 4), 2, [(0, 0, 0, 6), (1, 0, 6, 8), (1, 1, 0, 4)])
    assert ShardCosts(tile_tokens=1, received_token_pairs=1).slowest_pairs(plan) == 25 + 6
    # rank 0 has most pairs, rank 1 receives: the price is of both.
    plan = plan_of_chunks((7, 5), 2, [(0, 0, 1, 7), (1, 0, 0, 1), (1, 1, 0, 5)])
    assert [plan.causal_pairs(rank) for rank in (0, 1)] == [27, 16]
    assert [plan.received_tokens(rank) for rank in (0, 1)] == [1, 0]
    assert ShardCosts(tile_tokens=1, received_token_pairs=3, exchange_pairs=5).slowest_pairs(plan) == 27 + 3 + 5


def test_nothing_received_costs_no_exchange():
    assert ShardCosts(exchange_pairs=9, received_token_pairs=2).exchange(0) == 0
    assert ShardCosts(exchange_pairs=9, received_token_pairs=2).exchange(3) == 15


@pytest.mark.parametrize(
    ("model", "pairs"),
    [
        ({"num_heads": 32, "num_kv_heads": 8}, 571),  # 2000 * 8 * (2 * 2 + 4) / (7 * 32) = 571.4
        ({"num_heads": 32, "num_kv_heads": 8, "keep_gathered": True}, 429),  # once in bf16 and once in float32
        ({"num_heads": 32, "num_kv_heads": 32}, 2286),
        ({"num_heads": 32, "num_kv_heads": 32, "bytes_per_number": 4}, 3429),
        ({"num_heads": 7, "num_kv_heads": 7, "operations_per_byte": 70.0}, 80),
        ({"num_heads": 8, "num_kv_heads": 1, "operations_per_byte": 0.0}, 0),
    ],
)
def test_a_model_prices_what_is_received(model, pairs):
    assert ShardCosts.for_model(**model) == ShardCosts(received_token_pairs=pairs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShardCosts(tile_tokens=0), "tile_tokens must be >= 1, got 0"),
        (lambda: ShardCosts(span_pairs=-1), "span_pairs must be >= 0, got -1"),
        (lambda: ShardCosts(received_token_pairs=-1), "received_token_pairs must be >= 0"),
        (lambda: ShardCosts(exchange_pairs=-1), "exchange_pairs must be >= 0"),
        (lambda: ShardCosts.for_model(num_heads=0, num_kv_heads=1), "num_heads must be >= 1, got 0"),
        (lambda: ShardCosts.for_model(num_heads=1, num_kv_heads=0), "num_kv_heads must be >= 1, got 0"),
        (
            lambda: ShardCosts.for_model(num_heads=1, num_kv_heads=1, operations_per_byte=float("nan")),
            "operations_per_byte must be >= 0 and finite, got nan",
        ),
    ],
)
def test_bad_prices_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
