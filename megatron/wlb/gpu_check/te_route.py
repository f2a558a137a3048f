"""Transformer Engine's route to our attention at context-parallel size 2, seen from each rank in turn, in one process.

One GPU cannot be two ranks of NCCL. So both ranks first run without Transformer Engine, and what they send each other
is kept; then each rank runs its own layer, which receives what was kept. The layer is Transformer Engine's own where it
is installed, with a group that says it has two ranks; elsewhere our replacement is called as the layer calls it.

Shapes: T tokens of the pack, N query heads, K key/value heads, H head size of queries and keys, V of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from inspect import Parameter, Signature
from itertools import accumulate
from typing import Any, get_args

import torch
from torch.distributed import ProcessGroup

from megatron.wlb.core_attention import GroupExchanges
from megatron.wlb.environment import TRANSFORMER_ENGINE, has_package
from megatron.wlb.gpu_check.kernels import by_kind
from megatron.wlb.gpu_check.packs import Heads, Tensors, by_rank, draw_pack, in_pack_order
from megatron.wlb.gpu_check.rule import RATIO, error_ratios, with_gradients, within_ratio
from megatron.wlb.packed_seq_params import packed_seq_params
from megatron.wlb.patches import te_context_parallel
from megatron.wlb.patches.registry import applied
from megatron.wlb.te_attention import LayerCommType
from wlb.attention import CommType, KvExchange, Mailbox, all_ranks_attention, dense_attention
from wlb.documents import MicroBatch, documents_from_lengths
from wlb.errors import ConfigError
from wlb.sharding import SHARDERS, ShardCosts, ShardPlan

TE_ROUTE_RULE = (
    f"error <= {RATIO:g} x PyTorch's own in bfloat16, both against float64, and every call of the layer reaches our "
    "executor"
)
CP_SIZE = 2
_NO_KERNEL = "No dot product attention"
# (T/cp, N, H), (T/cp, K, H), (T/cp, K, V), packed: PlannedPackedSeqParams -> (T/cp, N, V)
_Layer = Callable[..., torch.Tensor]


class KeepingMailbox(Mailbox):
    """Keeps a copy of every message."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.kept: dict[tuple[int, int, int], torch.Tensor] = {}

    def leave(self, message: tuple[int, int, int], rows: torch.Tensor) -> None:
        self.kept[message] = rows.clone()
        super().leave(message, rows)


class RepeatingMailbox(Mailbox):
    """Delivers what was kept; what is sent goes nowhere. num_delivered: messages."""

    def __init__(self, kept: dict[tuple[int, int, int], torch.Tensor]) -> None:
        super().__init__(CP_SIZE)
        self._kept = kept
        self.num_delivered = 0

    def leave(self, message: tuple[int, int, int], rows: torch.Tensor) -> None:
        """Nobody collects it."""

    def collect(self, message: tuple[int, int, int]) -> torch.Tensor:
        self.num_delivered += 1
        return self._kept[message]


def check_te_route(
    lengths: Sequence[int], tile_tokens: int, heads_by_kind: dict[str, Heads]
) -> tuple[bool, dict[str, Any]]:
    """Output, dq, dk and dv of the pack, put together from both ranks, by kind of heads and communication type."""
    engine = has_package(TRANSFORMER_ENGINE)

    def check(kind: str, heads: Heads) -> tuple[bool, dict[str, Any]]:
        pack = draw_pack(sum(lengths), heads, seed=9)
        oracle = partial(dense_attention, segments=tuple(accumulate(lengths, initial=0)))
        exact = with_gradients(oracle, *(t.double() for t in pack))
        unit = with_gradients(oracle, *pack)
        plan = SHARDERS["per_document"](lengths, CP_SIZE, ShardCosts(tile_tokens=tile_tokens))
        measured: dict[str, Any] = {}
        passed = True
        for comm_type in get_args(CommType):
            try:
                ours, num_delivered = _with_wide_values(pack, plan, comm_type, heads, engine=engine)
            except ValueError as error:
                # Transformer Engine's sentence where none of its kernels takes such heads with context parallelism.
                if _NO_KERNEL not in str(error):
                    raise
                raise ConfigError(str(error)) from error
            ratios = error_ratios(ours, unit, exact)
            measured[f"{kind}, {comm_type}"] = {**ratios, "messages": num_delivered}
            passed &= within_ratio(ratios) and num_delivered > 0
        return passed, measured

    # A layer's window is Megatron's to set: the tests of the patch have it.
    kinds = {kind: heads for kind, heads in heads_by_kind.items() if heads.window_tokens is None}
    passed, measured = by_kind(kinds, None, check)
    layer = "Transformer Engine's" if engine else "a call as Transformer Engine makes it"
    return passed, {"layer": layer, **measured}


def _with_wide_values(
    pack: Tensors, plan: ShardPlan, comm_type: CommType, heads: Heads, *, engine: bool
) -> tuple[Tensors, int]:
    """As `_both_ranks`, with values as wide as queries: Megatron makes those of packed sequences so, and Transformer
    Engine would for flash-attention 2, whose messages would then be wider than those that were kept."""
    query, key, value, grad = pack
    missing = max(heads.head_size - heads.value_size, 0)
    wide = replace(heads, value_size=heads.value_size + missing)
    widened = (query, key, *(torch.nn.functional.pad(t, (0, missing)) for t in (value, grad)))
    (out, dq, dk, dv), num_delivered = _both_ranks(widened, plan, comm_type, wide, engine=engine)
    return (out[..., : heads.value_size], dq, dk, dv[..., : heads.value_size]), num_delivered


