"""The operators of flash-attn 2 and 3 by release: see `attention_operators`.

Parameters of 2.6, 2.8, 3.0 and the beta of 3 are those of their sources. Of 2.5 no source was at hand: its are what
Transformer Engine passes to such releases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.harness.attention_operators import (
    NAN,
    Calls,
    Task,
    check_sizes,
    offset_tasks,
    packed_tasks,
    poisoned,
    with_parameters,
)

_FLASH2_FORWARD = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal"
_FLASH2_BACKWARD = "dout q k v out softmax_lse dq dk dv" + _FLASH2_FORWARD.removeprefix("q k v")
_TWO_SIZES = "window_size_left window_size_right"
FLASH2_PARAMETERS: dict[str, tuple[tuple[str, int], tuple[str, int]]] = {
    "2.5": (
        (f"{_FLASH2_FORWARD} window_size alibi_slopes return_softmax block_table", 13),
        (f"{_FLASH2_BACKWARD} window_size alibi_slopes deterministic rng_state", 19),
    ),
    "2.6": (
        (f"{_FLASH2_FORWARD} window_size softcap alibi_slopes return_softmax block_table leftpad_k seqused_k", 14),
        (f"{_FLASH2_BACKWARD} window_size softcap alibi_slopes deterministic rng_state", 20),
    ),
    "2.8": (
        (
            f"{_FLASH2_FORWARD} {_TWO_SIZES} softcap alibi_slopes return_softmax block_table leftpad_k seqused_k "
            "zero_tensors",
            10,
        ),
        (f"{_FLASH2_BACKWARD} {_TWO_SIZES} softcap alibi_slopes deterministic rng_state zero_tensors", 21),
    ),
}
"""Names in order, and how many have no default: of the forward and of the backward operator."""


def flash2_operators(release: str, calls: Calls) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Of `flash_attn.flash_attn_interface`."""
    is_lse_by_task = release == "2.5"

    def tasks(a: Mapping[str, Any]) -> list[tuple[int, Task]]:
        longest = (a["max_seqlen_q"], a["max_seqlen_k"])
        window = a["window_size"] if "window_size" in a else (a["window_size_left"], a["window_size_right"])
        assert a["dropout_p"] == a.get("softcap", 0.0) == 0.0
        edges = (a["cu_seqlens_q"], a["cu_seqlens_k"])
        return packed_tasks(
            a["q"], a["k"], *edges, longest, window=window, is_causal=a["causal"], scale=a["softmax_scale"]
        )

    def forward(a: Mapping[str, Any]) -> Any:
        q, k, v = a["q"], a["k"], a["v"]
        check_sizes(q, k, v)
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        num_tasks = len(a["cu_seqlens_q"]) - 1
        calls.add("forward", (num_tasks, a["max_seqlen_q"], a["max_seqlen_k"]), q, k)
        (out,) = poisoned(q)
        shape = (num_tasks, q.shape[1], a["max_seqlen_q"]) if is_lse_by_task else (q.shape[1], len(q))
        lse = q.new_full(shape, NAN)
        for number, task in tasks(a):
            out[task.queries], each = task.attend(q, k, v)
            if is_lse_by_task:
                lse[number, :, : each.shape[1]] = each
            else:
                lse[:, task.queries] = each
        state, mask = torch.zeros(2, dtype=torch.int64), q.new_empty(0)
        unpadded = out.new_full((), NAN)
        return (out, lse, mask, state) if release == "2.8" else (unpadded, q, k, v, out, lse, mask, state)

    def backward(a: Mapping[str, Any]) -> Any:
        q, k, v, lse = a["q"], a["k"], a["v"], a["softmax_lse"]
        check_sizes(q, k, v, a["dout"], a["out"])
        assert lse.is_contiguous()
        num_tasks = len(a["cu_seqlens_q"]) - 1
        calls.add("backward", (num_tasks, a["max_seqlen_q"], a["max_seqlen_k"]), q, k, a["deterministic"])
        assert lse.shape == ((num_tasks, q.shape[1], a["max_seqlen_q"]) if is_lse_by_task else (q.shape[1], len(q)))
        grads = a["dq"], a["dk"], a["dv"]
        for grad in grads:
            assert grad.is_contiguous()
            grad.fill_(NAN)
        for number, task in tasks(a):
            rows = task.queries.stop - task.queries.start
            each = lse[number, :, :rows] if is_lse_by_task else lse[:, task.queries]
            task.write_gradients(grads, a["dout"], q, k, v, a["out"], each)
        return q.new_empty(0)

    return tuple(  # type: ignore[return-value]
        with_parameters(*parameters, body)
        for parameters, body in zip(FLASH2_PARAMETERS[release], (forward, backward), strict=True)
    )


