"""megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd

Upstream walks the documents in Python with a device synchronisation in every layer, and takes its table for
"one row per packed token" whenever the table happens to be as long as the pack, which rotates every document
but the first by the wrong angles. A micro-batch of ours brings the position of each token, so one gather does.
Seam that failed: RoPE is applied inside `SelfAttention.forward`, between the projection and the core attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.wlb.packed_seq_params import POSITIONS_ATTRIBUTE
from megatron.wlb.patches.registry import Patch


def _make(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    from megatron.core.models.common.embeddings import rope_utils

    def apply_rotary_pos_emb_thd(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        rotary_interleaved: bool = False,
        mla_rotary_interleaved: bool = False,
        mscale: float = 1.0,
        **others: Any,
    ) -> torch.Tensor:
        rotation: dict[str, Any] = {
            "rotary_interleaved": rotary_interleaved,
            "mla_rotary_interleaved": mla_rotary_interleaved,
            "mscale": mscale,
        }
        positions = getattr(cu_seqlens, POSITIONS_ATTRIBUTE, None)
        if positions is None:
            return original(t, cu_seqlens, freqs, **rotation, **others)
        angles = freqs[positions]  # (P, 1, 1, H) -> (T, 1, 1, H)
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, **rotation).squeeze(1)

    return apply_rotary_pos_emb_thd


PATCH = Patch(
    target="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
    distribution="megatron-core",
    versions=">=0.19.2,<0.20",
    source_digest="99798acffbb2e50c",
    reason="documents after the first of a pack are rotated by wrong angles when the table is as long as the pack",
    make=_make,
)
