"""Packed attention on one rank for the GPU check: each kernel of ours, and the one in Transformer Engine's layers.

Shapes: T tokens of the pack, N query heads, K key/value heads, H head size of queries and keys, V of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnMaskType

from megatron.wlb.gpu_check.kernels import by_kind
from megatron.wlb.gpu_check.model import SmallGpt, packed_gpt
from megatron.wlb.gpu_check.packs import Heads, draw_pack
from megatron.wlb.gpu_check.rule import Attention, error_ratios, with_gradients, within_ratio
from megatron.wlb.packed_seq_params import packed_seq_params
from wlb.attention import dense_attention, sharded_attention
from wlb.documents import MicroBatch, documents_from_lengths
from wlb.errors import ConfigError
from wlb.sharding.plan import unsharded


def check_attention(
    lengths: Sequence[int], heads_by_kind: dict[str, Heads], *, kernel: str | None
) -> tuple[bool, dict[str, Any]]:
    """Output and gradients for every kind of heads; documents do not see each other.

    kernel: one of ours, or None for Transformer Engine's.
    """

    def check(kind: str, heads: Heads) -> tuple[bool, dict[str, Any]]:
        attention = _engine(lengths, heads) if kernel is None else _ours(lengths, heads, kernel)
        ratios, independent = _ratios(attention, lengths, heads)
        return independent and within_ratio(ratios), {kind: {**ratios, "independent": independent}}

    return by_kind(heads_by_kind, kernel, check)


def layer_attention(model: GPTModel, lengths: Sequence[int]) -> Attention:
    """The attention of the first layer of `model` on documents of these lengths."""
    micro_batch = MicroBatch(documents=documents_from_lengths(lengths))
    plan = unsharded(tuple(lengths))
    positions = torch.from_numpy(plan.position_ids(0)).cuda()
    packed = packed_seq_params(micro_batch, plan, 0, position_ids=positions, max_positions=max(lengths))
    core = model.decoder.layers[0].self_attention.core_attention

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = core(query, key, value, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed)
        return out.reshape(*query.shape[:2], value.shape[2])

    return attention


def _ours(lengths: Sequence[int], heads: Heads, kernel: str) -> Attention:
    return partial(
        sharded_attention,
        plan=unsharded(tuple(lengths)),
        rank=0,
        exchange=None,
        comm_type="all_gather",
        window_tokens=heads.window_tokens,
        kernel=kernel,
    )


def _engine(lengths: Sequence[int], heads: Heads) -> Attention:
    """Through Megatron's own layer spec; its heads have one size and see all keys before them."""
    if heads.head_size != heads.value_size or heads.window_tokens is not None:
        raise ConfigError("a GPT layer has heads of one size and no window here: sharded attention checks the others")
    shape = SmallGpt(
        num_heads=heads.num_heads,
        num_query_groups=heads.num_kv_heads,
        hidden_size=heads.num_heads * heads.head_size,
        max_positions=max(lengths),
    )
    return layer_attention(packed_gpt(shape, torch.bfloat16, transformer_engine=True), lengths)


def _ratios(attention: Attention, lengths: Sequence[int], heads: Heads) -> tuple[dict[str, float], bool]:
    """Errors of output, dq, dk, dv over PyTorch's own; whether another document 0 leaves all other output rows."""
    pack = draw_pack(sum(lengths), heads, seed=9)
    query, key, value, _ = pack
    segments = tuple(accumulate(lengths, initial=0))
    oracle = partial(dense_attention, segments=segments, window_tokens=heads.window_tokens)
    exact = with_gradients(oracle, *(t.double() for t in pack))
    unit = with_gradients(oracle, *pack)
    ours = with_gradients(attention, *pack)
    with torch.no_grad():
        after = attention(query, key, torch.cat((-value[: lengths[0]], value[lengths[0] :])))
    return error_ratios(ours, unit, exact), torch.equal(after[lengths[0] :], ours[0][lengths[0] :])
