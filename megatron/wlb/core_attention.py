"""The core attention of packed runs: with context parallelism always, else where Transformer Engine is not used."""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron.wlb.packed_seq_params import PlannedPackedSeqParams
from wlb.attention import CommType, GroupExchange, sharded_attention
from wlb.errors import ConfigError


class PackedCoreAttention(MegatronModule):
    """Takes the place of Megatron's `DotProductAttention`, which refuses packed sequences and context parallelism.

    cp_comm_type: Megatron hands over the word of `--cp-comm-type` for this layer.
    """

    keep_gathered_kv: ClassVar[bool] = False
    """Whether keys and values of other ranks are kept for the backward pass instead of being gathered again."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_others: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout != 0:
            raise ConfigError(f"--attention-dropout must be 0 with --wlb-packing, got {dropout}")
        self.scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels)
        if config.apply_query_key_layer_scaling:
            self.scale /= max(1, layer_number)
        self.window_tokens = _window_tokens(config, layer_number)
        self._comm_type = cast(CommType, cp_comm_type or "all_gather")
        self._exchange = None
        if config.context_parallel_size > 1:
            groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
            self._exchange = GroupExchange(groups.cp)

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
        """(S, N, H), (S, K, H), (S, K, V) -> (S, N * V)."""
        if not isinstance(packed_seq_params, PlannedPackedSeqParams):
            raise TypeError(f"packed_seq_params must come from a plan, got {type(packed_seq_params).__name__}")
        out = sharded_attention(
            query,
            key,
            value,
            packed_seq_params.plan,
            packed_seq_params.cp_rank,
            self._exchange,
            comm_type=self._comm_type,
            scale=self.scale,
            window_tokens=self.window_tokens,
            keep_gathered=self.keep_gathered_kv,
        )
        return out.reshape(out.shape[0], -1)


class KeepingCoreAttention(PackedCoreAttention):
    """Trades memory for communication: see `keep_gathered_kv`."""

    keep_gathered_kv = True


def _window_tokens(config: TransformerConfig, layer_number: int) -> int | None:
    """Keys that a query sees, its own included; None without a limit. Megatron counts the keys before its own."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    assert config.window_size is not None
    before = config.window_size[0]
    return None if before < 0 else before + 1
