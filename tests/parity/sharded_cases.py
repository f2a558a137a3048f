"""Plans, tensors and runs that the parity tests of sharded attention share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from wlb.attention import all_ranks_attention, dense_attention
from wlb.sharding import SHARDERS, ShardCosts, ShardPlan
from wlb.sharding.plan import plan_of_chunks

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """num_kv_heads divides num_heads; value_size may differ from head_size."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 8
    value_size: int = 8


HEADS = {
    "mha": Heads(num_kv_heads=4),
    "gqa": Heads(),
    "mqa": Heads(num_kv_heads=1),
    "value-smaller": Heads(head_size=12, value_size=6),
    "value-larger": Heads(num_kv_heads=4, head_size=4, value_size=10),
}


def padded(lengths: Sequence[int], cp_size: int) -> tuple[int, ...]:
    """With a last document that makes the tokens a multiple of cp_size, as the trainer pads."""
    missing = -sum(lengths) % cp_size
    return (*lengths, missing) if missing else tuple(lengths)


def random_plan(lengths: Sequence[int], cp_size: int, seed: int) -> ShardPlan:
    """Documents cut anywhere, pieces dealt to any rank: every partition with equal tokens can come out."""
    rng = random.Random(seed)
    per_rank = sum(lengths) // cp_size
    pieces = []
    for document, length in enumerate(lengths):
        cuts = rng.sample(range(1, length), min(length - 1, rng.randint(0, 2 * cp_size))) if length > 1 else []
        edges = [0, *sorted(cuts), length]
        pieces += [(document, a, b) for a, b in pairwise(edges)]
    rng.shuffle(pieces)
    placed, rank, room = [], 0, per_rank
    for document, start, stop in pieces:
        while start < stop:
            take = min(room, stop - start)
            placed.append((rank, document, start, start + take))
            start, room = start + take, room - take
            if not room:
                rank, room = rank + 1, per_rank
    return plan_of_chunks(lengths, cp_size, placed)


def plan_named(name: str, lengths: Sequence[int], cp_size: int, *, seed: int = 0) -> ShardPlan:
    """Of a registered sharder, or `random`."""
    if name == "random":
        return random_plan(lengths, cp_size, seed)
    return SHARDERS[name](lengths, cp_size, ShardCosts(tile_tokens=4))


def inputs(num_tokens: int, heads: Heads, *, seed: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """Query, key, value and the gradient of the output, of the whole pack."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (heads.num_heads, heads.head_size),
        (heads.num_kv_heads, heads.head_size),
        (heads.num_kv_heads, heads.value_size),
        (heads.num_heads, heads.value_size),
    ]
    return tuple(torch.randn(num_tokens, *s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


def run_dense(pack: Tensors, lengths: Sequence[int], **options: Any) -> Tensors:
    """Output, dq, dk, dv of the definition."""
    *qkv, grad = pack
    leaves = [t.detach().clone().requires_grad_() for t in qkv]
    out = dense_attention(*leaves, tuple(accumulate(lengths, initial=0)), **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def run_sharded(pack: Tensors, plan: ShardPlan, comm_type: str, **options: Any) -> Tensors:
    """Output, dq, dk, dv of all ranks, put back in the order of the pack."""
    *qkv, grad = pack
    shards = [[t[torch.from_numpy(plan.pack_indices(r))] for r in range(plan.cp_size)] for t in qkv]
    leaves = [[t.detach().requires_grad_() for t in by_rank] for by_rank in shards]
    outs = all_ranks_attention(*leaves, plan, comm_type=comm_type, **options)
    restore = torch.from_numpy(plan.restore)
    out = torch.cat(outs)[restore]
    flat = [t for by_rank in leaves for t in by_rank]
    grads = torch.autograd.grad(out, flat, grad)
    size = plan.cp_size
    return (out.detach(), *(torch.cat(grads[i * size : (i + 1) * size])[restore] for i in range(3)))


def errors(results: Tensors, wanted: Tensors) -> list[float]:
    """Largest error of output, dq, dk, dv, each over the largest value wanted, or over 1 where that is smaller."""
    assert len(results) == len(wanted) == 4
    return [
        float((r.double() - w).abs().max() / w.abs().max().clamp(min=1.0)) for r, w in zip(results, wanted, strict=True)
    ]


def error_norms(results: Tensors, wanted: Tensors) -> list[float]:
    """Relative error of output, dq, dk, dv in the Euclidean norm: the largest single rounding does not decide it."""
    return [float((r.double() - w).norm() / w.norm()) for r, w in zip(results, wanted, strict=True)]
