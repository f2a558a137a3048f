"""wlb.sharding.hybrid and what it is made of."""

import math

import pytest

from wlb.sharding import ShardCosts, ShardPlan, hybrid, per_document, per_sequence
from wlb.sharding.gaps import Gaps, share_tokens
from wlb.sharding.placement import Placement, improved
from wlb.sharding.plan import plan_of_chunks
from wlb.sharding.whole_documents import RULES, by_density, by_work, by_work_and_tokens

EXACT = ShardCosts(tile_tokens=1)


def _spans(plan):
    return [[(s.document, s.start, s.stop) for s in spans] for spans in plan.ranks]


def _gaps(lengths, cp_size, costs=EXACT):
    return Gaps(lengths, [costs.tile_pairs(0, n) for n in lengths], cp_size, costs)


def test_the_drawn_example():
    costs = ShardCosts(tile_tokens=1, received_token_pairs=1)
    plan = hybrid.shard((8, 3, 3), 2, costs)
    assert _spans(plan) == [[(0, 0, 2), (0, 6, 8), (1, 0, 3)], [(0, 2, 6), (2, 0, 3)]]
    assert [plan.causal_pairs(rank) for rank in (0, 1)] == [24, 24]
    assert [plan.received_tokens(rank) for rank in (0, 1)] == [4, 2]
    assert costs.slowest_pairs(plan) == 28


def test_what_fits_stays_whole():
    """Two equal halves: nothing is cut, nothing travels."""
    plan = hybrid.shard((4, 4, 2, 2), 2, ShardCosts(tile_tokens=1, received_token_pairs=1))
    assert _spans(plan) == [[(0, 0, 4), (2, 0, 2)], [(1, 0, 4), (3, 0, 2)]]


def test_a_giant_is_cut_and_the_short_stay_whole():
    """Per document the giant's ranks are level but the short ones waste tiles; per sequence ranks are not level."""
    lengths = (8192, *(256,) * 32)
    costs = ShardCosts.for_model(num_heads=32, num_kv_heads=8)
    plan = hybrid.shard(lengths, 4, costs)
    cut = {s.document for spans in plan.ranks for s in spans if s.num_tokens < lengths[s.document]}
    assert cut == {0}
    slowest = costs.slowest_pairs(plan)
    assert slowest < 0.97 * costs.slowest_pairs(per_sequence.shard(lengths, 4))
    assert slowest < 0.9 * costs.slowest_pairs(per_document.shard(lengths, 4))


def test_receiving_at_any_price_is_avoided():
    lengths = (900, 500, 400, 300, 300)
    plan = hybrid.shard(lengths, 2, ShardCosts(tile_tokens=1, received_token_pairs=10**9))
    assert [plan.received_tokens(rank) for rank in (0, 1)] == [0, 0]
    free = hybrid.shard(lengths, 2, EXACT)
    assert max(free.causal_pairs(rank) for rank in (0, 1)) < max(plan.causal_pairs(rank) for rank in (0, 1))


def test_dust_is_planned_with_few_candidates(monkeypatch):
    """However many documents a pack has, one candidate is always made."""
    monkeypatch.setattr(hybrid, "_MAX_STEPS", 0)
    monkeypatch.setattr(hybrid, "_TRIAL_STEPS", 0)
    costs = ShardCosts(tile_tokens=1, received_token_pairs=1)
    plan = hybrid.shard((4, 4, 2, 2), 2, costs)
    assert costs.slowest_pairs(plan) == 13


