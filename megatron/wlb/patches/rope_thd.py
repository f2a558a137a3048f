"""megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb

For packed sequences upstream reads the lengths of the documents back from the device and walks over them in Python,
for queries and for keys, in every layer; with fusion, Transformer Engine's kernel finds them. Both assume the zig-zag
layout of context parallelism, and the first takes its table for "one row per packed token" whenever the table happens
to be as long as the pack: every document but the first is then rotated by its position in the pack. (Attention sees
differences of positions only, so without context parallelism that costs precision and no more.) A micro-batch of ours
brings the position of each token: its rows of the table are gathered, once for all layers, and upstream rotates as if
they were a sequence of their own, fused or not. The patch is applied in packed runs only, where a pack without a plan
is one that lost it.
Seam that failed: RoPE is applied inside `SelfAttention.forward`, between the projection and the core attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron.wlb.packed_seq_params import plan_lost, planned_rows
from megatron.wlb.patches.registry import Patch


def _make(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def apply_rotary_pos_emb(
        t: torch.Tensor,
        freqs: torch.Tensor,
        config: Any,
        cu_seqlens: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        rows = planned_rows(cu_seqlens)
        if rows is None:
            if cu_seqlens is not None:
                raise plan_lost(f"rotary embedding{_calling_layer()}", "cu_seqlens", cu_seqlens)
            return original(t, freqs, config, cu_seqlens, *args, **kwargs)
        angles = rows.angles(freqs)  # (P, 1, 1, H) -> (T, 1, 1, H)
        return original(t.unsqueeze(1), angles, config, None, *args, **kwargs).squeeze(1)

    return apply_rotary_pos_emb


def _calling_layer() -> str:
    """Which layer is on the stack, for an error: nothing that is handed over says it. Empty if none is."""
    frame = inspect.currentframe()
    while frame is not None:
        number = getattr(frame.f_locals.get("self"), "layer_number", None)
        if number is not None:
            return f" of layer {number}"
        frame = frame.f_back
    return ""


PATCH = Patch(
    target="megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
    distribution="megatron-core",
    versions=">=0.19.2,<0.20",
    source_digest="6ebc796813c1ef91",
    reason="it synchronises with the device in every layer, and rotates by other positions than the plan's",
    make=_make,
)
