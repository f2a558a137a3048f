"""Head-tail over the whole pack: Megatron's split of a sequence, with documents.

The pack is cut in 2 * cp_size chunks and rank r holds chunks r and 2 * cp_size - 1 - r (WLB-LLM, arXiv 2503.17924,
section 2). Two ranks, documents of 5 and 3 tokens: rank 0 holds pack tokens 0 1 and 6 7, rank 1 holds 2 3 4 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from wlb.sharding.cost import ShardCosts
from wlb.sharding.plan import ShardPlan, plan_of_chunks, require_divisible


def shard(lengths: Sequence[int], cp_size: int, _costs: ShardCosts | None = None) -> ShardPlan:
    """Cut the pack, whatever documents it holds.

    Where the tokens are no multiple of 2 * cp_size, the first cp_size chunks are one token longer.

    Raises:
        ShardingError: the tokens are no multiple of cp_size.
    """
    require_divisible(lengths, cp_size)
    num_chunks = 2 * cp_size
    length, longer = divmod(sum(lengths), num_chunks)
    edges = list(accumulate((length + (c < longer) for c in range(num_chunks)), initial=0))
    pieces = []
    chunk = first = 0
    for document, n in enumerate(lengths):
        start = 0
        while start < n:
            while edges[chunk + 1] <= first + start:
                chunk += 1
            stop = min(n, edges[chunk + 1] - first)
            pieces.append((min(chunk, num_chunks - 1 - chunk), document, start, stop))
            start = stop
        first += n
    return plan_of_chunks(lengths, cp_size, pieces)
