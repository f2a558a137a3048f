"""Causal attention of a packed sequence that one rank holds: the plan with every document whole.

Shapes: T tokens, N query heads, K key/value heads, H head size of queries and keys, V of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch

from wlb.attention.sharded import sharded_attention
from wlb.sharding.plan import ShardPlan, Span


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Sequence[int],
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
    window_tokens: int | None = None,
) -> torch.Tensor:
    """Causal attention inside each segment.

    Args:
        query, key, value: (T, N, H), (T, K, H), (T, K, V); N is a multiple of K.
        segments: cumulative lengths as ints, leading 0, last T.
        cu_seqlens, max_seqlen: accepted from callers that also feed other kernels; `segments` says the same.
        scale: factor on the scores, 1 / sqrt(H) by default.
        window_tokens: a query at position i sees keys (i - window_tokens, i]; all before it by default.

    Returns:
        (T, N, V).
    """
    if segments[-1] != query.shape[0]:
        raise ValueError(f"segments must end at the number of tokens {query.shape[0]}, got {segments[-1]}")
    plan = _whole_documents(tuple(segments))
    return sharded_attention(
        query, key, value, plan, 0, None, comm_type="all_gather", scale=scale, window_tokens=window_tokens
    )


@lru_cache(maxsize=32)
def _whole_documents(segments: tuple[int, ...]) -> ShardPlan:
    """One plan for all layers of a micro-batch: what is derived from it is derived once."""
    lengths = tuple(stop - start for start, stop in pairwise(segments))
    spans = tuple(Span(document=d, start=0, stop=n) for d, n in enumerate(lengths) if n)
    return ShardPlan(lengths=lengths, ranks=(spans,))
