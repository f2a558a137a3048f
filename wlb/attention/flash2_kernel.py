"""FlashAttention-2 (package flash-attn, 2.5 and later), prefixes of keys gathered.

What differs by version, read in its source: up to 2.6 a window is one pair and the operators give eight tensors, since
then two numbers and four tensors; the log-sum-exp is (tasks, N, longest) before 2.6 and (N, R) from it on. Which one is
installed shows in its parameters and in what it gives.

Shapes: R query rows of a call, N query heads.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from wlb.attention.device_rows import on_device
from wlb.attention.kernel_rows import is_causal, is_deterministic, parameter_names, unused, window_size
from wlb.attention.packed_kernel import PackedKernel, Three, edges
from wlb.sharding.calls import KernelCall
from wlb.sharding.phases import Phase

_FORWARD = ("dropout_p", "softmax_scale", "causal", "alibi_slopes", "return_softmax")
_BACKWARD = ("dropout_p", "softmax_scale", "causal", "alibi_slopes", "deterministic")
_WINDOW = {True: ("window_size_left", "window_size_right"), False: ("window_size",)}


class Flash2Kernel(PackedKernel):
    """Raises ImportError without the package, and for a release of it whose operators cannot be called as here.

    forward_op, backward_op: with the signatures of `_flash_attn_varlen_forward` and `_flash_attn_varlen_backward` in
    `flash_attn.flash_attn_interface`, which are the default.
    """

    name = "flash2"

    def __init__(self, forward_op: Any = None, backward_op: Any = None) -> None:
        if forward_op is None or backward_op is None:
            interface = import_module("flash_attn.flash_attn_interface")
            forward_op = forward_op or interface._flash_attn_varlen_forward
            backward_op = backward_op or interface._flash_attn_varlen_backward
        self._forward, self._backward = forward_op, backward_op
        forward_names, backward_names = parameter_names(forward_op), parameter_names(backward_op)
        self._has_two_window_sizes = "window_size_left" in forward_names
        window = _WINDOW[self._has_two_window_sizes]
        # Some releases have no default for it.
        softcap = {"softcap": 0.0} if "softcap" in forward_names & backward_names else {}
        self._unused_forward = softcap | unused(forward_op, 7, *_FORWARD, *window, *softcap)
        self._unused_backward = softcap | unused(backward_op, 13, *_BACKWARD, *window, *softcap)
        self._is_lse_by_task = False  # as the last forward gave it

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: KernelCall,
        phase: Phase,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        results = self._forward(
            query,
            key,
            value,
            *edges(call, query.device),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=is_causal(phase),
            alibi_slopes=None,
            return_softmax=False,
            **self._window(phase),
            **self._unused_forward,
        )
        out, log_sum_exp = results[:2] if len(results) == 4 else results[4:6]
        self._is_lse_by_task = log_sum_exp.dim() == 3
        if self._is_lse_by_task:
            task, place = (on_device(rows, query.device) for rows in call.query_places)
            return out, log_sum_exp[task, :, place]
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
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        self._backward(
            grad_out,
            query,
            key,
            value,
            out,
            self._laid_out(log_sum_exp, call),
            *grads,
            *edges(call, query.device),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=is_causal(phase),
            alibi_slopes=None,
            deterministic=is_deterministic(),
            **self._window(phase),
            **self._unused_backward,
        )
        return grads

    def _window(self, phase: Phase) -> dict[str, Any]:
        left, right = window_size(phase)
        if self._has_two_window_sizes:
            return {"window_size_left": left, "window_size_right": right}
        return {"window_size": (left, right)}

    def _laid_out(self, log_sum_exp: torch.Tensor, call: KernelCall) -> torch.Tensor:
        """(R, N) -> as forward gave it."""
        if not self._is_lse_by_task:
            return log_sum_exp.transpose(0, 1).contiguous()
        by_task = log_sum_exp.new_zeros(call.num_tasks, log_sum_exp.shape[1], call.most_queries)
        task, place = (on_device(rows, log_sum_exp.device) for rows in call.query_places)
        by_task[task, :, place] = log_sum_exp
        return by_task
