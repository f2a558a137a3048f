"""The layer spec of a packed run: Megatron's own, with our core attention where it has none for packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron.wlb.core_attention import KeepingCoreAttention, PackedCoreAttention


def packed_layer_spec(
    *, keep_gathered_kv: bool
) -> Callable[[GPTModelConfig, int | None], ModuleSpec | TransformerBlockSubmodules]:
    """A `transformer_layer_spec` of `GPTModelConfig`.

    Without context parallelism Transformer Engine's attention takes our packed sequences as it is. With it, its
    attention knows no split but its own, so ours takes its place there as well.
    """
    core_attention = KeepingCoreAttention if keep_gathered_kv else PackedCoreAttention

    def spec(config: GPTModelConfig, vp_stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
        layers = default_layer_spec(config, vp_stage)
        if config.transformer.transformer_impl == "local" or config.transformer.context_parallel_size > 1:
            use_packed_attention(layers, core_attention)
        return layers

    return spec


def use_packed_attention(
    spec: ModuleSpec | TransformerBlockSubmodules, core_attention: type[PackedCoreAttention] = PackedCoreAttention
) -> None:
    """Put our core attention into every layer of a spec."""
    layers: list[Any] = spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else [spec]
    for layer in layers:
        layer.submodules.self_attention.submodules.core_attention = core_attention
