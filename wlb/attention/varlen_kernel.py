"""PyTorch's variable-length flash attention on CUDA, one call per phase.

The operators below `torch.nn.attention.varlen.varlen_attn` are used, because a merge needs the log-sum-exp and the
backward must take a merged one. They take no `seqused_k` in backward, so keys that several tasks see are copied to
lie back to back; where the buffer is in that order already, it is used as it is.

Shapes: T tokens of the shard, S rows of the key buffer, R query rows of a phase, N query heads, K key/value heads, H
head size of queries and keys, V of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from wlb.attention.device_rows import on_device
from wlb.attention.partial import Partial
from wlb.errors import ConfigError
from wlb.sharding.phases import Phase
from wlb.sharding.rows import Rows

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_SIZE_MULTIPLE = 8
MOST_HEAD_SIZE = 256


class VarlenKernel:
    """A `Kernel`. Takes bfloat16 and float16; unequal or odd head sizes by zeros behind.

    forward_op, backward_op: with the signatures of `torch.ops.torch_attn._varlen_attn` and `..._backward`, which are
    the default.
    """

    # The operator measures a window from the last key of a task.
    cuts_by_window = False

    def __init__(self, forward_op: Any = None, backward_op: Any = None) -> None:
        if forward_op is None or backward_op is None:
            import torch.nn.attention.varlen

            forward_op = forward_op or torch.ops.torch_attn._varlen_attn
            backward_op = backward_op or torch.ops.torch_attn._varlen_attn_backward
        self._forward, self._backward = forward_op, backward_op

    def check(self, query: torch.Tensor, value: torch.Tensor) -> None:
        """Raises ConfigError for a dtype or a head size that flash attention does not have."""
        if query.dtype not in _DTYPES:
            raise ConfigError(f"attention on CUDA takes bfloat16 or float16, got {query.dtype}")
        if _padded_size(query, value) > MOST_HEAD_SIZE:
            sizes = f"{query.shape[-1]} and {value.shape[-1]}"
            raise ConfigError(f"attention on CUDA takes head sizes up to {MOST_HEAD_SIZE}, got {sizes}")

    def forward(
        self,
        partial: Partial,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        phase: Phase,
        scale: float,
    ) -> None:
        if not phase.tasks:
            return
        size = _padded_size(query, value)
        out, log_sum_exp, _ = self._forward(
            _packed(query, phase.query_rows, size),
            _packed(key, phase.key_rows, size),
            _packed(value, phase.key_rows, size),
            *_edges(phase, query.device),
            _is_causal(phase),
            scale,
            _window_size(phase),
            query.shape[1] != key.shape[1],
        )
        add = partial.put if phase.first else partial.merge
        add(_rows(phase.query_rows, query), out[..., : value.shape[-1]], log_sum_exp.transpose(0, 1))

    def backward(
        self,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        log_sum_exp: torch.Tensor,
        phase: Phase,
        scale: float,
    ) -> None:
        if not phase.tasks:
            return
        size = _padded_size(query, value)
        phase_grads = self._backward(
            _packed(grad_out, phase.query_rows, size),
            _packed(query, phase.query_rows, size),
            _packed(key, phase.key_rows, size),
            _packed(value, phase.key_rows, size),
            _packed(out, phase.query_rows, size),
            log_sum_exp[_rows(phase.query_rows, query)].transpose(0, 1).contiguous(),  # (R, N) -> (N, R)
            *_edges(phase, query.device),
            _is_causal(phase),
            torch.zeros(2, dtype=torch.uint64, device=query.device),  # of dropout, of which there is none
            scale,
            _window_size(phase),
        )
        for grad, rows, part in zip(grads, (phase.query_rows, *[phase.key_rows] * 2), phase_grads, strict=True):
            part = part[..., : grad.shape[-1]].to(grad.dtype)
            if _is_whole(rows, grad):
                grad += part
            else:
                # A key that several tasks see is there several times: index_add_ sums it.
                grad.index_add_(0, on_device(rows, grad.device), part)


def _edges(phase: Phase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return on_device(phase.query_edges, device), on_device(phase.key_edges, device), phase.most_queries, phase.most_keys


def _is_causal(phase: Phase) -> bool:
    return phase.causal and phase.window is None


def _window_size(phase: Phase) -> list[int]:
    """(left, right) of the last key that each query sees, counted from the bottom right corner; -1 without bound."""
    if not phase.causal:
        assert phase.window is None, "a window is measured from a task's last key, which must be its last query's own"
        return [-1, -1]
    return [-1, 0] if phase.window is None else [phase.window - 1, 0]


def _padded_size(query: torch.Tensor, value: torch.Tensor) -> int:
    size = max(query.shape[-1], value.shape[-1])
    return -(-size // _HEAD_SIZE_MULTIPLE) * _HEAD_SIZE_MULTIPLE


def _is_whole(rows: Rows, buffer: torch.Tensor) -> bool:
    return len(rows) == buffer.shape[0] and rows.are_all_in_order


def _rows(rows: Rows, buffer: torch.Tensor) -> slice | torch.Tensor:
    return slice(None) if _is_whole(rows, buffer) else on_device(rows, buffer.device)


def _packed(buffer: torch.Tensor, rows: Rows, size: int) -> torch.Tensor:
    """(S, K, H) -> (rows, K, size)."""
    if not _is_whole(rows, buffer):
        buffer = buffer.index_select(0, on_device(rows, buffer.device))
    if buffer.shape[-1] < size:
        buffer = pad(buffer, (0, size - buffer.shape[-1]))
    return buffer.contiguous()
