"""What computes a phase, by device and by name.

| name | needs | keys |
|---|---|---|
| `flash3` | flash-attn-3 and a Hopper GPU | read where they lie |
| `cudnn` | Transformer Engine 2.9 or later | read where they lie |
| `flash2` | flash-attn 2.5 or later | copied for each task that sees them |
| `torch` | a CUDA device with flash attention | copied for each task that sees them |

On a CPU there is one kernel, called `auto`. Packages are looked for when a kernel is first asked for.

Shapes: T tokens of the shard, S rows of the key buffer, N query heads, K key/value heads, H head size of queries and
keys, V of values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import torch

from wlb.attention.cpu_kernel import CpuKernel
from wlb.attention.cudnn_kernel import CudnnKernel
from wlb.attention.flash2_kernel import Flash2Kernel
from wlb.attention.flash3_kernel import Flash3Kernel
from wlb.attention.partial import Partial
from wlb.attention.torch_kernel import TorchKernel
from wlb.errors import ConfigError
from wlb.sharding.phases import Phase

_LEAST_CAPABILITY = (8, 0)
_HOPPER = 9
_CUDNN_HEAD_SIZE = 128


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


KERNELS: dict[str, Callable[[], Kernel]] = {
    "flash3": Flash3Kernel,
    "cudnn": CudnnKernel,
    "flash2": Flash2Kernel,
    "torch": TorchKernel,
}
"""On CUDA, in the order in which `auto` looks."""


def available_kernels(device: torch.device) -> dict[str, str]:
    """Each name of `KERNELS`, and why it cannot be used on `device`; empty if it can."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return {name: _obstacle(name, device.type, capability) for name in KERNELS}


def kernel_for(
    device: torch.device,
    name: str = "auto",
    *,
    query: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    window_tokens: int | None = None,
) -> Kernel:
    """The kernel of that name, made once a process.

    `auto` on CUDA takes the first of `flash3`, `cudnn`, `flash2`, `torch` that can be used: those that do not copy
    keys before those that do, and of the former `flash3` first, because it takes a phase in one call forward, keeps no
    plan for sizes, and has sliding windows and all head sizes wherever it runs. `cudnn` has windows, and heads above
    128, from some versions and devices on, which Transformer Engine knows and this does not: `auto` passes it by for
    these, and who names it gets it.

    Args:
        query, value, window_tokens: what `auto` chooses for, as in `sharded_attention`; anything by default.

    Raises:
        ConfigError: no such kernel, or it cannot be used on `device`.
    """
    if name not in ("auto", *KERNELS):
        raise ConfigError(f"kernel must be one of auto, {', '.join(KERNELS)}, got {name!r}")
    if device.type == "cpu" and name == "auto":
        return _made("cpu")
    obstacles = available_kernels(device)
    if name != "auto":
        if obstacles[name]:
            raise ConfigError(f"kernel must be one that can be used on {device}, got {name}, which {obstacles[name]}")
        return _made(name)
    for usable in (n for n, obstacle in obstacles.items() if not obstacle):
        if _suits(usable, query, value, window_tokens):
            return _made(usable)
    # The last one says what it does not take, if that is why.
    if not obstacles["torch"]:
        return _made("torch")
    reasons = "; ".join(f"{n} {obstacle}" for n, obstacle in obstacles.items())
    raise ConfigError(f"kernel must be one that can be used on {device}, got auto, and none can: {reasons}")


def _suits(name: str, query: torch.Tensor | None, value: torch.Tensor | None, window_tokens: int | None) -> bool:
    """Whether `auto` may take it."""
    if name == "cudnn" and window_tokens is not None:
        return False
    if query is None or value is None:
        return True
    if name == "cudnn" and max(query.shape[-1], value.shape[-1]) > _CUDNN_HEAD_SIZE:
        return False
    try:
        _made(name).check(query, value)
    except ConfigError:
        return False
    return True


@lru_cache
def _obstacle(name: str, device_type: str, capability: tuple[int, int] | None) -> str:
    if capability is None:
        return f"needs a CUDA device, got {device_type}"
    if capability < _LEAST_CAPABILITY:
        return f"needs compute capability 8.0 or later, got {capability[0]}.{capability[1]}"
    if name == "flash3" and capability[0] != _HOPPER:
        return f"needs compute capability 9.0, got {capability[0]}.{capability[1]}"
    try:
        _made(name)
    except (ImportError, OSError, AttributeError) as error:
        # OSError: the package is there, a library of it is not.
        return f"cannot be imported: {error}"
    return ""


@lru_cache
def _made(name: str) -> Kernel:
    return CpuKernel() if name == "cpu" else KERNELS[name]()
