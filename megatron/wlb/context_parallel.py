"""From Megatron's options to how context-parallel ranks divide a micro-batch and talk to each other."""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import get_args

from wlb.attention import MOST_HEAD_SIZE, CommType
from wlb.sharding import DEFAULT_OPERATIONS_PER_BYTE, ShardCosts, Sharding

_DEFAULT_COMM_TYPE = "all_gather"
_COMM_TYPES = get_args(CommType)


class _NotGiven(list[str]):
    """Megatron's default for `--cp-comm-type`, told apart from the same word on the command line."""


def mark_default_comm_type(parser: argparse.ArgumentParser) -> None:
    """Let `settle_comm_type` see whether the user chose. Does nothing to a parser without Megatron's flags."""
    default = parser.get_default("cp_comm_type")
    if default is not None:
        parser.set_defaults(cp_comm_type=_NotGiven(default))


def settle_comm_type(args: Namespace, *, packed: bool) -> None:
    """Choose where the user did not.

    Packed runs gather: one exchange, and one kernel call against all earlier keys of a span, where a ring computes and
    merges a part for every step. Without packing Megatron's default stays.
    """
    if isinstance(args.cp_comm_type, _NotGiven):
        args.cp_comm_type = [_DEFAULT_COMM_TYPE] if packed else list(args.cp_comm_type)


def sharding_of(args: Namespace, *, name: str, operations_per_byte: float | None) -> Sharding:
    """How every micro-batch of the run is divided."""
    costs = ShardCosts.for_model(
        num_heads=args.num_attention_heads,
        num_kv_heads=_num_kv_heads(args),
        bytes_per_number=2 if args.bf16 or args.fp16 else 4,
        keep_gathered=args.wlb_keep_gathered_kv,
        operations_per_byte=DEFAULT_OPERATIONS_PER_BYTE if operations_per_byte is None else operations_per_byte,
    )
    return Sharding(name=name, cp_size=args.context_parallel_size, costs=costs)


def _num_kv_heads(args: Namespace) -> int:
    grouped = args.group_query_attention and not args.multi_latent_attention
    return int(args.num_query_groups if grouped else args.num_attention_heads)


def shards_transformer_engine(args: Namespace) -> bool:
    """Whether planned calls reach us through Transformer Engine's attention layers."""
    return args.transformer_impl == "transformer_engine" and bool(args.context_parallel_size > 1)


def attention_rules(args: Namespace) -> list[tuple[str, object, bool, str]]:
    """(option, value, whether it is refused, rule): what our attention and its context parallelism cannot do."""
    on_cuda = args.distributed_backend == "nccl"
    window = getattr(args, "window_size", None)
    rules: list[tuple[str, object, bool, str]] = [
        (
            "--hybrid-context-parallel",
            True,
            bool(getattr(args, "hybrid_context_parallel", False)),
            "must be off (it divides samples itself)",
        ),
        (
            "--cp-comm-type",
            " ".join(args.cp_comm_type),
            args.context_parallel_size > 1 and not set(args.cp_comm_type) <= set(_COMM_TYPES),
            f"must be {' or '.join(_COMM_TYPES)}",
        ),
        (
            "--cp-comm-type",
            " ".join(args.cp_comm_type),
            args.context_parallel_size > 1 and len(args.cp_comm_type) not in (1, args.num_layers),
            f"must be one word, or one for each of {args.num_layers} layers",
        ),
    ]
    # Elsewhere Transformer Engine's attention runs, with its own rules.
    if args.transformer_impl == "local" or args.context_parallel_size > 1:
        rules += [
            ("--attention-dropout", args.attention_dropout, args.attention_dropout != 0, "must be 0"),
            (
                "--window-size",
                window,
                window is not None and window[1] != 0,
                "must end in ,0 (a query sees no key behind its own)",
            ),
            ("--softmax-type", args.softmax_type, args.softmax_type != "vanilla", "must be vanilla"),
            (
                "--window-size",
                window,
                window is not None and on_cuda and args.context_parallel_size > 1 and "p2p" in args.cp_comm_type,
                "needs --cp-comm-type all_gather on CUDA",
            ),
            ("--bf16", False, on_cuda and not (args.bf16 or args.fp16), "(or --fp16) must be given on CUDA"),
            ("--qk-clip", True, bool(args.qk_clip), "must be off"),
            ("--log-max-attention-logit", True, bool(args.log_max_attention_logit), "must be off"),
            (
                "--kv-channels",
                _head_size(args),
                on_cuda and _head_size(args) > MOST_HEAD_SIZE,
                f"(with multi-latent attention, the head's parts together) must be <= {MOST_HEAD_SIZE} on CUDA",
            ),
        ]
    if shards_transformer_engine(args):
        rules += _transformer_engine_rules(args)
    return rules


def _transformer_engine_rules(args: Namespace) -> list[tuple[str, object, bool, str]]:
    """With context parallelism; what its layers would refuse in the first step, or hand on to us to refuse."""
    backend = args.attention_backend.name
    with_cp = "with --transformer-impl transformer_engine and context parallelism"
    return [
        (
            "--attention-backend",
            backend,
            backend not in ("auto", "flash", "fused"),
            f"must be auto, flash or fused {with_cp}",
        ),
        ("--fp8-dot-product-attention", True, bool(getattr(args, "fp8_dot_product_attention", False)), "must be off"),
        ("--fp8-multi-head-attention", True, bool(getattr(args, "fp8_multi_head_attention", False)), "must be off"),
    ]


def mean_head_size(args: Namespace) -> int:
    """Of keys and of values: what attention computes for a pair, and what travels of a token, goes by their sum."""
    return (_head_size(args) + int(args.v_head_dim)) // 2 if args.multi_latent_attention else _head_size(args)


def _head_size(args: Namespace) -> int:
    """Of queries and keys."""
    if args.multi_latent_attention:
        return int(args.qk_head_dim + args.qk_pos_emb_head_dim)
    return int(args.kv_channels)
