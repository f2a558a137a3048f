"""What computes a phase, by device.

Shapes: T tokens of the shard, S rows of the key buffer, N query heads, K key/value heads, H head size of queries and
keys, V of values.
"""

from __future__ import annotations

from typing import Protocol

import torch

from wlb.attention.cpu_kernel import CpuKernel
from wlb.attention.partial import Partial
from wlb.attention.varlen_kernel import VarlenKernel
from wlb.sharding.phases import Phase


class Kernel(Protocol):
    """Attention of a phase, forward and backward. Both add to what they are given.

    cuts_by_window: takes phases that are not causal under a window.
    """

    cuts_by_window: bool

    def check(self, query: torch.Tensor, value: torch.Tensor) -> None:
        """Raises ConfigError for a dtype or a head size that the kernel does not take."""
        ...

    def forward(
        self,
        partial: Partial,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        phase: Phase,
        scale: float,
    ) -> None:
        """Merge the attention of (T, N, H) over (S, K, H), (S, K, V) into `partial`."""
        ...

    def backward(
        self,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        log_sum_exp: torch.Tensor,
        phase: Phase,
        scale: float,
    ) -> None:
        """Add to dq (T, N, H), dk (S, K, H), dv (S, K, V), in the accumulation dtype.

        out (T, N, V), log_sum_exp (T, N): over all keys of all phases, so that each phase's part of the softmax is
        recomputed right.
        """
        ...


def kernel_for(device: torch.device) -> Kernel:
    """The kernel of a device's type."""
    return CpuKernel() if device.type == "cpu" else VarlenKernel()