def _partitions(lengths, cp_size):
    """Every way to keep all documents whole on ranks of equal tokens."""

    def place(document, rooms, ranks):
        if document == len(lengths):
            yield [(rank, d, 0, lengths[d]) for d, rank in enumerate(ranks)]
            return
        for rank in range(cp_size):
            if rooms[rank] >= lengths[document]:
                left = [room - lengths[document] * (r == rank) for r, room in enumerate(rooms)]
                yield from place(document + 1, left, [*ranks, rank])

    yield from place(0, [sum(lengths) // cp_size] * cp_size, [])


@pytest.mark.parametrize("lengths", [(6, 5, 4, 3, 2, 2), (9, 7, 5, 5, 4, 3, 2, 1), (8, 8, 4, 4, 4, 4), (7, 6, 5, 4, 2)])
def test_nothing_whole_is_faster(lengths):
    """Against brute force over all partitions of whole documents, where receiving costs too much to cut any."""
    costs = ShardCosts(tile_tokens=1, received_token_pairs=10**6)
    best = min(costs.slowest_pairs(plan_of_chunks(lengths, 2, pieces)) for pieces in _partitions(lengths, 2))
    assert costs.slowest_pairs(hybrid.shard(lengths, 2, costs)) == best


class TestGaps:
    def test_one_document_levels_what_whole_ones_left(self):
        """Rank 0 has 4 of 20 tokens and 10 pairs, rank 1 has 8 and 36: they lack 216 and 190 of 226 pairs."""
        gaps = _gaps((28, 8, 4), 2)
        gaps.hold_whole(1, 1)
        gaps.hold_whole(0, 2)
        assert gaps.room == [16, 12]
        assert gaps.fill([0], None)
        plan = plan_of_chunks((28, 8, 4), 2, gaps.pieces)
        assert [plan.causal_pairs(rank) for rank in (0, 1)] == [226, 226]
        assert gaps.room == [0, 0]
        assert gaps.received == [plan.received_tokens(rank) for rank in (0, 1)]

    def test_a_shorter_document_goes_where_its_kind_is_lacking(self):
        """Ranks of 40 tokens. Two hold a short document each; the other two share the one of 24."""
        lengths = (96, 24, 20, 20)
        gaps = _gaps(lengths, 4)
        gaps.hold_whole(0, 2)
        gaps.hold_whole(1, 3)
        gaps.fill([0, 1], None)
        plan = plan_of_chunks(lengths, 4, gaps.pieces)
        medium = [sum(s.num_tokens for s in spans if s.document == 1) for spans in plan.ranks]
        assert medium[:2] == [0, 0]
        assert max(medium[2:]) <= 14
        pairs = [plan.causal_pairs(rank) for rank in range(4)]
        assert max(pairs) * 4 < 1.03 * sum(pairs)

    def test_tails_start_at_whole_tiles(self):
        costs = ShardCosts(tile_tokens=16)
        gaps = _gaps((1000, 40, 40), 4, costs)
        gaps.hold_whole(2, 1)
        gaps.hold_whole(3, 2)
        gaps.fill([0], None)
        held = plan_of_chunks((1000, 40, 40), 4, gaps.pieces).ranks
        tails = [spans[1].start for spans in held if len(spans) > 1 and spans[1].document == 0]
        assert tails
        assert all(start % 16 == 0 for start in tails)

    def test_the_price_is_that_of_the_plan(self):
        costs = ShardCosts(tile_tokens=4, received_token_pairs=5, exchange_pairs=9)
        lengths = (37, 20, 11, 4)
        gaps = _gaps(lengths, 2, costs)
        left = by_work(gaps, [2, 3], [0, 1])
        assert left == []
        assert gaps.fill([0, 1], None)
        assert gaps.slowest_pairs() == costs.slowest_pairs(plan_of_chunks(lengths, 2, gaps.pieces))

    def test_a_candidate_that_reaches_the_limit_is_given_up(self):
        gaps = _gaps((12, 4), 2)
        full = gaps.copy()
        assert full.fill([0, 1], None)
        assert not gaps.copy().fill([0, 1], full.slowest_pairs())
        assert gaps.copy().fill([0, 1], full.slowest_pairs() + 1)

    def test_a_leveller_takes_the_ragged_tokens(self):
        """Ranks of 45 tokens that hold 10 and 13: 35 and 32 are lacking, tiles of 8, so 3 ragged tokens."""
        gaps = _gaps((59, 8, 10, 13), 2, ShardCosts(tile_tokens=8))
        gaps.hold_whole(0, 2)
        gaps.hold_whole(1, 3)
        gaps.level_tiles(1)
        assert sum(gaps.room) == 59
        assert sorted(room % 8 for room in gaps.room) == [0, 3]

    def test_copies_are_independent(self):
        gaps = _gaps((6, 3, 3), 2)
        gaps.hold_whole(0, 1)
        copy = gaps.copy()
        copy.let_go(1)
        copy.fill([0, 1, 2], None)
        assert gaps.holder == [-1, 0, -1]
        assert gaps.room == [3, 6]
        assert gaps.pieces == [(0, 1, 0, 3)]


@pytest.mark.parametrize(
    ("length", "wants", "rooms", "tile", "shares"),
    [
        (10, [4, 8], [8, 8], 1, [3, 7]),
        (10, [4, 8], [8, 8], 4, [4, 6]),
        (10, [2, 1], [8, 4], 1, [6, 4]),
        (10, [1, 9], [1, 9], 4, [1, 9]),
        (6, [-5, 1], [9, 9], 1, [2, 4]),
        (3, [0, 7, 8], [9, 9, 9], 1, [0, 1, 2]),
    ],
)
def test_tokens_are_shared_by_what_is_wanted(length, wants, rooms, tile, shares):
    found = share_tokens(length, wants, rooms, tile)
    assert sum(found) == length
    assert all(0 <= share <= room for share, room in zip(found, rooms, strict=True))
    assert found == shares


class TestRules:
    @pytest.mark.parametrize("rule", RULES)
    def test_what_has_no_room_is_left(self, rule):
        gaps = _gaps((9, 8, 3), 2)
        assert rule(gaps, [1, 2], [0]) == []
        crowded = _gaps((7, 7, 6), 2)
        assert rule(crowded, [0, 1, 2], []) == [2]

    def test_by_work_looks_at_pairs_only(self):
        gaps = _gaps((10, 2, 2, 2, 2, 2), 2)
        assert by_work(gaps, [0, 1, 2, 3, 4, 5], []) == []
        assert gaps.holder == [0, 1, 1, 1, 1, 1]

    def test_by_work_and_tokens_looks_at_both(self):
        # After 6 and 4 rank 1 lacks more pairs; the last, of 1 token, goes where both are lacking.
        gaps = _gaps((6, 4, 1, 1), 2)
        assert by_work_and_tokens(gaps, [0, 1, 2, 3], []) == []
        assert gaps.holder == [0, 1, 1, 1]

    def test_by_density_leaves_ranks_that_lack_alike(self):
        lengths = (64, 9, 9, 9, 9, 7, 7, 7, 7)
        gaps = _gaps(lengths, 4)
        assert by_density(gaps, list(range(1, 9)), [0]) == []
        assert gaps.room == [16] * 4
        assert len(set(gaps.need)) == 1


def test_changes_that_make_a_plan_slower_are_not_kept():
    costs = ShardCosts(tile_tokens=4, received_token_pairs=3)
    lengths = (50, 31, 22, 13, 9, 7, 5, 3)
    gaps = _gaps(lengths, 4, costs)
    left = by_work(gaps, range(1, 8), [0])
    placement = Placement(gaps=gaps, cut=(0, *left), leveller=None)
    start = placement.finished(None)
    prices = [improved(placement, start, trials).slowest_pairs() for trials in (0, 10, 100, 1000)]
    assert prices[0] == start.slowest_pairs()
    assert prices == sorted(prices, reverse=True)
    assert prices[-1] < prices[0]
    plan = plan_of_chunks(lengths, 4, improved(placement, start, 1000).pieces)
    assert isinstance(plan, ShardPlan)
    assert costs.slowest_pairs(plan) <= prices[-1] < math.inf
