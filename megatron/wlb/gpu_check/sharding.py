"""Sharded attention for the GPU check: all context-parallel ranks in this process, every sharder, both exchanges.

What is checked is what training runs: the same plans, generators and kernels; only the rows that ranks send each other
are copied on the device instead.

Shapes: T tokens of the pack, N query heads, K key/value heads, H head size of queries and keys, V of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, get_args

import torch

from megatron.wlb.gpu_check.kernels import by_kind, kernel_of
from megatron.wlb.gpu_check.packs import Heads, Tensors, by_rank, draw_pack, in_pack_order
from megatron.wlb.gpu_check.rule import (
    RATIO,
    RESULTS,
    attention_by_chunks,
    error_ratios,
    with_gradients,
    within_ratio,
)
from wlb.attention import CommType, Mailbox, all_ranks_attention, dense_attention, sharded_attention
from wlb.errors import ConfigError
from wlb.sharding import SHARDERS, ShardCosts, ShardPlan
from wlb.sharding.plan import unsharded

# About 50 us on a GPU, longer than a small attention takes.
LATE_CYCLES = 100_000

SHARDING_RULE = (
    f"error <= {RATIO:g} x PyTorch's own in bfloat16, both against float64; other documents keep every bit; "
    "each rank receives the keys and values that its plan says, no more"
)
LONG_RULE = (
    f"error <= {RATIO:g} x PyTorch's own in bfloat16, both against float32, of the pack and of its longest document"
)


@dataclass(frozen=True, kw_only=True)
class ShardingScale:
    """lengths: of a pack whose tokens every one of cp_sizes divides; the first document is the longest.

    tile_tokens: with which sharders plan, as if sending cost nothing, so that they cut documents of a small pack too.
    long_lengths, long_heads, long_cp_size: of the pack of real length; chunk_rows: of its oracle.
    """

    lengths: tuple[int, ...]
    tile_tokens: int
    heads: dict[str, Heads]
    cp_sizes: tuple[int, ...]
    long_lengths: tuple[int, ...]
    long_heads: Heads
    long_cp_size: int
    chunk_rows: int


def check_sharding(scale: ShardingScale, *, kernel: str) -> tuple[bool, dict[str, Any]]:
    """Output, dq, dk and dv under every plan: the worst plan of each kind of heads and number of ranks."""

    def check(kind: str, heads: Heads) -> tuple[bool, dict[str, Any]]:
        pack = draw_pack(sum(scale.lengths), heads, seed=9)
        segments = tuple(accumulate(scale.lengths, initial=0))
        oracle = partial(dense_attention, segments=segments, window_tokens=heads.window_tokens)
        packed = partial(_one_rank, plan=unsharded(scale.lengths), window_tokens=heads.window_tokens, kernel=kernel)
        exact = with_gradients(oracle, *(t.double() for t in pack))
        unit = with_gradients(oracle, *pack)
        one_rank = error_ratios(with_gradients(packed, *pack), unit, exact)
        measured: dict[str, Any] = {f"{kind}, CP 1": one_rank}
        all_passed = within_ratio(one_rank)
        for cp_size in scale.cp_sizes:
            passed, measured[f"{kind}, CP {cp_size}"] = _check_plans(scale, heads, cp_size, kernel, pack, unit, exact)
            all_passed &= passed
        return all_passed, measured

    return by_kind(scale.heads, kernel, check)


def check_long_pack(scale: ShardingScale, kernels: Sequence[str]) -> tuple[bool, dict[str, Any]]:
    """The same on a pack as long as in training, where no matrix holds all scores. By kernel, sharder and exchange."""
    heads, lengths = scale.long_heads, scale.long_lengths
    pack = draw_pack(sum(lengths), heads, seed=10)
    exact = attention_by_chunks(tuple(t.float() for t in pack), lengths, scale.chunk_rows)
    unit = attention_by_chunks(pack, lengths, scale.chunk_rows)
    measured: dict[str, Any] = {}
    passed = True
    for kernel in kernels:
        for name, shard in SHARDERS.items():
            plan = shard(lengths, scale.long_cp_size, ShardCosts(tile_tokens=scale.tile_tokens))
            for comm_type in comm_types(heads, kernel):
                ours, _ = run_plan(pack, plan, comm_type, heads, kernel=kernel)
                whole, longest = (error_ratios(ours, unit, exact, rows) for rows in (slice(None), slice(lengths[0])))
                measured[f"{kernel}, {name}, {comm_type}"] = {**whole, "longest document": longest}
                passed &= within_ratio(whole) and within_ratio(longest)
    return passed, measured


def comm_types(heads: Heads, kernel: str) -> tuple[CommType, ...]:
    """Those that the kernel has for such heads."""
    if heads.window_tokens is None or kernel_of(heads, kernel).cuts_by_window:
        return get_args(CommType)
    return ("all_gather",)


def _one_rank(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    plan: ShardPlan,
    window_tokens: int | None,
    kernel: str,
) -> torch.Tensor:
    return sharded_attention(
        query, key, value, plan, 0, None, comm_type="all_gather", window_tokens=window_tokens, kernel=kernel
    )


class LateMailbox(Mailbox):
    """Makes the device wait before each message arrives: what does not wait for the message reads what was there."""

    def collect(self, message: tuple[int, int, int]) -> torch.Tensor:
        rows = super().collect(message)
        if rows.is_cuda:
            torch.cuda._sleep(LATE_CYCLES)
        return rows


def run_plan(
    pack: Tensors, plan: ShardPlan, comm_type: CommType, heads: Heads, *, kernel: str
) -> tuple[Tensors, list[int]]:
    """Output, dq, dk, dv in the order of the pack; bytes that each rank received in the forward pass."""
    query, key, value = ([t.requires_grad_() for t in by_rank(tensor, plan)] for tensor in pack[:3])
    mailbox = LateMailbox(plan.cp_size)
    outs = all_ranks_attention(
        query, key, value, plan, comm_type=comm_type, window_tokens=heads.window_tokens, mailbox=mailbox, kernel=kernel
    )
    received_bytes = [sum(sent) for sent in zip(*mailbox.sent_bytes, strict=True)]
    grads = torch.autograd.grad(outs, [t for tensors in (query, key, value) for t in tensors], by_rank(pack[3], plan))
    size = plan.cp_size
    by_tensor = [[o.detach() for o in outs], *(grads[i * size : (i + 1) * size] for i in range(3))]
    return tuple(in_pack_order(shards, plan) for shards in by_tensor), received_bytes


def _check_plans(
    scale: ShardingScale, heads: Heads, cp_size: int, kernel: str, pack: Tensors, unit: Tensors, exact: Tensors
) -> tuple[bool, dict[str, Any]]:
    """The worst ratio of each result over all sharders and exchanges, and the names of those that fail."""
    worst = dict.fromkeys(RESULTS, 0.0)
    failed = []
    for name, plan in _plans(scale, cp_size):
        for comm_type in comm_types(heads, kernel):
            ours, received_bytes = run_plan(pack, plan, comm_type, heads, kernel=kernel)
            ratios = error_ratios(ours, unit, exact)
            wrong = [
                *(result for result in RESULTS if not ratios[result] <= RATIO),
                *(
                    []
                    if _is_independent(scale, pack, plan, comm_type, heads, kernel, ours[0])
                    else ["documents see each other"]
                ),
                *([] if _receives_as_planned(plan, heads, received_bytes) else ["received not as planned"]),
            ]
            failed += [f"{name}, {comm_type}: {what}" for what in wrong]
            worst = {result: max(worst[result], ratios[result]) for result in RESULTS}
    return not failed, {**worst, "failed": "; ".join(failed) or "none"}


def _plans(scale: ShardingScale, cp_size: int) -> Iterator[tuple[str, ShardPlan]]:
    for name, shard in SHARDERS.items():
        plan = shard(scale.lengths, cp_size, ShardCosts(tile_tokens=scale.tile_tokens))
        if not any(plan.received_tokens(rank) for rank in range(cp_size)):
            raise ConfigError(f"lengths must make {name} cut a document at CP {cp_size}, got {scale.lengths}")
        yield name, plan


def _is_independent(
    scale: ShardingScale,
    pack: Tensors,
    plan: ShardPlan,
    comm_type: CommType,
    heads: Heads,
    kernel: str,
    out: torch.Tensor,
) -> bool:
    """Whether other values of the first document leave every bit of the other documents' output."""
    query, key, value, _ = pack
    # Not the plan's lengths: a wrong plan may hold others.
    first_tokens = scale.lengths[0]
    rows = slice(first_tokens, None)
    changed = torch.cat((-value[:first_tokens], value[rows]))
    with torch.no_grad():
        outs = all_ranks_attention(
            by_rank(query, plan),
            by_rank(key, plan),
            by_rank(changed, plan),
            plan,
            comm_type=comm_type,
            window_tokens=heads.window_tokens,
            kernel=kernel,
        )
    return torch.equal(in_pack_order(outs, plan)[rows], out[rows])


def _receives_as_planned(plan: ShardPlan, heads: Heads, received_bytes: Sequence[int]) -> bool:
    """Under a window ranks may need less than the plan says."""
    planned = [plan.received_tokens(rank) * heads.kv_numbers * 2 for rank in range(plan.cp_size)]
    if heads.window_tokens is None:
        return list(received_bytes) == planned
    return all(received <= most for received, most in zip(received_bytes, planned, strict=True))
