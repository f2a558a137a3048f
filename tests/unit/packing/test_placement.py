"""Placing documents by work, dealing micro-batches, the pipeline's order."""

import pytest

from wlb.documents import documents_from_lengths
from wlb.errors import PackingError
from wlb.packing.dealing import deal_by_work, pipeline_order, replicas_round_robin
from wlb.packing.placement import longest_first, place, place_all


def _square(n):
    return n * n


def _place(lengths, *, count, limit, fallback):
    placement = place(
        documents_from_lengths(lengths), num_micro_batches=count, limit_tokens=limit, work=_square, fallback=fallback
    )
    filled = [[d.length for d in documents] for documents in placement.filled]
    return filled, list(placement.work), [d.length for d in placement.left]


def test_each_document_goes_where_least_work_is():
    assert _place([6, 3, 3, 2], count=2, limit=99, fallback="shortest") == ([[6], [3, 3, 2]], [36, 22], [])


def test_equal_work_goes_to_the_lower_index():
    assert _place([2, 2, 2], count=3, limit=99, fallback="shortest")[0] == [[2], [2], [2]]


def test_shortest_is_tried_when_least_work_is_full():
    # dust of nine in micro-batch 1 has least work (9 < 25) but the most tokens
    lengths = [5, *[1] * 9, 2]
    assert _place(lengths, count=2, limit=10, fallback="shortest") == ([[5, 2], [1] * 9], [29, 9], [])


def test_any_takes_the_least_work_among_those_that_fit():
    # Before the last document of 1: [4] has work 16 and most room, [2, 1, 1, 1] work 7, [1] * 6 least work but is full.
    lengths = [4, 2, *[1] * 10]
    assert _place(lengths, count=3, limit=6, fallback="any")[0] == [[4], [2, 1, 1, 1, 1], [1] * 6]
    assert _place(lengths, count=3, limit=6, fallback="shortest")[0] == [[4, 1], [2, 1, 1, 1], [1] * 6]


def test_what_fits_nowhere_is_left_in_order():
    assert _place([4, 4, 3, 2, 1], count=2, limit=5, fallback="shortest") == ([[4, 1], [4]], [17, 16], [3, 2])


def test_place_all_opens_as_many_micro_batches_as_it_takes_in_multiples_of_the_replicas():
    placement = place_all(
        documents_from_lengths([4, 4, 4, 4, 4]),
        num_micro_batches=2,
        num_replicas=2,
        limit_tokens=5,
        work=_square,
        fallback="shortest",
    )
    assert [len(f) for f in placement.filled] == [1, 1, 1, 1, 1, 0]
    assert placement.left == ()


def test_a_document_over_the_cap_is_refused_not_looped_on():
    with pytest.raises(PackingError, match=r"length must be <= 5, .* got 6 \(document 1\)"):
        place_all(
            documents_from_lengths([4, 6]),
            num_micro_batches=1,
            num_replicas=1,
            limit_tokens=5,
            work=_square,
            fallback="any",
        )


def test_longest_first_breaks_ties_by_id():
    assert [d.doc_id for d in longest_first(documents_from_lengths([2, 5, 2, 5]))] == [1, 3, 0, 2]


def test_dealing_gives_equal_counts_and_equal_work():
    assert deal_by_work([9, 1, 5, 4], 2) == ((0, 1), (2, 3))
    assert deal_by_work([5, 5, 5, 5], 4) == ((0,), (1,), (2,), (3,))
    # without the equal count, 8 would be alone against 1 + 1 + 1
    assert deal_by_work([8, 1, 1, 1], 2) == ((0, 3), (1, 2))
    with pytest.raises(ValueError, match="multiple of num_replicas = 2 entries, got 3"):
        deal_by_work([1, 2, 3], 2)


@pytest.mark.parametrize(
    ("work", "ordered"), [([], []), ([3], [3]), ([2, 1], [2, 1]), ([4, 1, 3, 2], [2, 4, 3, 1]), ([7, 7, 7], [7, 7, 7])]
)
def test_pipeline_order_has_little_work_at_both_ends(work, ordered):
    assert [work[i] for i in pipeline_order(work)] == ordered


def test_round_robin_is_how_megatron_deals_samples():
    packs = [tuple(documents_from_lengths([1], first_id=i)) for i in range(6)]
    replicas = replicas_round_robin(packs, 2)
    assert [[m.documents[0].doc_id for m in replica] for replica in replicas] == [[0, 2, 4], [1, 3, 5]]