def _both_ranks(
    pack: Tensors, plan: ShardPlan, comm_type: CommType, heads: Heads, *, engine: bool
) -> tuple[Tensors, int]:
    """Output, dq, dk, dv in the order of the pack; messages that the layers received."""
    query, key, value, grad = (by_rank(t, plan) for t in pack)
    leaves = [t.requires_grad_() for tensors in (query, key, value) for t in tensors]
    keeping = KeepingMailbox(CP_SIZE)
    outs = all_ranks_attention(query, key, value, plan, comm_type=comm_type, mailbox=keeping)
    torch.autograd.grad(outs, leaves, grad)
    mailbox = RepeatingMailbox(keeping.kept)
    results = []
    for rank in range(CP_SIZE):
        group = ProcessGroup(rank, CP_SIZE)  # type: ignore[call-arg]
        exchanges = GroupExchanges(make=_exchange_of(mailbox, rank))
        with ExitStack() as stack:
            word = LayerCommType("p2p", comm_type)
            layer = (
                _engine_layer(stack, exchanges, group, word, heads) if engine else _plain_call(exchanges, group, word)
            )
            attention = partial(layer, packed=_packed(plan, rank))
            results.append(with_gradients(attention, query[rank], key[rank], value[rank], grad[rank]))
    return tuple(in_pack_order(shards, plan) for shards in zip(*results, strict=True)), mailbox.num_delivered


def _exchange_of(mailbox: Mailbox, rank: int) -> Callable[[Any], KvExchange]:
    return lambda _group: mailbox.exchange(rank)


def _packed(plan: ShardPlan, rank: int) -> Any:
    positions = torch.from_numpy(plan.position_ids(rank)).cuda()
    micro_batch = MicroBatch(documents=documents_from_lengths(plan.lengths))
    return packed_seq_params(micro_batch, plan, rank, position_ids=positions, max_positions=max(plan.lengths))


def _engine_layer(
    stack: ExitStack, exchanges: GroupExchanges, group: ProcessGroup, word: LayerCommType, heads: Heads
) -> _Layer:
    """Transformer Engine's own attention, the replacement installed as in training."""
    from transformer_engine.pytorch import DotProductAttention

    stack.enter_context(applied([te_context_parallel.make_patch(exchanges, keep_gathered=False)]))
    layer = DotProductAttention(
        heads.num_heads,
        (heads.head_size, heads.value_size),
        num_gqa_groups=heads.num_kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        layer_number=1,
    )
    layer.set_context_parallel_group(group, list(range(CP_SIZE)), torch.cuda.Stream(), word)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any) -> torch.Tensor:
        out = layer(
            query,
            key,
            value,
            cu_seqlens_q=packed.cu_seqlens_q,
            cu_seqlens_kv=packed.cu_seqlens_kv,
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_kv=packed.max_seqlen_kv,
            attn_mask_type="padding_causal",
            pad_between_seqs=False,
        )
        return out.reshape(*query.shape[:2], value.shape[2])

    return attend


def _plain_call(exchanges: GroupExchanges, group: ProcessGroup, word: LayerCommType) -> _Layer:
    """The replacement alone: the 15 arguments by position and the keywords that the callers pass."""
    call = te_context_parallel.make_patch(exchanges, keep_gathered=False).make(_Unplanned())

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any) -> torch.Tensor:
        cu_seqlens, most = packed.cu_seqlens_q, packed.max_seqlen_q
        out: torch.Tensor = call(
            *(True, query, key, value, cu_seqlens, packed.cu_seqlens_kv, most, most, cu_seqlens, cu_seqlens),
            *(0.0, group, list(range(CP_SIZE)), None, word),
            **(_KEYWORDS | {"softmax_scale": query.shape[-1] ** -0.5}),
        )
        return out

    return attend


_KEYWORDS: dict[str, Any] = {
    "softmax_scale": None,
    "qkv_format": "thd",
    "attn_mask_type": "padding_causal",
    "attn_bias_type": "no_bias",
    "attn_bias": None,
    "deterministic": False,
    "use_fused_attention": False,
    "window_size": (-1, 0),
    "fp8": False,
    "fp8_meta": None,
    "quantizers": None,
    "pad_between_seqs": False,
    "use_flash_attn_3": False,
    "softmax_type": "vanilla",
    "softmax_offset": None,
    "fp8_output": False,
    "layer_number": 1,
    "return_max_logit": False,
}


class _Unplanned:
    """Takes the place of Transformer Engine's own function, with its parameters; a call that gets here is a fault."""

    __signature__ = Signature(
        [
            *(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in te_context_parallel.POSITIONAL),
            *(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=d) for name, d in _KEYWORDS.items()),
        ]
    )

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("a call with a plan must not reach Transformer Engine's own context parallelism")
