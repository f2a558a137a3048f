"""The oracle: every score of a packed sequence in one matrix, masked. For tests; memory is quadratic.

Shapes: T tokens, N query heads, K key/value heads, H head size of queries and keys, V of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def document_causal_mask(segments: Sequence[int], window_tokens: int | None = None) -> torch.Tensor:
    """(T, T) bool, true where row i may attend to column j.

    window_tokens: columns that a row sees at most, with its own; None for all of its document before it.

    >>> document_causal_mask((0, 2, 3)).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    num_tokens = segments[-1]
    document = torch.bucketize(torch.arange(num_tokens), torch.tensor(segments[1:]), right=True)
    mask = (document[:, None] == document[None, :]).tril()
    return mask if window_tokens is None else mask.triu(1 - window_tokens)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Sequence[int],
    *,
    scale: float | None = None,
    window_tokens: int | None = None,
) -> torch.Tensor:
    """Causal attention inside each segment, by the definition.

    Args:
        query, key, value: (T, N, H), (T, K, H), (T, K, V); N is a multiple of K.
        segments: cumulative lengths, leading 0, last T.
        scale: factor on the scores, 1 / sqrt(H) by default.
        window_tokens: as in `document_causal_mask`.

    Returns:
        (T, N, V) in the dtype of `query`.
    """
    scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("tnh,snh->nts", query, key) * scale
    mask = document_causal_mask(segments, window_tokens).to(scores.device)
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("nts,snv->tnv", scores.softmax(dim=-1), value)
