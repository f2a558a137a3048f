"""Transformer Engine's attention in packed runs with context parallelism: its layer stays, how ranks talk is ours.

The layer checks shapes, chooses a kernel and hands the call to its context parallelism, one function whose name
`patches/te_context_parallel.py` replaces. This module builds the layers so that every call gets there.
"""

from __future__ import annotations

from typing import Any, cast

from megatron.wlb.core_attention import GroupExchanges
from wlb.attention import CommType


class LayerCommType(str):
    """A communication type for Transformer Engine that also says which of ours a layer uses.

    A layer hands this very object to each of its calls. (Its number would not do: of the two places that call, the one
    for flash-attention leaves it out.)

    planned: of micro-batches that have a plan.
    """

    planned: CommType

    def __new__(cls, for_transformer_engine: str, planned: CommType) -> LayerCommType:
        word = super().__new__(cls, for_transformer_engine)
        word.planned = planned
        return word

    def __getnewargs__(self) -> tuple[str, CommType]:  # type: ignore[override]
        return str(self), self.planned


def planned_te_attention(exchanges: GroupExchanges) -> type[Any]:
    """Megatron's `TEDotProductAttention` for a layer spec; Transformer Engine must be importable."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class PlannedTEDotProductAttention(TEDotProductAttention):
        def __init__(
            self, config: Any, layer_number: int, *args: Any, cp_comm_type: str | None = None, **kwargs: Any
        ) -> None:
            planned = cast(CommType, cp_comm_type or "all_gather")
            word = LayerCommType(_accepted_comm_type(config, layer_number), planned)
            super().__init__(config, layer_number, *args, cp_comm_type=word, **kwargs)
            exchanges.of(self.cp_group)

    return PlannedTEDotProductAttention


def _accepted_comm_type(config: Any, layer_number: int) -> str:
    """With this word Transformer Engine lets a packed sequence through to its context parallelism.

    It refuses all_gather for packed sequences up to 2.17; and since 2.17 p2p for cuDNN under a sliding window, where it
    takes a2a, but for even numbers of heads only.
    """
    from megatron.core.transformer.utils import is_layer_window_attention

    ranks = config.tensor_model_parallel_size
    heads = config.num_attention_heads // ranks
    kv_heads = heads if config.multi_latent_attention else max(config.num_query_groups // ranks, 1)
    windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    return "a2a" if windowed and heads % 2 == kv_heads % 2 == 0 else "p2p"
