"""The core attention of packed runs where Transformer Engine is not used."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn.functional import pad

from megatron.wlb.packed_seq_params import PlannedPackedSeqParams, plan_lost
from wlb.attention import CommType, GroupExchange, KvExchange, sharded_attention
from wlb.errors import ConfigError


class GroupExchanges:
    """The exchanges of a run, one for each context-parallel group.

    Layers ask for theirs while the model is built: all ranks of a group build the same layers in the same order, so
    they make its exchange together, as `GroupExchange` asks, before a step has any message under way.
    """

    def __init__(self, make: Callable[[Any], KvExchange] = GroupExchange) -> None:
        self._make = make
        self._made: dict[Any, KvExchange] = {}

    def of(self, group: dist.ProcessGroup) -> KvExchange:
        """Made in the first call for a group: a collective among its ranks."""
        if group not in self._made:
            self._made[group] = self._make(group)
        return self._made[group]


class PackedCoreAttention(MegatronModule):
    """Takes the place of Megatron's `DotProductAttention`, which refuses packed sequences and context parallelism.

    v_channels: head size of values, where it is not that of keys.
    cp_comm_type: Megatron hands over the word of `--cp-comm-type` for this layer.
    """

    keep_gathered_kv: ClassVar[bool] = False
    """Whether keys and values of other ranks are kept for the backward pass instead of being gathered again."""

    exchanges: ClassVar[GroupExchanges | None] = None
    """Of the run; needed with context parallelism only."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_others: Any,
    ) -> None:
        super().__init__(config=config)
        self._layer_number, self._value_size = layer_number, v_channels
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout != 0:
            raise ConfigError(f"--attention-dropout must be 0 with --wlb-packing, got {dropout}")
        self.scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels)
        # Nothing to do for apply_query_key_layer_scaling: upstream divides scores by the layer's number for the range
        # of fp16, and multiplies by it in the softmax.
        self.window_tokens = window_tokens(config, layer_number)
        self._comm_type = cast(CommType, cp_comm_type or "all_gather")
        self._exchange: KvExchange | None = None
        if config.context_parallel_size > 1:
            groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
            assert self.exchanges is not None
            self._exchange = self.exchanges.of(groups.cp)

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
        """(S, N, H), (S, K, H), (S, K, V) -> (S, N * V).

        Raises:
            PlanLostError: packed_seq_params is not of a planned micro-batch.
        """
        if not isinstance(packed_seq_params, PlannedPackedSeqParams):
            raise plan_lost(f"attention of layer {self._layer_number}", "packed_seq_params", packed_seq_params)
        out = sharded_attention(
            query,
            key,
            without_padding(value, self._value_size),
            packed_seq_params.plan,
            packed_seq_params.cp_rank,
            self._exchange,
            comm_type=self._comm_type,
            scale=self.scale,
            window_tokens=self.window_tokens,
            keep_gathered=self.keep_gathered_kv,
        )
        return with_padding(out, value).reshape(value.shape[0], -1)


def packed_core_attention(exchanges: GroupExchanges, *, keep_gathered_kv: bool) -> type[PackedCoreAttention]:
    """`PackedCoreAttention` with what a run chose, for a layer spec, which holds classes."""
    return type(
        PackedCoreAttention.__name__,
        (PackedCoreAttention,),
        {"exchanges": exchanges, "keep_gathered_kv": keep_gathered_kv},
    )


def without_padding(value: torch.Tensor, size: int | None) -> torch.Tensor:
    """(S, K, V) -> (S, K, size), a view; the same without a size.

    Megatron widens the values of multi-latent attention to the head size of its keys for packed sequences, and so does
    Transformer Engine for flash-attention 2. The zeros behind would travel, and be computed with.
    """
    return value if size is None else value[..., :size]


def with_padding(out: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(S, N, size) -> (S, N, V), zeros behind, as attention of the wide values gives; who widened them trims it."""
    return pad(out, (0, value.shape[-1] - out.shape[-1])) if out.shape[-1] < value.shape[-1] else out


def window_tokens(config: TransformerConfig | Namespace, layer_number: int) -> int | None:
    """Keys that a query sees, its own included; None without a limit. Megatron counts the keys before its own.

    config: or the arguments from which it is made.
    """
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    assert config.window_size is not None
    before = config.window_size[0]
    return None if before < 0 else before + 1
