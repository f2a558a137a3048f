"""wlb.sharding.plan: the example of its docstring, and what a plan refuses to be."""

import pytest

from wlb.errors import ShardingError
from wlb.sharding import ShardPlan, Span
from wlb.sharding.plan import plan_of_chunks, span_pairs


def _span(document, start, stop):
    return Span(document=document, start=start, stop=stop)


PLAN = ShardPlan(
    lengths=(5, 3),
    ranks=((_span(0, 0, 2), _span(0, 4, 5), _span(1, 2, 3)), (_span(0, 2, 4), _span(1, 0, 2))),
)


def test_sizes():
    assert (PLAN.cp_size, PLAN.num_tokens, PLAN.rank_tokens) == (2, 8, 4)
    assert [s.num_tokens for s in PLAN.ranks[0]] == [2, 1, 1]


def test_positions_are_those_of_the_document():
    assert PLAN.position_ids(0).tolist() == [0, 1, 4, 2]
    assert PLAN.position_ids(1).tolist() == [2, 3, 0, 1]


def test_the_rearranged_pack_is_rank_major():
    assert PLAN.pack_indices(0).tolist() == [0, 1, 4, 7]
    assert PLAN.rearrange.tolist() == [0, 1, 4, 7, 2, 3, 5, 6]
    assert PLAN.restore.tolist() == [0, 1, 4, 5, 2, 6, 7, 3]


def test_pairs_and_received_tokens():
    # Rank 0: queries 0, 1, 4 of document 0 and 2 of document 1. It needs keys 2, 3 of the one and 0, 1 of the other.
    assert [PLAN.causal_pairs(rank) for rank in (0, 1)] == [1 + 2 + 5 + 3, 3 + 4 + 1 + 2]
    assert [PLAN.received_tokens(rank) for rank in (0, 1)] == [4, 2]
    assert span_pairs(0, 3) == 6
    assert span_pairs(2, 3) == 3


def test_a_table_makes_the_plan_again():
    assert PLAN.table.tolist() == [[0, 0, 0, 2], [0, 0, 4, 5], [0, 1, 2, 3], [1, 0, 2, 4], [1, 1, 0, 2]]
    again = ShardPlan.from_table(PLAN.table, lengths=[5, 3], cp_size=2)
    assert again == PLAN
    assert again.fingerprint == PLAN.fingerprint


def test_the_fingerprint_sees_spans_ranks_and_lengths():
    swapped = ShardPlan(lengths=PLAN.lengths, ranks=PLAN.ranks[::-1])
    one_rank = ShardPlan(lengths=(5, 3), ranks=((_span(0, 0, 5), _span(1, 0, 3)),))
    longer = ShardPlan(lengths=(5, 4), ranks=((_span(0, 0, 5), _span(1, 0, 4)),))
    assert len({plan.fingerprint for plan in (PLAN, swapped, one_rank, longer)}) == 4


def test_touching_pieces_are_joined_and_empty_ones_left_out():
    pieces = [(0, 0, 1, 2), (0, 0, 0, 1), (1, 0, 2, 2), (1, 0, 2, 4)]
    assert plan_of_chunks([4], 2, pieces).ranks == ((_span(0, 0, 2),), (_span(0, 2, 4),))


def test_no_documents():
    plan = ShardPlan(lengths=(), ranks=((), ()))
    assert plan.rearrange.tolist() == []
    assert plan.starts.tolist() == []
    assert plan.received_tokens(1) == 0


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((), "cp_size must be >= 1"),
        (((_span(0, 0, 3),), (_span(0, 3, 4),)), r"equally many tokens, got \[3, 1\]"),
        (((_span(0, 0, 2),), (_span(0, 2, 3), _span(0, 3, 4))), "not touch.*on rank 1"),
        (((_span(0, 2, 3), _span(0, 0, 1)), (_span(0, 1, 2), _span(0, 3, 4))), "ordered by document and start"),
        (((_span(0, 0, 2),), (_span(0, 3, 5),)), "must lie in its document.*on rank 1"),
        (((_span(0, 0, 2),), (_span(1, 2, 4),)), "must lie in its document"),
        (((_span(0, 0, 2),), (_span(0, 1, 3),)), "document 0 must be held once from 2"),
        (((_span(0, 0, 1),), (_span(0, 1, 2),)), "document 0 must be held up to 4, got 2"),
        (((_span(0, 0, 0),), ()), "must lie in its document"),
    ],
)
def test_what_is_no_partition_is_refused(ranks, message):
    with pytest.raises(ShardingError, match=message):
        ShardPlan(lengths=(4,), ranks=ranks)
