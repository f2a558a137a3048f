"""Packs of random queries, keys and values for the GPU check, and their division over ranks.

Shapes: T tokens of the pack, N query heads, K key/value heads, H head size of queries and keys, V of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wlb.sharding import ShardPlan

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Heads:
    """N, K, H, V of an attention layer; window_tokens: keys that a query sees, its own included."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    window_tokens: int | None = None

    @property
    def kv_numbers(self) -> int:
        """Of the key and the value of one token."""
        return self.num_kv_heads * (self.head_size + self.value_size)


def draw_pack(num_tokens: int, heads: Heads, *, seed: int) -> Tensors:
    """Query (T, N, H), key (T, K, H), value (T, K, V) and the gradient of the output (T, N, V), in bfloat16."""
    device = torch.empty(0).cuda().device
    generator = torch.Generator(device).manual_seed(seed)
    shapes = (
        (heads.num_heads, heads.head_size),
        (heads.num_kv_heads, heads.head_size),
        (heads.num_kv_heads, heads.value_size),
        (heads.num_heads, heads.value_size),
    )
    return tuple(torch.randn(num_tokens, *s, generator=generator, device=device).bfloat16() for s in shapes)


def by_rank(tensor: torch.Tensor, plan: ShardPlan) -> list[torch.Tensor]:
    """(T, ...) -> (T/cp, ...) for each rank."""
    return [tensor[torch.from_numpy(plan.pack_indices(rank)).to(tensor.device)] for rank in range(plan.cp_size)]


def in_pack_order(shards: Sequence[torch.Tensor], plan: ShardPlan) -> torch.Tensor:
    """Undo `by_rank`."""
    return torch.cat(list(shards))[torch.from_numpy(plan.restore).to(shards[0].device)]
