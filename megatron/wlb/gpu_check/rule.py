"""The rule by which the GPU check judges attention, and an oracle for packs too long for one matrix of scores.

Shapes: T tokens, C rows of a chunk, S keys, N query heads, K key/value heads, H head size of queries and keys, V of
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from megatron.wlb.gpu_check.model import relative_error
from megatron.wlb.gpu_check.packs import Tensors
from wlb.attention.partial import accumulation_dtype

RATIO = 2.0
RULE = f"error <= {RATIO:g} x PyTorch's own in bfloat16, both against float64; other documents keep every bit"
RESULTS = ("out", "dq", "dk", "dv")

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def with_gradients(
    attention: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad: torch.Tensor
) -> Tensors:
    """Output, dq, dk, dv."""
    leaves = [t.detach().clone().requires_grad_() for t in (query, key, value)]
    out = attention(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def error_ratios(ours: Tensors, unit: Tensors, exact: Tensors, rows: slice = slice(None)) -> dict[str, float]:
    """By `RESULTS`: the error of `ours` over that of `unit`, both against `exact`, of these rows of the pack."""
    return {
        name: relative_error(o[rows], e[rows]) / relative_error(u[rows], e[rows])
        for name, o, u, e in zip(RESULTS, ours, unit, exact, strict=True)
    }


def within_ratio(ratios: dict[str, float]) -> bool:
    """Whether each is at most `RATIO`; a NaN is not."""
    return all(ratio <= RATIO for ratio in ratios.values())


def attention_by_chunks(pack: Tensors, lengths: Sequence[int], chunk_rows: int) -> Tensors:
    """Output, dq, dk, dv of causal attention inside each document, by the definition, a few rows of scores at a time.

    Args:
        pack: (T, N, H), (T, K, H), (T, K, V) and the gradient of the output (T, N, V).
        lengths: of the documents; their sum is T.
        chunk_rows: C; the largest matrix of scores is N x C x the longest document.

    Returns:
        In the dtype of `pack`; dk and dv are summed over chunks in float32 or better.
    """
    query, key, value, grad = pack
    out, dq = torch.empty_like(grad), torch.empty_like(query)
    dk, dv = (torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) for t in (key, value))
    for begin, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        for first in range(0, length, chunk_rows):
            stop = min(first + chunk_rows, length)
            rows, keys = slice(begin + first, begin + stop), slice(begin, begin + stop)
            leaves = [t.detach().requires_grad_() for t in (query[rows], key[keys], value[keys])]
            part = _last_rows(*leaves)
            out[rows] = part.detach()
            dq[rows], dk_part, dv_part = torch.autograd.grad(part, leaves, grad[rows])
            dk[keys] += dk_part
            dv[keys] += dv_part
    return out, dq, dk.to(key.dtype), dv.to(value.dtype)


def _last_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The last C queries of a document up to there: (C, N, H), (S, K, H), (S, K, V) -> (C, N, V)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("cnh,snh->ncs", query, key) / math.sqrt(query.shape[-1])
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(
        len(key) - len(query) + 1  # the last query sees all keys
    )
    return torch.einsum("ncs,snv->cnv", scores.masked_fill(hidden, float("-inf")).softmax(dim=-1), value)
