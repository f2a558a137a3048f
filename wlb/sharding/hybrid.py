"""Short documents whole on one rank, long ones cut: what WLB-LLM (arXiv 2503.17924) leaves as future work.

The longest documents are cut, and whatever fits nowhere; the others are placed whole. Cut documents are then dealt
head-tail, so that every rank ends with equally many tokens and about equally many pairs (`wlb.sharding.gaps`). How many
to cut and by which rule to place the rest is searched: the plan predicted fastest wins, receiving keys and values
included, after a search among similar ones (`wlb.sharding.placement`). The plans of per-sequence and per-document
sharding compete as well, so none is predicted slower than the better of them.

Two ranks, documents of 8, 3 and 3 tokens, tiles of 1, receiving a token worth 1 pair::

    document 0   0 1 2 3 4 5 6 7    rank 0   0:[0, 2)  0:[6, 8)  1:[0, 3)    24 pairs, 4 tokens received
    document 1   0 1 2              rank 1   0:[2, 6)  2:[0, 3)              24 pairs, 2 tokens received
    document 2   0 1 2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from wlb.sharding import adaptive
from wlb.sharding.cost import ShardCosts
from wlb.sharding.gaps import Gaps
from wlb.sharding.placement import Placement, improved
from wlb.sharding.plan import ShardPlan, plan_of_chunks, require_divisible
from wlb.sharding.whole_documents import RULES

# How many of the longest documents are cut on purpose; the search among similar plans cuts others.
_NUM_CUT = (0, 1, 2, 3, 6, 12)
# Ranks looked at, over all documents and first candidates: a pack of dust gets few of them, but one.
_MAX_STEPS = 100_000
# The best candidates from which the search goes on, and the changes tried: about 3 ms of one core.
_NUM_STARTS = 2
_TRIAL_STEPS = 70_000
_TRIAL_STEPS_PER_RANK = 40


def shard(lengths: Sequence[int], cp_size: int, costs: ShardCosts) -> ShardPlan:
    """The plan predicted fastest of those tried; of equal ones the plainest.

    Raises:
        ShardingError: the tokens are no multiple of cp_size.
    """
    static = adaptive.shard(lengths, cp_size, costs)
    if require_divisible(lengths, cp_size) == 0 or cp_size == 1:
        return static
    plan = plan_of_chunks(lengths, cp_size, _search(lengths, cp_size, costs).pieces)
    return min((static, plan), key=costs.slowest_pairs)


def _search(lengths: Sequence[int], cp_size: int, costs: ShardCosts) -> Gaps:
    works = [costs.tile_pairs(0, n) + costs.span_pairs for n in lengths]
    order = sorted(range(len(lengths)), key=lambda d: (-lengths[d], d))
    # A document that levels tiles must hold the ragged tokens of all ranks, half a tile on average.
    least_tokens = costs.tile_tokens * cp_size // 2
    found: list[tuple[int, int, Placement, Gaps]] = []
    for tried, (num_cut, rule, levelling) in enumerate(product(_NUM_CUT, RULES, (False, True))):
        if found and (num_cut > min(cp_size, len(order)) or tried * cp_size * len(order) > _MAX_STEPS):
            break
        cut, whole = order[:num_cut], order[num_cut:]
        leveller = next((d for d in reversed(whole) if lengths[d] >= least_tokens), None) if levelling else None
        if levelling and (leveller is None or not cut):
            continue
        gaps = Gaps(lengths, works, cp_size, costs)
        left = rule(gaps, [d for d in whole if d != leveller], cut)
        placement = Placement(gaps=gaps, cut=(*cut, *left), leveller=leveller)
        finished = placement.finished(found[-1][0] if len(found) == _NUM_STARTS else None)
        if finished is not None:
            found = sorted([*found, (finished.slowest_pairs(), tried, placement, finished)], key=lambda f: f[:2])
            del found[_NUM_STARTS:]
    num_trials = _TRIAL_STEPS // (_TRIAL_STEPS_PER_RANK * cp_size + len(order)) // len(found)
    return min((improved(start, gaps, num_trials) for _, _, start, gaps in found), key=Gaps.slowest_pairs)
