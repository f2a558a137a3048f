"""Attention over packed documents, each of which attends to itself, causally; divided over ranks by a `ShardPlan`."""

from wlb.attention.dense import dense_attention
from wlb.attention.exchange import GroupExchange, KvExchange, Transfer
from wlb.attention.in_process import Mailbox, all_ranks_attention
from wlb.attention.kernel_rows import MOST_HEAD_SIZE
from wlb.attention.packed import packed_attention
from wlb.attention.sharded import CommType, sharded_attention

__all__ = [
    "MOST_HEAD_SIZE",
    "CommType",
    "GroupExchange",
    "KvExchange",
    "Mailbox",
    "Transfer",
    "all_ranks_attention",
    "dense_attention",
    "packed_attention",
    "sharded_attention",
]