_FLASH3_FORWARD = (
    "q k v k_new v_new qv {out} cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q "
    "max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale "
    "softmax_scale causal {window} attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa "
    "sm_margin"
)
_FLASH3_BACKWARD = (
    "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q max_seqlen_k dq dk dv "
    "softmax_scale {causal} {window} softcap deterministic sm_margin"
)
_SERVING = (
    *("k_new", "v_new", "qv", "out", "out_", "cu_seqlens_k_new", "page_table", "kv_batch_idx", "leftpad_k"),
    *("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
)
FLASH3_PARAMETERS: dict[str, tuple[tuple[str, int], tuple[str, int]]] = {
    "beta": (
        (_FLASH3_FORWARD.format(out="out", window="window_size"), 25),
        (_FLASH3_BACKWARD.format(causal="causal", window="window_size"), 17),
    ),
    "3.0": (
        (_FLASH3_FORWARD.format(out="out_", window=_TWO_SIZES), 3),
        (_FLASH3_BACKWARD.format(causal="is_causal", window=_TWO_SIZES), 6),
    ),
}
"""As `FLASH2_PARAMETERS`."""


def flash3_operators(release: str, calls: Calls) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Of `flash_attn_interface`."""

    def tasks(a: Mapping[str, Any], used: str, causal: str) -> list[tuple[int, Task]]:
        starts = (a["cu_seqlens_q"], a["cu_seqlens_k"])
        lengths = (a[f"{used}_q"], a[f"{used}_k"])
        longest = (a["max_seqlen_q"], a["max_seqlen_k"])
        window = a["window_size"] if "window_size" in a else (a["window_size_left"], a["window_size_right"])
        mask = {"window": window, "is_causal": a[causal], "from_bottom_right": True, "scale": a["softmax_scale"]}
        return offset_tasks(a["q"], a["k"], starts, lengths, longest, **mask)

    def forward(a: Mapping[str, Any]) -> Any:
        q, k, v = a["q"], a["k"], a["v"]
        check_sizes(q, k, v)
        assert q.shape[-1] == v.shape[-1] or (128 < q.shape[-1] <= 192 and 96 < v.shape[-1] <= 128)
        assert all(a.get(name) is None for name in _SERVING)
        calls.add("forward", (len(a["seqused_q"]), a["max_seqlen_q"], a["max_seqlen_k"]), q, k)
        out, lse = q.new_full((*q.shape[:2], v.shape[-1]), NAN), q.new_full((q.shape[1], len(q)), NAN)
        for _, task in tasks(a, "seqused", "causal"):
            out[task.queries], lse[:, task.queries] = task.attend(q, k, v)
        return out, lse, q.new_empty(0), q.new_empty(0)

    def backward(a: Mapping[str, Any]) -> Any:
        q, k, v, lse = a["q"], a["k"], a["v"], a["softmax_lse"]
        check_sizes(q, k, v, a["dout"], a["out"])
        assert q.shape[-1] == v.shape[-1], "the beta checks for one head size"
        sizes = (len(a["sequed_q"]), a["max_seqlen_q"], a["max_seqlen_k"])
        calls.add("backward", sizes, q, k, a["deterministic"])
        assert lse.shape == (q.shape[1], len(q))
        assert lse.is_contiguous()
        grads = a["dq"], a["dk"], a["dv"]
        for grad, like in zip(grads, (q, k, v), strict=True):
            assert grad.shape == like.shape
            assert grad.is_contiguous()
            grad.fill_(NAN)
        for _, task in tasks(a, "sequed", "is_causal" if release == "3.0" else "causal"):
            task.write_gradients(grads, a["dout"], q, k, v, a["out"], lse[:, task.queries])
        return q.new_empty(0)

    return tuple(  # type: ignore[return-value]
        with_parameters(*parameters, body)
        for parameters, body in zip(FLASH3_PARAMETERS[release], (forward, backward), strict=True)
    )
