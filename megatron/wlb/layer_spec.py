"""The layer spec of a packed run: Megatron's own, with an attention that follows the plan where its own cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron.wlb.core_attention import GroupExchanges, PackedCoreAttention, packed_core_attention
from megatron.wlb.te_attention import planned_te_attention


def packed_layer_spec(
    exchanges: GroupExchanges, *, keep_gathered_kv: bool
) -> Callable[[GPTModelConfig, int | None], ModuleSpec | TransformerBlockSubmodules]:
    """A `transformer_layer_spec` of `GPTModelConfig`.

    Without context parallelism Transformer Engine's attention takes our packed sequences as it is. With it, its layer
    stays, built so that its calls reach `patches/te_context_parallel.py`. Megatron's own attention takes none.
    """

    def spec(config: GPTModelConfig, vp_stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
        layers = default_layer_spec(config, vp_stage)
        transformer_engine = config.transformer.transformer_impl == "transformer_engine"
        sharded = config.transformer.context_parallel_size > 1
        if transformer_engine and sharded:
            use_core_attention(layers, planned_te_attention(exchanges))
        elif config.transformer.transformer_impl == "local" or sharded:
            use_core_attention(layers, packed_core_attention(exchanges, keep_gathered_kv=keep_gathered_kv))
        return layers

    return spec


def use_packed_attention(spec: ModuleSpec | TransformerBlockSubmodules) -> None:
    """Put our core attention, for one context-parallel rank, into every layer of a spec."""
    use_core_attention(spec, PackedCoreAttention)


def use_core_attention(spec: ModuleSpec | TransformerBlockSubmodules, core_attention: type[Any]) -> None:
    """Put a core attention into every layer of a spec."""
    layers: list[Any] = spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else [spec]
    for layer in layers:
        layer.submodules.self_attention.submodules.core_attention = core_attention
