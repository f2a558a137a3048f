"""The core attention of the local layer spec: packed documents, where Transformer Engine is not used."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.wlb.packed_seq_params import PlannedPackedSeqParams
from wlb.attention import packed_attention
from wlb.errors import ConfigError


class PackedCoreAttention(MegatronModule):
    """Takes the place of Megatron's `DotProductAttention`, which refuses packed sequences."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_others: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout != 0:
            raise ConfigError(f"--attention-dropout must be 0 with --wlb-packing, got {dropout}")
        self.scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels)
        if config.apply_query_key_layer_scaling:
            self.scale /= max(1, layer_number)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PlannedPackedSeqParams | None = None,
    ) -> torch.Tensor:
        """(T, N, H), (T, K, H), (T, K, H) -> (T, N * H)."""
        if not isinstance(packed_seq_params, PlannedPackedSeqParams):
            raise TypeError(f"packed_seq_params must come from a plan, got {type(packed_seq_params).__name__}")
        out = packed_attention(
            query,
            key,
            value,
            packed_seq_params.segments,
            cu_seqlens=packed_seq_params.cu_seqlens_q,
            max_seqlen=packed_seq_params.max_seqlen_q,
            scale=self.scale,
        )
        return out.reshape(out.shape[0], -1)
