"""wlb.sharding.per_sequence, per_document and adaptive on packs that can be checked by eye."""

import pytest

from wlb.sharding import ShardCosts, adaptive, per_document, per_sequence


def _spans(plan):
    return [[(s.document, s.start, s.stop) for s in spans] for spans in plan.ranks]


def test_per_sequence_cuts_the_pack():
    # Pack tokens 0 1 and 6 7 are rank 0's: the last two of them are document 1's 1 and 2.
    assert _spans(per_sequence.shard((5, 3), 2)) == [[(0, 0, 2), (1, 1, 3)], [(0, 2, 5), (1, 0, 1)]]


def test_per_sequence_where_chunks_are_unequal():
    # 6 tokens in 4 chunks: 2 2 1 1.
    assert _spans(per_sequence.shard((6,), 2)) == [[(0, 0, 2), (0, 5, 6)], [(0, 2, 5)]]


def test_per_sequence_with_more_chunks_than_tokens():
    # 3 tokens in 6 chunks: 1 1 1 0 0 0.
    assert _spans(per_sequence.shard((2, 1), 3)) == [[(0, 0, 1)], [(0, 1, 2)], [(1, 0, 1)]]


def test_per_document_deals_the_remainders():
    # Document 0 is cut 2 1 1 1, and the counter goes on: document 1 is cut 0 1 1 1.
    assert _spans(per_document.shard((5, 3), 2)) == [[(0, 0, 2), (0, 4, 5), (1, 2, 3)], [(0, 2, 4), (1, 0, 2)]]


def test_per_document_counts_on_past_the_last_chunk():
    # Remainders 3, 2, 3: chunks 0 1 2, then 3 0, then 1 2 3. Every rank has 4 of the 8.
    plan = per_document.shard((7, 2, 3), 2)
    assert _spans(plan) == [[(0, 0, 2), (0, 6, 7), (1, 0, 2), (2, 2, 3)], [(0, 2, 6), (2, 0, 2)]]


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_per_document_of_dust(cp_size):
    """One-token documents go to chunks in turn: head ranks forward, tail ranks backward."""
    held = [rank for rank, spans in enumerate(_spans(per_document.shard((1,) * 2 * cp_size, cp_size))) for _ in spans]
    assert sorted(held) == sorted([*range(cp_size), *range(cp_size)])
    first = _spans(per_document.shard((1,) * 2 * cp_size, cp_size))[0]
    assert first == [(0, 0, 1), (2 * cp_size - 1, 0, 1)]


@pytest.mark.parametrize(
    ("lengths", "costs", "winner"),
    [
        # One document: the two cut alike, and per-sequence is the plainer.
        ((16,), ShardCosts(tile_tokens=1), per_sequence),
        # 10 and 6 pairs against 8 and 8.
        ((2, 2, 4), ShardCosts(tile_tokens=1), per_document),
        # Cutting 4 documents of a tile in 4 pays 4 times.
        ((4, 4, 4, 4), ShardCosts(tile_tokens=4), per_sequence),
        # Level, but 3 tokens would be received instead of 2.
        ((2, 2, 4), ShardCosts(tile_tokens=1, received_token_pairs=100), per_sequence),
    ],
)
def test_adaptive_takes_the_one_predicted_faster(lengths, costs, winner):
    assert adaptive.shard(lengths, 2, costs) == winner.shard(lengths, 2)
