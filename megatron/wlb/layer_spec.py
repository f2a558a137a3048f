"""The layer spec of a packed run: Megatron's own, with our core attention where there is no Transformer Engine."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron.wlb.core_attention import PackedCoreAttention


def packed_layer_spec(config: GPTModelConfig, vp_stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    """A `transformer_layer_spec` of `GPTModelConfig`.

    Transformer Engine's attention takes our packed sequences as it is.
    """
    spec = default_layer_spec(config, vp_stage)
    if config.transformer.transformer_impl == "local":
        use_packed_attention(spec)
    return spec


def use_packed_attention(spec: ModuleSpec | TransformerBlockSubmodules) -> None:
    """Put our core attention into every layer of a local spec."""
    layers: list[Any] = spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else [spec]
    for layer in layers:
        layer.submodules.self_attention.submodules.core_attention = PackedCoreAttention
