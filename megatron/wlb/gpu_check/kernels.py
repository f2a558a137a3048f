"""Which kernels the GPU check can use, and what it makes of one that does not take some heads."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from megatron.wlb.gpu_check.packs import Heads, draw_pack
from wlb.attention.kernels import Kernel, available_kernels, kernel_for
from wlb.errors import ConfigError

Outcome = tuple[bool, dict[str, Any]]


def kernel_obstacles() -> dict[str, str]:
    """Each kernel by name, and why it cannot be used on the device; empty if it can."""
    return available_kernels(torch.empty(0).cuda().device)


def usable_kernels() -> list[str]:
    """Names to check. The CPU has one kernel, without a name; where a GPU has none, `auto` fails with the reasons."""
    return [name for name, obstacle in kernel_obstacles().items() if not obstacle] or ["auto"]


def kernel_of(heads: Heads, kernel: str) -> Kernel:
    """What computes layers of such heads. Raises ConfigError if it does not take them."""
    query, _, value, _ = draw_pack(1, heads, seed=0)
    found = kernel_for(query.device, kernel, query=query, value=value, window_tokens=heads.window_tokens)
    found.check(query, value)
    return found


def by_kind(heads_by_kind: dict[str, Heads], kernel: str | None, check: Callable[[str, Heads], Outcome]) -> Outcome:
    """`check` of each kind of heads; what one of them raises costs no other.

    A kind that `kernel` refuses by name is told and not judged. Neither is one that it fails on where `auto` would
    not have chosen it: who names a kernel gets it, and a library may know better what its version can. It must take one
    kind at least. kernel: None for Transformer Engine's own attention.
    """
    measured: dict[str, Any] = {}
    judged = []
    for kind, heads in heads_by_kind.items():
        try:
            passed, found = check(kind, heads)
        except ConfigError as error:
            measured[kind] = {"refused": str(error)}
            continue
        except Exception as error:
            traceback.print_exc()
            sentence = f"{type(error).__name__}: {error}"
            if kernel is not None and not _is_chosen(heads, kernel):
                measured[kind] = {"refused": sentence}
                continue
            passed, found = False, {kind: {"failed": sentence}}
        judged.append(passed)
        measured |= found
    return bool(judged) and all(judged), measured


def _is_chosen(heads: Heads, kernel: str) -> bool:
    """Whether `auto` takes this kernel for such heads."""
    try:
        return kernel_of(heads, "auto") is kernel_of(heads, kernel)
    except ConfigError:
        return False
