"""From Megatron's options to how context-parallel ranks divide a micro-batch and talk to each other."""

from __future__ import annotations

import argparse
from argparse import Namespace

from wlb.sharding import DEFAULT_OPERATIONS_PER_BYTE, ShardCosts, Sharding

_DEFAULT_COMM_TYPE = "all_gather"


class _NotGiven(list[str]):
    """Megatron's default for `--cp-comm-type`, told apart from the same word on the command line."""


def mark_default_comm_type(parser: argparse.ArgumentParser) -> None:
    """Let `settle_comm_type` see whether the user chose. Does nothing to a parser without Megatron's flags."""
    default = parser.get_default("cp_comm_type")
    if default is not None:
        parser.set_defaults(cp_comm_type=_NotGiven(default))


def settle_comm_type(args: Namespace, *, packed: bool) -> None:
    """Choose where the user did not.

    Packed runs gather: one message, and one kernel call a span against contiguous keys, where a ring computes and
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
        operations_per_byte=DEFAULT_OPERATIONS_PER_BYTE if operations_per_byte is None else operations_per_byte,
    )
    return Sharding(name=name, cp_size=args.context_parallel_size, costs=costs)


def _num_kv_heads(args: Namespace) -> int:
    grouped = args.group_query_attention and not args.multi_latent_attention
    return int(args.num_query_groups if grouped else args.num_attention_heads)
