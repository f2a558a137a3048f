"""Dividing a micro-batch over context-parallel ranks: pure functions of document lengths."""

from wlb.sharding.cost import DEFAULT_OPERATIONS_PER_BYTE, ShardCosts
from wlb.sharding.division import Division
from wlb.sharding.plan import ShardPlan, Span
from wlb.sharding.registry import SHARDERS, Sharder, Sharding, sharder_named

__all__ = [
    "DEFAULT_OPERATIONS_PER_BYTE",
    "SHARDERS",
    "Division",
    "ShardCosts",
    "ShardPlan",
    "Sharder",
    "Sharding",
    "Span",
    "sharder_named",
]
