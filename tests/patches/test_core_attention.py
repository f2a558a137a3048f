"""The scale of our core attention is that of Megatron's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.wlb.core_attention import PackedCoreAttention


@pytest.mark.parametrize(("given", "scale"), [(None, 0.25), (0.5, 0.5)])
@pytest.mark.parametrize("scaling", [False, True])
def test_scaling_by_the_layers_number_cancels_out(given: float | None, scale: float, scaling: bool) -> None:
    """Megatron divides scores by it, and its softmax multiplies by it: scores keep their scale, here 1 / sqrt(16)."""
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax

    config: Any = SimpleNamespace(
        attention_dropout=0.0,
        kv_channels=16,
        apply_query_key_layer_scaling=scaling,
        window_size=None,
        window_attn_skip_freq=None,
        context_parallel_size=1,
    )
    number = 5
    layer = PackedCoreAttention(config, number, None, "self", softmax_scale=given)  # type: ignore[arg-type]
    scores = torch.randn(1, 1, 3, 4)
    upstream = FusedScaleMaskSoftmax(
        input_in_fp16=False,
        input_in_bf16=False,
        attn_mask_type=None,
        scaled_masked_softmax_fusion=False,
        mask_func=None,
        softmax_in_fp32=True,
        scale=number if scaling else None,
    )
    divided = scores * scale / (number if scaling else 1)
    torch.testing.assert_close(upstream(divided, None), (scores * layer.scale).softmax(dim=-1))
