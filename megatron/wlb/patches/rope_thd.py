"""megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd

Upstream reads the lengths of the documents back from the device and walks over them in Python, for queries and for
keys, in every layer. It assumes the zig-zag layout of context parallelism, and it takes its table for "one row per
packed token" whenever the table happens to be as long as the pack: every document but the first is then rotated by
its position in the pack. (Attention sees differences of positions only, so without context parallelism that costs
precision and no more.) A micro-batch of ours brings the position of each token, so one gather does.
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
    reason="it synchronises with the device in every layer, and rotates by other positions than the plan's",
    make=_make,
)
