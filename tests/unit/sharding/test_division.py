"""Prices of divided micro-batches by hand, and what the estimate per document keeps of them."""

import pickle

import pytest

from wlb.errors import ConfigError, ShardingError
from wlb.sharding import SHARDERS, Division, ShardCosts, Sharding
from wlb.sharding.division import PLAN_ENTRIES, PRICE_ENTRIES

WINDOW = 4096


def _division(name="per_sequence", *, cp=2, tile=1, received=0, pad=None, typical=16):
    costs = ShardCosts(tile_tokens=tile, received_token_pairs=received)
    sharding = Sharding(name=name, cp_size=cp, costs=costs)
    return Division(sharding=sharding, pad_to_multiple=pad or cp, typical_tokens=typical)


def test_slowest_pairs_by_hand():
    # 5 and 3 tokens: rank 0 holds tokens 0 1 of the first and 1 2 of the second, 1 + 2 + 2 + 3 pairs; rank 1 has 2 3 4
    # and 0: 3 + 4 + 5 + 1
    assert _division().slowest_pairs((5, 3)) == 13
    # rank 1 also waits for tokens 0 1
    assert _division(received=10).slowest_pairs((5, 3)) == 33
    assert _division("per_document").slowest_pairs((4, 4)) == 10


def test_the_tail_is_padded_and_an_empty_micro_batch_is_padding():
    division = _division(pad=8)
    assert [division.padded_tokens(n) for n in (0, 1, 8, 9)] == [8, 8, 8, 16]
    assert division.slowest_pairs((5,)) == _division().slowest_pairs((5, 3))
    assert division.slowest_pairs(()) == _division().slowest_pairs((8,))


def test_only_sharders_that_cut_by_position_mind_the_order_of_documents():
    assert _division("per_sequence", cp=4).order_matters
    assert not _division("per_document", cp=4).order_matters


@pytest.mark.parametrize("name", SHARDERS)
def test_what_is_remembered_is_bounded_and_changes_no_answer(name):
    division = _division(name)
    first = division.plan((5, 3)), division.slowest_pairs((5, 3))
    for n in range(1, PRICE_ENTRIES + 10):
        division.slowest_pairs((2 * n,))
    assert len(division._slowest) == PRICE_ENTRIES
    assert len(division._plans) == PLAN_ENTRIES
    assert (5, 3) not in division._plans
    assert (division.plan((5, 3)), division.slowest_pairs((5, 3))) == first
    assert first[0] == division.sharding.plan((5, 3))


def test_what_is_remembered_is_no_part_of_its_identity_and_travels():
    asked, other = _division(), _division()
    asked.slowest_pairs((5, 3))
    assert asked == other
    copy = pickle.loads(pickle.dumps(asked))
    assert copy == other
    assert copy.slowest_pairs((5, 3)) == other.slowest_pairs((5, 3)) == 13


@pytest.mark.parametrize("name", SHARDERS)
@pytest.mark.parametrize("cp", [2, 8])
def test_equal_documents_cost_what_is_estimated_for_each(name, cp):
    division = _division(name, cp=cp, tile=32, typical=WINDOW)
    for length, copies in ((4096, 1), (1024, 4), (64, 4 * cp)):
        total = sum(division.sharding.costs.rank_pairs(division.plan((length,) * copies), r) for r in range(cp))
        assert division.even_pairs(length) * copies == pytest.approx(total / cp)


@pytest.mark.parametrize("name", SHARDERS)
def test_the_estimate_grows_with_the_document_and_is_no_less_than_its_pairs(name):
    division = _division(name, cp=4, tile=32, received=20, typical=WINDOW)
    lengths = range(33, 4096, 101)
    pairs = [division.even_pairs(n) for n in lengths]
    assert pairs == sorted(pairs)
    assert all(4 * p >= n * n / 2 for n, p in zip(lengths, pairs, strict=True))
    assert division.even_pairs(1) == division.even_pairs(32)  # a tile is a tile


def test_cutting_short_documents_is_seen_by_the_estimate():
    whole, cut = (
        _division(name, cp=8, tile=128, typical=131072).even_pairs(512) for name in SHARDERS if "per_" in name
    )
    assert cut > 3 * whole


def test_refusals():
    assert Division.of(Sharding(cp_size=1), pad_to_multiple=1, typical_tokens=8) is None
    assert Division.of(Sharding(cp_size=2), pad_to_multiple=2, typical_tokens=16) == Division(
        sharding=Sharding(cp_size=2), pad_to_multiple=2, typical_tokens=16
    )
    with pytest.raises(ConfigError, match="cp_size of a division must be >= 2, got 1"):
        _division(cp=1)
    with pytest.raises(ConfigError, match="pad_to_multiple must be a positive multiple of cp_size = 4, got 6"):
        _division(cp=4, pad=6)
    with pytest.raises(ConfigError, match="typical_tokens must be >= 1, got 0"):
        _division(typical=0)
    with pytest.raises(ShardingError, match="must be a multiple of cp_size = 2, got 5"):
        _division().plan((5,))
