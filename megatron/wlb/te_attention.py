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

    planned: of micro-batches that have a plan, as all must that reach a layer with such a word.
    layer_number: for errors; None if it is not known.
    value_size: head size of the layer's values, which may come with zeros behind; None if it is not known.
    """

    planned: CommType
    layer_number: int | None
    value_size: int | None

    def __new__(
        cls,
        for_transformer_engine: str,
        planned: CommType,
        layer_number: int | None = None,
        value_size: int | None = None,
    ) -> LayerCommType:
        word = super().__new__(cls, for_transformer_engine)
        word.planned, word.layer_number, word.value_size = planned, layer_number, value_size
        return word

    def __getnewargs__(self) -> tuple[str, CommType, int | None, int | None]:  # type: ignore[override]
        return str(self), self.planned, self.layer_number, self.value_size


def planned_te_attention(exchanges: GroupExchanges) -> type[Any]:
    """Megatron's `TEDotProductAttention` for a layer spec; Transformer Engine must be importable."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class PlannedTEDotProductAttention(TEDotProductAttention):
        def __init__(
            self, config: Any, layer_number: int, *args: Any, cp_comm_type: str | None = None, **kwargs: Any
        ) -> None:
            planned = cast(CommType, cp_comm_type or "all_gather")
            accepted = _accepted_comm_type(config, layer_number)
            word = LayerCommType(accepted, planned, layer_number, kwargs.get("v_channels"))
            super().__init__(config, layer_number, *args, cp_comm_type=word, **kwargs)
            exchanges.of(self.cp_group)

    return PlannedTEDotProductAttention


def _accepted_comm_type(config: Any, layer_number: int) -> str:
    """With this word Transformer Engine lets a packed sequence through to its context parallelism.

    It refuses all_gather for packed sequences up to 2.19; and since 2.17 p2p for cuDNN under a sliding window, where it
    takes a2a, but for even numbers of heads only.
    """
    from megatron.core.transformer.utils import is_layer_window_attention

    ranks = config.tensor_model_parallel_size
    heads = config.num_attention_heads // ranks
    kv_heads = heads if config.multi_latent_attention else max(config.num_query_groups // ranks, 1)
    windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    return "a2a" if windowed and heads % 2 == kv_heads % 2 == 0 else "p2p"
