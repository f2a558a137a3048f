"""Causal attention of a packed sequence, one kernel call per document: no score crosses a document.

The CPU kernel is the flash attention that PyTorch ships for the CPU. It is called below autograd, for slices
of the packed tensors: autograd's own slicing would write a gradient of the whole pack for every document.
On CUDA, where Transformer Engine does not replace this module, PyTorch's variable-length kernel takes the
whole pack in one call.

Shapes: T tokens, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Sequence[int],
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention inside each segment.

    Args:
        query, key, value: (T, N, H), (T, K, H), (T, K, H); N is a multiple of K.
        segments: cumulative lengths as ints, leading 0, last T.
        cu_seqlens, max_seqlen: the same on the device, int32, and the longest segment; CUDA only.
        scale: factor on the scores, 1 / sqrt(H) by default.

    Returns:
        (T, N, H).
    """
    if segments[-1] != query.shape[0]:
        raise ValueError(f"segments must end at the number of tokens {query.shape[0]}, got {segments[-1]}")
    scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    if query.device.type == "cpu":
        out: torch.Tensor = _CpuPackedAttention.apply(query, key, value, tuple(segments), scale)  # type: ignore[no-untyped-call]
        return out
    return _cuda_attention(query, key, value, cu_seqlens, max_seqlen, scale)


def _cuda_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    scale: float,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if cu_seqlens is None or max_seqlen is None:
        raise ValueError("cu_seqlens and max_seqlen are required on CUDA, got None")
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, torch.Tensor)
    return out


class _CpuPackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: tuple[int, ...],
        scale: float,
    ) -> torch.Tensor:
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        out = torch.empty(query.shape, dtype=query.dtype)
        log_sum_exp = []
        for start, stop in pairwise(segments):
            document_out, document_lse = _cpu_forward(
                *(_as_batch(t, start, stop) for t in (query, key, value)), 0.0, True, scale=scale
            )
            out[start:stop] = document_out[0].transpose(0, 1)  # (1, N, L, H) -> (L, N, H)
            log_sum_exp.append(document_lse)
        ctx.save_for_backward(query, key, value, out, *log_sum_exp)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, *log_sum_exp = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)]
        for (start, stop), document_lse in zip(pairwise(ctx.segments), log_sum_exp, strict=True):
            document_grads = _cpu_backward(
                *(_as_batch(t, start, stop) for t in (grad_out, query, key, value, out)),
                document_lse,
                0.0,
                True,
                scale=ctx.scale,
            )
            for grad, document_grad in zip(grads, document_grads, strict=True):
                grad[start:stop] = document_grad[0].transpose(0, 1)
        return (*grads, None, None)


def _as_batch(packed: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """(T, N, H) -> the document's (1, N, L, H), a view."""
    return packed[start:stop].transpose(0, 1).unsqueeze(0)
