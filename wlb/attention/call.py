"""What the two communication types share: the arguments of a call, and rows of keys with their values.

Shapes: T tokens of the shard, W = K * (H + V) numbers of a row's key and value, K key/value heads, H head size of
queries and keys, V of values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wlb.attention.device_rows import on_device
from wlb.attention.exchange import KvExchange
from wlb.attention.kernels import Kernel
from wlb.attention.partial import accumulation_dtype
from wlb.attention.transport import Transport, empty_rows
from wlb.sharding.plan import ShardPlan
from wlb.sharding.rows import Rows

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Of `sharded_attention`, checked.

    exchange: None only for a plan of one rank. transport: where and in what buffers rows are handled on their way.
    """

    plan: ShardPlan
    rank: int
    exchange: KvExchange | None
    transport: Transport
    kernel: Kernel
    scale: float
    window: int | None
    keep_gathered: bool

    def zero_grads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Gradients:
        """Of all rows, in the accumulation dtype: a key is summed over queries of all ranks before it is rounded."""
        dtype = accumulation_dtype(query.dtype)
        q, k, v = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (query, key, value))
        return q, k, v

    def empty_rows(self, like: torch.Tensor, num_rows: int, row_numbers: int) -> torch.Tensor:
        """(num_rows, row_numbers), of the dtype and on the device of `like`."""
        return empty_rows(self.transport, like, num_rows, row_numbers)

    def cast(self, grads: Gradients, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Gradients:
        """To the dtypes of the inputs."""
        q, k, v = (g.to(t.dtype) for g, t in zip(grads, (query, key, value), strict=True))
        return q, k, v


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """out (T, N, V) in the dtype of the inputs; log_sum_exp (T, N); gathered (G, W) if it is kept for backward."""

    out: torch.Tensor
    log_sum_exp: torch.Tensor
    gathered: torch.Tensor | None = None


def num_row_numbers(key: torch.Tensor, value: torch.Tensor) -> int:
    """W"""
    return key.shape[1] * (key.shape[2] + value.shape[2])


def pack_rows(key: torch.Tensor, value: torch.Tensor, rows: Rows, packed: torch.Tensor) -> None:
    """(T, K, H), (T, K, V) -> (rows, W): a row's key heads, then its value heads."""
    index = on_device(rows, key.device)
    for tensor, part in zip((key, value), key_and_value(packed, key, value), strict=True):
        torch.index_select(tensor, 0, index, out=part)


def key_and_value(rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, W) -> (rows, K, H), (rows, K, V), views; undoes `pack_rows` for tensors like `key` and `value`."""
    keys, values = torch.split(rows, [key.shape[1] * key.shape[2], value.shape[1] * value.shape[2]], dim=1)
    return keys.view(-1, *key.shape[1:]), values.view(-1, *value.shape[1:])


def add_rows(grads: tuple[torch.Tensor, ...], rows: torch.Tensor, added: torch.Tensor) -> None:
    """Add (rows, W) to `rows`, none of them there twice, of dk (T, K, H) and dv (T, K, V)."""
    if len(rows):
        for grad, part in zip(grads, key_and_value(added, *grads), strict=True):
            grad.index_add_(0, rows, part)
