"""Head-tail inside every document, without padding (WLB-LLM, arXiv 2503.17924, section 4.2).

Each document is cut in 2 * cp_size chunks of `length // (2 * cp_size)` tokens. What remains goes one token each to
successive chunks, counted on from document to document, so that ranks end up with equally many tokens. Rank r holds
chunks r and 2 * cp_size - 1 - r. Two ranks, documents of 5 and 3 tokens::

    document 0   0 1 | 2 | 3 | 4      chunk 0 has the remaining token
    document 1   | 0 | 1 | 2          chunks 1, 2 and 3 have
    rank 0       0:[0, 2)  0:[4, 5)  1:[2, 3)
"""

from __future__ import annotations

from collections.abc import Sequence

from wlb.sharding.cost import ShardCosts
from wlb.sharding.plan import ShardPlan, plan_of_chunks, require_divisible


def shard(lengths: Sequence[int], cp_size: int, _costs: ShardCosts | None = None) -> ShardPlan:
    """Cut every document over all ranks; chunks of a document shorter than 2 * cp_size may be empty.

    Raises:
        ShardingError: the tokens are no multiple of cp_size.
    """
    require_divisible(lengths, cp_size)
    num_chunks = 2 * cp_size
    pieces = []
    counter = 0
    for document, n in enumerate(lengths):
        length, left = divmod(n, num_chunks)
        start = 0
        # A document shorter than the chunks has tokens in few of them, and a pack of dust has many such documents.
        for chunk in range(num_chunks) if length else sorted((counter + i) % num_chunks for i in range(left)):
            stop = start + length + ((chunk - counter) % num_chunks < left)
            pieces.append((min(chunk, num_chunks - 1 - chunk), document, start, stop))
            start = stop
        counter = (counter + left) % num_chunks
    return plan_of_chunks(lengths, cp_size, pieces)
