"""cuDNN's operators as Transformer Engine has them, by release: see `attention_operators`."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from tests.harness.attention_operators import NAN, Calls, Task, check_sizes, offset_tasks, poisoned, with_parameters

_FORWARD = (
    "is_training max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v fake_dtype fused_attention_backend "
    "attn_bias cu_seqlens_q_padded cu_seqlens_kv_padded page_table_k page_table_v s_quantizer o_quantizer attn_scale "
    "dropout fast_zero_fill qkv_layout {formats}attn_bias_type attn_mask_type softmax_type window_size {diagonal}"
    "rng_gen softmax_offset return_max_logit{graph}"
)
_BACKWARD = (
    "max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v o d_o fake_dtype {dtype}aux_ctx_tensors "
    "fused_attention_backend cu_seqlens_q_padded cu_seqlens_kv_padded s_quantizer dp_quantizer dqkv_quantizer "
    "attn_scale dropout fast_zero_fill qkv_layout {formats}attn_bias_type attn_mask_type softmax_type window_size "
    "{diagonal}deterministic{graph}"
)
_NEW: dict[str, str] = {"diagonal": "bottom_right_diagonal ", "graph": " cuda_graph"}
_OLDEST = {"diagonal": "", "graph": ""}
_LATEST = (
    (_FORWARD.format(formats="o_format qkv_scale_inv_format ", **_NEW), 10),
    (
        _BACKWARD.format(
            dtype="", formats="o_format do_format dqkv_layout qkv_scale_inv_format do_scale_inv_format ", **_NEW
        ),
        12,
    ),
)
ENGINE_PARAMETERS: dict[str, tuple[tuple[str, int], tuple[str, int]]] = {
    "2.9.0": (
        (_FORWARD.format(formats="", **_OLDEST), 10),
        (_BACKWARD.format(dtype="dqkv_dtype ", formats="", **_OLDEST), 13),
    ),
    "2.13.0": (
        (_FORWARD.format(formats="", **_NEW), 10),
        (_BACKWARD.format(dtype="dqkv_dtype ", formats="", **_NEW), 13),
    ),
    "2.17.1": _LATEST,
    "2.19.0": _LATEST,
    "2.20.2": _LATEST,
}
"""As `FLASH2_PARAMETERS`; compared with the wheels by tests/patches."""

_ENGINE_DEFAULTS = {"o_format": "sbhd", "do_format": "sbhd", "dqkv_layout": "sbh3d", "window_size": (-1, -1)}
_DIAGONALS = {"padding": None, "padding_causal": False, "padding_causal_bottom_right": True}


def engine_operators(
    release: str, calls: Calls, *, is_lse_by_task: bool = False, top_left: bool = False
) -> SimpleNamespace:
    """Of `transformer_engine.pytorch.cpp_extensions.fused_attn`.

    is_lse_by_task: as cuDNN before 9.6 lays out the log-sum-exp.
    top_left: as if it had no mask that counts from the bottom right.
    """
    has_formats = "o_format" in ENGINE_PARAMETERS[release][0][0].split()

    def tasks(a: Mapping[str, Any]) -> list[tuple[int, Task]]:
        bottom_right = _DIAGONALS[a["attn_mask_type"]]
        window = a.get("window_size", (-1, -1))
        assert window[1] == (-1 if bottom_right is None else 0)
        assert a["fused_attention_backend"] == "arbitrary"
        assert a["cu_seqlens_q"].is_contiguous()
        starts = (a["cu_seqlens_q_padded"], a["cu_seqlens_kv_padded"])
        lengths = tuple(a[f"cu_seqlens_{x}"].diff() for x in ("q", "kv"))
        assert (starts[1][:-1] + lengths[1] <= starts[1][1:]).all(), "nothing says that two tasks may share keys"
        longest = (a["max_seqlen_q"], a["max_seqlen_kv"])
        mask = {
            "window": window,
            "is_causal": bottom_right is not None,
            "from_bottom_right": bool(bottom_right) and not top_left,
            "scale": a["attn_scale"],
        }
        return offset_tasks(a["q"], a["k"], starts, lengths, longest, **mask)

    def check_layout(a: Mapping[str, Any], layout: str) -> None:
        q, k, v = a["q"], a["k"], a["v"]
        check_sizes(q, k, v)
        assert q.is_contiguous()
        assert a["fake_dtype"] == q.dtype
        if layout == "thd_t2hd":
            assert k.shape == v.shape
            assert k.stride() == v.stride() == (2 * k.shape[1] * k.shape[2], k.shape[2], 1)
            assert v.data_ptr() - k.data_ptr() == k.shape[1] * k.shape[2] * k.element_size()
        else:
            assert layout == "thd_thd_thd"
            assert k.is_contiguous()
            assert v.is_contiguous()

    def sizes(a: Mapping[str, Any]) -> tuple[int, int, int]:
        return len(a["cu_seqlens_q"]) - 1, a["max_seqlen_q"], a["max_seqlen_kv"]

    def forward(a: Mapping[str, Any]) -> Any:
        q, k, v = a["q"], a["k"], a["v"]
        check_layout(a, a["qkv_layout"])
        assert a["is_training"]
        if has_formats:
            assert a.get("o_format", _ENGINE_DEFAULTS["o_format"]) == "thd"
        calls.add("forward", sizes(a), q, k)
        out = q.new_full((*q.shape[:2], v.shape[-1]), NAN)
        num_tasks, longest, _ = sizes(a)
        stats = q.new_full((num_tasks, q.shape[1], longest, 1) if is_lse_by_task else (len(q), q.shape[1], 1), NAN)
        for number, task in tasks(a):
            out[task.queries], lse = task.attend(q, k, v)
            if is_lse_by_task:
                stats[number, :, : lse.shape[1], 0] = lse
            else:
                stats[task.queries, :, 0] = lse.T
        return out, [stats, torch.zeros(2, dtype=torch.int64)]

    def backward(a: Mapping[str, Any]) -> Any:
        q, k, v = a["q"], a["k"], a["v"]
        check_layout(a, a["qkv_layout"])
        assert a["o"].is_contiguous()
        assert a["d_o"].is_contiguous()
        if has_formats:
            given = {name: a.get(name, _ENGINE_DEFAULTS[name]) for name in ("o_format", "do_format", "dqkv_layout")}
            assert given == {"o_format": "thd", "do_format": "thd", "dqkv_layout": a["qkv_layout"]}
        else:
            assert a["dqkv_dtype"] == f"code of {q.dtype}"
        stats, state = a["aux_ctx_tensors"]
        assert state.shape == (2,)
        num_tasks, longest, _ = sizes(a)
        assert stats.is_contiguous()
        assert stats.shape == ((num_tasks, q.shape[1], longest, 1) if is_lse_by_task else (len(q), q.shape[1], 1))
        calls.add("backward", sizes(a), q, k, a["deterministic"])
        if a["qkv_layout"] == "thd_t2hd":
            both = k.new_full((len(k), 2, *k.shape[1:]), NAN)
            grads = (*poisoned(q), both[:, 0], both[:, 1])
        else:
            grads = poisoned(q, k, v)
        for number, task in tasks(a):
            rows = task.queries.stop - task.queries.start
            lse = stats[number, :, :rows, 0] if is_lse_by_task else stats[task.queries, :, 0].T
            task.write_gradients(grads, a["d_o"], q, k, v, a["o"], lse)
        return (*grads, None, None)

    forward_parameters, backward_parameters = ENGINE_PARAMETERS[release]
    return SimpleNamespace(
        fused_attn_fwd=with_parameters(*forward_parameters, forward),
        fused_attn_bwd=with_parameters(*backward_parameters, backward),
        FusedAttnBackend={"F16_arbitrary_seqlen": "arbitrary"},
    )


class EngineDtypes:
    """Codes of dtypes."""

    def __getitem__(self, dtype: torch.dtype) -> str:
        return f"code of {dtype}"
