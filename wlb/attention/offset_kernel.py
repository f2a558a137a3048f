"""What kernels have in common that are told where each task's rows lie: neither keys nor queries are copied.

They give whole buffers, of which only the rows of the call's tasks mean anything; see `wlb.sharding.calls` for what
one call may hold.

Shapes: T tokens of the shard, S rows of the key buffer, R query rows of a call, N query heads, K key/value heads, H
head size of queries and keys, V of values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from wlb.attention.kernel_rows import add_at, check_heads, copy_ahead, rows_of, taken, widened
from wlb.attention.partial import Partial
from wlb.sharding.calls import KernelCall
from wlb.sharding.phases import Phase
from wlb.sharding.rows import Rows

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class OffsetKernel(ABC):
    """A `Kernel`. Takes bfloat16 and float16."""

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
        calls = self._forward_calls(phase)
        self._copy_ahead(list(dict.fromkeys((*calls, *self._backward_calls(phase)))), query, key)
        head_size, out_size = self._sizes(query.shape[-1], value.shape[-1], backward=False)
        q, k, v = widened(query, head_size), widened(key, head_size), widened(value, out_size)
        add = partial.put if phase.first else partial.merge
        for call in calls:
            out, log_sum_exp = self._attend(q, k, v, call, phase, scale)
            add(rows_of(call.query_rows, q), taken(out, call.query_rows)[..., : value.shape[-1]], log_sum_exp)

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
        calls = self._backward_calls(phase)
        self._copy_ahead(calls, query, key)  # of a phase that has no forward pass
        head_size, out_size = self._sizes(query.shape[-1], value.shape[-1], backward=True)
        q, k = widened(query, head_size), widened(key, head_size)
        v, grad, merged = (widened(t, out_size) for t in (value, grad_out, out))
        for call in calls:
            parts = self._differentiate(grad, q, k, v, merged, log_sum_exp, call, phase, scale)
            for whole, rows, part in zip(grads, (call.query_rows, *[call.key_rows] * 2), parts, strict=True):
                add_at(whole, rows, taken(part, rows))

    def _copy_ahead(self, calls: Sequence[KernelCall], query: torch.Tensor, key: torch.Tensor) -> None:
        indices = [pair for call in calls for pair in ((call.query_rows, query), (call.key_rows, key))]
        copy_ahead((rows for call in calls for rows in self._arrays(call)), indices, query.device)

    @abstractmethod
    def _forward_calls(self, phase: Phase) -> Sequence[KernelCall]:
        """That make up the phase."""

    @abstractmethod
    def _backward_calls(self, phase: Phase) -> Sequence[KernelCall]:
        """Likewise; in none of them two tasks have a key in common."""

    @abstractmethod
    def _arrays(self, call: KernelCall) -> tuple[Rows, ...]:
        """What the operators are handed of a call."""

    @abstractmethod
    def _sizes(self, head_size: int, value_size: int, *, backward: bool) -> tuple[int, int]:
        """To which heads are widened by zeros, for the operators: of queries and keys, and of values."""

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
        """Output (T, N, V), of which rows of the call are read; log-sum-exp (R, N) of these."""

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
        """dq (T, N, H), dk (S, K, H), dv (S, K, V), of which rows of the call are read. log_sum_exp: (T, N)."""
