"""cuDNN's attention, called through Transformer Engine (2.9 and later): keys and queries are read where they lie.

`cu_seqlens_*` hold cumulative lengths of the tasks, and `cu_seqlens_*_padded` their first rows. Read in 2.9.0, 2.13.0,
2.17.1 and 2.20.2:

* `padding_causal` counts from the top left corner of a task's scores, `padding_causal_bottom_right` from the other one.
  They agree where a task has as many queries as keys, and there the first is used, as Transformer Engine does itself.
* Layouts are names, and strides follow from them. Keys and values that lie side by side in one row, as gathered ones
  do where both have one head size, are `t2hd` and are not copied; others must be contiguous.
* The log-sum-exp is (T, N, 1) from cuDNN 9.6 on, except on compute capability 12.0; else (tasks, N, longest, 1). Which
  of them shows in what forward gives, and backward wants the same.
* Rows between the tasks' are filled with zeros by some releases and by others not, so none of them is read.
* Plans are kept by size. From cuDNN 9.6 on that is the numbers of rows, which Transformer Engine rounds up, and the
  number of tasks, which it rounds up to 512 only; before, tasks and the longest of them. `RoundedCall` rounds both.

Forward takes tasks apart as backward does: nothing says that rows of two tasks may overlap.

Shapes: T tokens of the shard, S rows of the key buffer, R query rows of a call, N query heads, K key/value heads, H
head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from wlb.attention.device_rows import on_device
from wlb.attention.kernel_rows import is_deterministic, parameter_names, rounded_size, taken, unused, window_size
from wlb.attention.offset_kernel import OffsetKernel, Three
from wlb.sharding.calls import KernelCall
from wlb.sharding.phases import Phase
from wlb.sharding.rows import Rows

_OPERATORS = "transformer_engine.pytorch.cpp_extensions.fused_attn"
_BACKEND = "F16_arbitrary_seqlen"
_SHARED = (
    *("q", "k", "v", "fake_dtype", "qkv_layout", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv"),
    *("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "fused_attention_backend", "attn_scale", "attn_mask_type"),
    "window_size",
)
_FORWARD = (*_SHARED, "is_training")
_BACKWARD = (*_SHARED, "o", "d_o", "aux_ctx_tensors", "deterministic")


class CudnnKernel(OffsetKernel):
    """Raises ImportError without Transformer Engine, and for one whose operators cannot be called as here.

    operators: with `fused_attn_fwd`, `fused_attn_bwd` and `FusedAttnBackend` of Transformer Engine's module, which is
        the default.
    dtype_codes: its codes of torch dtypes, which its backward wants up to 2.13.
    """

    name = "cudnn"

    def __init__(self, operators: Any = None, dtype_codes: Any = None) -> None:
        self._operators = operators or import_module(_OPERATORS)
        names = parameter_names(self._operators.fused_attn_bwd)
        self._has_formats = "dqkv_layout" in names
        self._dtype_codes = None
        if "dqkv_dtype" in names:
            self._dtype_codes = dtype_codes or import_module("transformer_engine.pytorch.constants").TE_DType
        formats = ("o_format", "do_format", "dqkv_layout") if self._has_formats else ()
        dtype = ("dqkv_dtype",) if self._dtype_codes is not None else ()
        self._unused_forward = unused(self._operators.fused_attn_fwd, 0, *_FORWARD, *formats[:1])
        self._unused_backward = unused(self._operators.fused_attn_bwd, 0, *_BACKWARD, *formats, *dtype)
        self._is_lse_by_task = False  # as the last forward gave it

    def _forward_calls(self, phase: Phase) -> Sequence[KernelCall]:
        return phase.rounded_calls

    def _backward_calls(self, phase: Phase) -> Sequence[KernelCall]:
        return phase.rounded_calls

    def _arrays(self, call: KernelCall) -> tuple[Rows, ...]:
        return call.query_starts, call.key_starts, call.query_edges, call.key_edges

    def _sizes(self, head_size: int, value_size: int, *, backward: bool) -> tuple[int, int]:
        return rounded_size(head_size), rounded_size(value_size)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: KernelCall,
        phase: Phase,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout, key, value = _laid_out(key, value)
        out, (stats, *_) = self._operators.fused_attn_fwd(
            is_training=True,
            q=query.contiguous(),
            k=key,
            v=value,
            fake_dtype=query.dtype,
            qkv_layout=layout,
            **({"o_format": "thd"} if self._has_formats else {}),
            **self._unused_forward,
            **self._shared(call, phase, scale, query.device),
        )
        self._is_lse_by_task = stats.dim() == 4
        if self._is_lse_by_task:
            task, place = (on_device(rows, query.device) for rows in call.query_places)
            return out, stats[task, :, place, 0]
        return out, taken(stats.squeeze(-1), call.query_rows)  # (T, N, 1) -> (R, N)

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
        layout, key, value = _laid_out(key, value)
        formats: dict[str, Any] = {}
        if self._has_formats:
            formats = {"o_format": "thd", "do_format": "thd", "dqkv_layout": layout}
        if self._dtype_codes is not None:
            formats["dqkv_dtype"] = self._dtype_codes[query.dtype]
        random_state = torch.zeros(2, dtype=torch.int64, device=query.device)  # of dropout, of which there is none
        dq, dk, dv, *_ = self._operators.fused_attn_bwd(
            q=query.contiguous(),
            k=key,
            v=value,
            o=out.contiguous(),
            d_o=grad_out.contiguous(),
            fake_dtype=query.dtype,
            aux_ctx_tensors=[self._stats(log_sum_exp, call), random_state],
            qkv_layout=layout,
            deterministic=is_deterministic(),
            **formats,
            **self._unused_backward,
            **self._shared(call, phase, scale, query.device),
        )
        return dq, dk, dv

    def _stats(self, log_sum_exp: torch.Tensor, call: KernelCall) -> torch.Tensor:
        """(T, N) -> as forward gave it."""
        if not self._is_lse_by_task:
            return log_sum_exp.unsqueeze(-1).contiguous()
        by_task = log_sum_exp.new_zeros(call.num_tasks, log_sum_exp.shape[1], call.most_queries, 1)
        task, place = (on_device(rows, log_sum_exp.device) for rows in call.query_places)
        by_task[task, :, place, 0] = taken(log_sum_exp, call.query_rows)
        return by_task

    def _shared(self, call: KernelCall, phase: Phase, scale: float, device: torch.device) -> dict[str, Any]:
        """Arguments of both directions."""
        mask = "padding"
        if phase.causal:
            mask = "padding_causal" if call.keys_are_queries else "padding_causal_bottom_right"
        return {
            "max_seqlen_q": call.most_queries,
            "max_seqlen_kv": call.most_keys,
            "cu_seqlens_q": on_device(call.query_edges, device),
            "cu_seqlens_kv": on_device(call.key_edges, device),
            "cu_seqlens_q_padded": on_device(call.query_starts, device),
            "cu_seqlens_kv_padded": on_device(call.key_starts, device),
            "fused_attention_backend": self._operators.FusedAttnBackend[_BACKEND],
            "attn_scale": scale,
            "attn_mask_type": mask,
            "window_size": window_size(phase),
        }


def _laid_out(key: torch.Tensor, value: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Name of the layout of queries, keys and values; keys and values as it says."""
    num_heads, size = key.shape[1:]
    side_by_side = (
        key.shape == value.shape
        and key.stride() == value.stride() == (2 * num_heads * size, size, 1)
        and key._base is not None
        and key._base is value._base
        and value.storage_offset() == key.storage_offset() + num_heads * size
    )
    if side_by_side:
        return "thd_t2hd", key, value
    return "thd_thd_thd", key.contiguous(), value.contiguous()
