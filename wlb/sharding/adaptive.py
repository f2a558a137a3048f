"""Per micro-batch the better of per-sequence and per-document sharding (WLB-LLM, arXiv 2503.17924, section 4.3).

The paper compares the predicted time of the attention kernel; here what a rank must receive counts too.
"""

from __future__ import annotations

from collections.abc import Sequence

from wlb.sharding import per_document, per_sequence
from wlb.sharding.cost import ShardCosts
from wlb.sharding.plan import ShardPlan


def shard(lengths: Sequence[int], cp_size: int, costs: ShardCosts) -> ShardPlan:
    """The one predicted faster; per-sequence where they are equal.

    Raises:
        ShardingError: the tokens are no multiple of cp_size.
    """
    plans = (per_sequence.shard(lengths, cp_size, costs), per_document.shard(lengths, cp_size, costs))
    return min(plans, key=costs.slowest_pairs)
