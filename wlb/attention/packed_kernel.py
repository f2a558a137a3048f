"""What kernels have in common whose tasks lie back to back, one variable-length call per phase and class of lengths.

Their backward takes no offsets, so keys that several tasks see are copied, once for each; where a buffer lies in that
order already, it is used as it is. Such kernels keep no plan by lengths (each is compiled for a head size, a dtype and
a kind of mask), and launch blocks for the longest task in every task, in both directions, so lengths are not rounded up
for them, and short tasks go to calls of their own.

Shapes: T tokens of the shard, S rows of the key buffer, R query rows of a call, N query heads, K key/value heads, H
head size of queries and keys, V of values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from wlb.attention.device_rows import on_device
from wlb.attention.kernel_rows import add_at, check_heads, copy_ahead, rounded_size, rows_of, taken, widened
from wlb.attention.partial import Partial
from wlb.sharding.calls import KernelCall
from wlb.sharding.phases import Phase
from wlb.sharding.rows import Rows

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class PackedKernel(ABC):
    """A `Kernel`. Takes bfloat16 and float16; unequal or odd head sizes by zeros behind."""

    name: str

    # The operators measure a window from the last key of a task.
    cuts_by_window = False

    def check(self, query: torch.Tensor, value: torch.Tensor) -> None:
        """Raises ConfigError for a dtype or a head size that flash attention does not have."""
        check_heads(self.name, query, value)

    def forward(
        self,
        partial: Partial,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        phase: Phase,
        scale: float,
    ) -> None:
        if not phase.num_tasks:
            return
        calls = phase.calls_by_length
        _copy_ahead(calls, query, key)
        size = _common_size(query, value)
        add = partial.put if phase.first else partial.merge
        for call in calls:
            q = _packed(query, call.query_rows, size)
            k, v = (_packed(t, call.key_rows, size) for t in (key, value))
            out, log_sum_exp = self._attend(q, k, v, call, phase, scale)
            add(rows_of(call.query_rows, query), out[..., : value.shape[-1]], log_sum_exp)

    def backward(
        self,
        grads: Three,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        log_sum_exp: torch.Tensor,
        phase: Phase,
        scale: float,
    ) -> None:
        if not phase.num_tasks:
            return
        calls = phase.calls_by_length
        _copy_ahead(calls, query, key)  # of a phase that has no forward pass
        size = _common_size(query, value)
        for call in calls:
            grad, q, merged = (_packed(t, call.query_rows, size) for t in (grad_out, query, out))
            k, v = (_packed(t, call.key_rows, size) for t in (key, value))
            parts = self._differentiate(grad, q, k, v, merged, taken(log_sum_exp, call.query_rows), call, phase, scale)
            for whole, rows, part in zip(grads, (call.query_rows, *[call.key_rows] * 2), parts, strict=True):
                add_at(whole, rows, part)

    @abstractmethod
    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: KernelCall,
        phase: Phase,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of all tasks back to back, one head size -> output (R, N, H), log-sum-exp (R, N)."""

    @abstractmethod
    def _differentiate(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        log_sum_exp: torch.Tensor,
        call: KernelCall,
        phase: Phase,
        scale: float,
    ) -> Three:
        """dq, dk, dv of the packed rows."""


def edges(call: KernelCall, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Cumulative lengths of queries and of keys, and the longest of each."""
    return on_device(call.query_edges, device), on_device(call.key_edges, device), call.most_queries, call.most_keys


def _copy_ahead(calls: Sequence[KernelCall], query: torch.Tensor, key: torch.Tensor) -> None:
    indices = [pair for call in calls for pair in ((call.query_rows, query), (call.key_rows, key))]
    copy_ahead((edges for call in calls for edges in (call.query_edges, call.key_edges)), indices, query.device)


def _common_size(query: torch.Tensor, value: torch.Tensor) -> int:
    return rounded_size(max(query.shape[-1], value.shape[-1]))


def _packed(buffer: torch.Tensor, rows: Rows, size: int) -> torch.Tensor:
    """(S, K, H) -> (rows, K, size)."""
    return widened(taken(buffer, rows), size).contiguous()
