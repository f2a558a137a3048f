"""FlashAttention-3 (package flash-attn-3, for Hopper GPUs): keys and queries are read where they lie.

`cu_seqlens_*` then hold the first row of each task and `seqused_*` its rows. Forward takes all tasks of a phase in one
call, also where they share keys; backward takes them apart. Read in its source: the log-sum-exp is (N, T); heads of
unequal size are taken forward as multi-latent attention has them, 192 and 128, and are widened to the larger elsewhere;
some releases check in backward that there is one head size, so there they always are. Forward launches as many blocks
as the device has room for, backward blocks for the longest task in every task, so there short tasks go to calls of
their own.

Before it became an operator of torch, forward had no defaults for what serving needs (its caches, rotary angles and
scales): whatever has none and is not ours gets None.

Shapes: T tokens of the shard, N query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from wlb.attention.device_rows import on_device
from wlb.attention.kernel_rows import (
    is_causal,
    is_deterministic,
    parameter_names,
    rounded_size,
    taken,
    unused,
    window_size,
)
from wlb.attention.offset_kernel import OffsetKernel, Three
from wlb.sharding.calls import KernelCall
from wlb.sharding.phases import Phase
from wlb.sharding.rows import Rows

_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")


_SHARED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
_BACKWARD = ("dq", "dk", "dv", "deterministic")


class Flash3Kernel(OffsetKernel):
    """Raises ImportError without the package, and for a release of it whose operators cannot be called as here.

    forward_op, backward_op: with the signatures of `_flash_attn_forward` and `_flash_attn_backward` in
    `flash_attn_interface`, which are the default.
    """

    name = "flash3"

    def __init__(self, forward_op: Any = None, backward_op: Any = None) -> None:
        if forward_op is None or backward_op is None:
            interface = _interface()
            forward_op = forward_op or interface._flash_attn_forward
            backward_op = backward_op or interface._flash_attn_backward
        self._forward, self._backward = forward_op, backward_op
        # Their names changed while the package was in beta.
        names = parameter_names(backward_op)
        self._causal = "is_causal" if "is_causal" in names else "causal"
        self._used_queries, self._used_keys = (
            name if name in names else name.replace("seqused", "sequed") for name in ("seqused_q", "seqused_k")
        )
        self._has_two_window_sizes = "window_size_left" in names
        window = ("window_size_left", "window_size_right") if self._has_two_window_sizes else ("window_size",)
        self._unused_forward = unused(forward_op, 3, "seqused_q", "seqused_k", "causal", *_SHARED, *window)
        used = (self._used_queries, self._used_keys, self._causal)
        self._unused_backward = unused(backward_op, 6, *_BACKWARD, *used, *_SHARED, *window)

    def _forward_calls(self, phase: Phase) -> Sequence[KernelCall]:
        return (phase.call,)

    def _arrays(self, call: KernelCall) -> tuple[Rows, ...]:
        return call.query_starts, call.key_starts, call.query_lengths, call.key_lengths

    def _backward_calls(self, phase: Phase) -> Sequence[KernelCall]:
        return phase.calls_apart

    def _sizes(self, head_size: int, value_size: int, *, backward: bool) -> tuple[int, int]:
        head_size, value_size = rounded_size(head_size), rounded_size(value_size)
        if not backward and 128 < head_size <= 192 and 96 < value_size <= 128:
            return head_size, value_size
        return max(head_size, value_size), max(head_size, value_size)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: KernelCall,
        phase: Phase,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = query.device
        out, log_sum_exp, *_ = self._forward(
            query,
            key,
            value,
            seqused_q=on_device(call.query_lengths, device),
            seqused_k=on_device(call.key_lengths, device),
            causal=is_causal(phase),
            **self._unused_forward,
            **self._shared(call, phase, scale, device),
        )
        return out, taken(log_sum_exp.transpose(0, 1), call.query_rows)  # (N, T) -> (R, N)

    def _differentiate(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        log_sum_exp: torch.Tensor,
        call: KernelCall,
        phase: Phase,
        scale: float,
    ) -> Three:
        device = query.device
        grads = tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in (query, key, value))
        self._backward(
            grad_out,
            query,
            key,
            value,
            out,
            log_sum_exp.transpose(0, 1).contiguous(),  # (T, N) -> (N, T)
            dq=grads[0],
            dk=grads[1],
            dv=grads[2],
            deterministic=is_deterministic(),
            **{
                self._used_queries: on_device(call.query_lengths, device),
                self._used_keys: on_device(call.key_lengths, device),
                self._causal: is_causal(phase),
            },
            **self._unused_backward,
            **self._shared(call, phase, scale, device),
        )
        return grads[0], grads[1], grads[2]

    def _shared(self, call: KernelCall, phase: Phase, scale: float, device: torch.device) -> dict[str, Any]:
        """Arguments of both directions."""
        left, right = window_size(phase)
        window = (
            {"window_size_left": left, "window_size_right": right}
            if self._has_two_window_sizes
            else {"window_size": (left, right)}
        )
        return {
            "cu_seqlens_q": on_device(call.query_starts, device),
            "cu_seqlens_k": on_device(call.key_starts, device),
            "max_seqlen_q": call.most_queries,
            "max_seqlen_k": call.most_keys,
            "softmax_scale": scale,
            **window,
        }


def _interface() -> Any:
    for name in _MODULES[:-1]:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    return import_module(_MODULES[-1])
