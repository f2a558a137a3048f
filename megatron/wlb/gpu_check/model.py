"""A small GPT twice: Megatron's own, given one document at a time, and the packed one. For checks.

Megatron's own is the local layer spec with its stock attention and no packed sequences: nothing of ours runs in
it. In float64 it is the oracle; in bfloat16 it sets the scale of the error that bfloat16 itself makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.wlb.batch import batch_on_device
from megatron.wlb.layer_spec import use_packed_attention
from wlb.data.collate import collate, padded_lengths
from wlb.documents import MicroBatch
from wlb.sharding.plan import unsharded

PADDING_TOKEN = 0

# Transformer Engine keeps a norm's parameters in the linear layer that follows it.
_NORMS_IN_LINEARS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@dataclass(frozen=True, kw_only=True)
class SmallGpt:
    """Sizes of the model.

    init_std: of the weights; large, so that a wrong angle moves the result visibly.
    weight_dtype: weights are rounded to it, whatever the model computes in: a bfloat16 model and its float64
        oracle then hold the same weights.
    ffn_hidden_size, head_size: by default twice the hidden size, and the hidden size over the heads.
    gated: SwiGLU. draw_on_device: fast for a large model, but other weights than another device would draw.
    """

    num_layers: int = 2
    hidden_size: int = 32
    num_heads: int = 4
    num_query_groups: int = 2
    vocab_size: int = 64
    max_positions: int = 64
    position_embedding: Literal["rope", "learned_absolute"] = "rope"
    rotary_interleaved: bool = False
    normalization: str = "RMSNorm"
    init_std: float = 0.25
    weight_dtype: torch.dtype = torch.float32
    seed: int = 1
    ffn_hidden_size: int | None = None
    head_size: int | None = None
    gated: bool = False
    draw_on_device: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a model made of documents.

    logits: (L, V) of each document. loss: sum over all positions. gradients: of the loss, by parameter name.
    """

    logits: tuple[torch.Tensor, ...]
    loss: float
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Relative errors in the 2-norm: of all logits, of all gradients, and of the gradient of the worst parameter."""

    logits: float
    gradients: float
    worst_parameter: float


def stock_gpt(shape: SmallGpt, dtype: torch.dtype) -> GPTModel:
    """Megatron's own model, from its local layer spec and PyTorch's norms."""
    layer = get_gpt_layer_local_spec(normalization=shape.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = WrappedTorchNorm
    return _build(shape, dtype, _block(layer, shape, WrappedTorchNorm), "local")


def packed_gpt(shape: SmallGpt, dtype: torch.dtype, *, transformer_engine: bool) -> GPTModel:
    """The model that packed training builds, with equal weights for equal `shape`."""
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        block = _block(get_gpt_layer_with_transformer_engine_spec(), shape, TENorm)
        model = _build(shape, dtype, block, "transformer_engine")
        if not shape.draw_on_device:
            _copy_weights(stock_gpt(shape, dtype), model)
        return model
    layer = get_gpt_layer_local_spec(normalization=shape.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = WrappedTorchNorm
    use_packed_attention(layer)
    return _build(shape, dtype, _block(layer, shape, WrappedTorchNorm), "local")


def run_one_by_one(model: GPTModel, stored: Sequence[np.ndarray], micro_batch: MicroBatch) -> Outcome:
    """Each document of `micro_batch` through the stock path: no packed sequence, positions from 0, a causal mask.

    stored: token ids of each sequence.
    """
    logits, losses = [], []
    for document in micro_batch.documents:
        span = torch.from_numpy(stored[document.sequence][document.start :][: document.length + 1]).cuda()
        positions = torch.arange(document.length, device=span.device)[None]
        logits.append(model(span[None, :-1], positions, None)[0])  # (1, L, V) -> (L, V)
        losses.append(_loss(logits[-1], span[1:]))
    return _outcome(model, logits, torch.stack(losses).sum())


def run_packed(
    model: GPTModel, stored: Sequence[np.ndarray], micro_batch: MicroBatch, *, pad_to_multiple: int = 1
) -> Outcome:
    """All documents of `micro_batch` in one sequence, as a training step runs them."""
    batch = packed_batch(model, stored, micro_batch, pad_to_multiple=pad_to_multiple)
    output = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=batch["packed_seq_params"])[0]
    real = batch["loss_mask"][0] > 0
    loss = _loss(output[real], batch["labels"][0][real])
    return _outcome(model, output[: micro_batch.num_tokens].split(micro_batch.lengths), loss)


def packed_batch(
    model: GPTModel, stored: Sequence[np.ndarray], micro_batch: MicroBatch, *, pad_to_multiple: int = 1
) -> dict[str, Any]:
    """The batch that training would hand to `model`."""
    plan = unsharded(padded_lengths(micro_batch, pad_to_multiple))
    packed = collate(
        micro_batch,
        lambda sequence, start, count: stored[sequence][start : start + count],
        plan=plan,
        padding_token=PADDING_TOKEN,
        vocab_size=model.vocab_size,
    )
    return batch_on_device(micro_batch, packed, plan, 0, max_positions=model.max_sequence_length)


def difference(outcome: Outcome, exact: Outcome) -> Difference:
    """How far `outcome` is from `exact`, which must have the same documents and parameters."""
    assert outcome.gradients.keys() == exact.gradients.keys(), "the models have different parameters"
    pairs = [(outcome.gradients[name].double(), exact.gradients[name].double()) for name in exact.gradients]
    return Difference(
        logits=relative_error(torch.cat(outcome.logits), torch.cat(exact.logits)),
        gradients=relative_error(*(torch.cat([t.flatten() for t in side]) for side in zip(*pairs, strict=True))),
        worst_parameter=max(relative_error(*pair) for pair in pairs),
    )


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """2-norm of the difference over that of `exact`, in float64."""
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def _block(layer: Any, shape: SmallGpt, norm: Any) -> TransformerBlockSubmodules:
    return TransformerBlockSubmodules(layer_specs=[layer] * shape.num_layers, layer_norm=norm)


def _build(shape: SmallGpt, dtype: torch.dtype, block: TransformerBlockSubmodules, implementation: str) -> GPTModel:
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size or 2 * shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_size,
        **({"gated_linear_unit": True, "activation_func": torch.nn.functional.silu} if shape.gated else {}),
        add_bias_linear=not shape.gated,
        normalization=shape.normalization,
        rotary_interleaved=shape.rotary_interleaved,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=shape.init_std,
        use_cpu_initialization=not shape.draw_on_device,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        apply_rope_fusion=implementation == "transformer_engine",
        transformer_impl=implementation,
    )
    # Drawn on the CPU in float32: equal seeds give equal weights on every device and in every precision.
    model_parallel_cuda_manual_seed(shape.seed)
    torch.manual_seed(shape.seed)
    model = GPTModel(
        config,
        block,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        position_embedding_type=shape.position_embedding,
        share_embeddings_and_output_weights=False,
    )
    # Also what was drawn on the device: PyTorch's norms keep float32 otherwise.
    return (model if shape.draw_on_device else model.to(shape.weight_dtype)).to(dtype).cuda()


def _copy_weights(source: GPTModel, target: GPTModel) -> None:
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(weights.pop(_stock_name(name)))
    assert not weights, f"parameters without a counterpart: {sorted(weights)}"


def _stock_name(name: str) -> str:
    for inside, outside in _NORMS_IN_LINEARS.items():
        name = name.replace(inside, outside)
    return name


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of cross entropies, in float64: Megatron's own goes through float32."""
    return torch.nn.functional.cross_entropy(logits.double(), labels, reduction="sum")


def _outcome(model: GPTModel, logits: Sequence[torch.Tensor], loss: torch.Tensor) -> Outcome:
    names, parameters = zip(*model.named_parameters(), strict=True)
    model.zero_grad(set_to_none=True)
    loss.backward()
    gradients = {_stock_name(n): p.grad.detach().clone() for n, p in zip(names, parameters, strict=True)}
    return Outcome(logits=tuple(t.detach() for t in logits), loss=float(loss.detach()), gradients=gradients)
