"""PyTorch's own variable-length flash attention: on every CUDA device that has flash attention, without a package.

The operators below `torch.nn.attention.varlen.varlen_attn` are used, because a merge needs the log-sum-exp and the
backward must take a merged one. Read in torch 2.13; the forward operator takes `seqused_k`, the backward one does not.
"""

from __future__ import annotations

from typing import Any

import torch

from wlb.attention.kernel_rows import is_causal, unused, window_size
from wlb.attention.packed_kernel import PackedKernel, Three, edges
from wlb.sharding.calls import KernelCall
from wlb.sharding.phases import Phase


class TorchKernel(PackedKernel):
    """Its backward is deterministic where torch is asked to be. Raises ImportError for a release of torch whose
    operators cannot be called as here.

    forward_op, backward_op: with the signatures of `torch.ops.torch_attn._varlen_attn` and `..._backward`, which are
    the default.
    """

    name = "torch"

    def __init__(self, forward_op: Any = None, backward_op: Any = None) -> None:
        if forward_op is None or backward_op is None:
            import torch.nn.attention.varlen

            forward_op = forward_op or torch.ops.torch_attn._varlen_attn
            backward_op = backward_op or torch.ops.torch_attn._varlen_attn_backward
        for operator, num_passed in ((forward_op, 11), (backward_op, 14)):
            unused(operator, num_passed)
        self._forward, self._backward = forward_op, backward_op

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: KernelCall,
        phase: Phase,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, log_sum_exp, _ = self._forward(
            query,
            key,
            value,
            *edges(call, query.device),
            is_causal(phase),
            scale,
            list(window_size(phase)),
            query.shape[1] != key.shape[1],
        )
        return out, log_sum_exp.transpose(0, 1)  # (N, R) -> (R, N)

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
        dq, dk, dv = self._backward(
            grad_out,
            query,
            key,
            value,
            out,
            log_sum_exp.transpose(0, 1).contiguous(),  # (R, N) -> (N, R)
            *edges(call, query.device),
            is_causal(phase),
            torch.zeros(2, dtype=torch.uint64, device=query.device),  # of dropout, of which there is none
            scale,
            list(window_size(phase)),
        )
        return dq, dk, dv
