"""Rows of a phase in the tensors that flash kernels take and give, and what such kernels have in common.

Shapes: S rows of a buffer, R of them, K heads, H head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.functional import pad

from wlb.attention.device_rows import copy_to, on_device
from wlb.errors import ConfigError
from wlb.sharding.phases import Phase
from wlb.sharding.rows import Rows

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
HEAD_SIZE_MULTIPLE = 8
MOST_HEAD_SIZE = 256


def check_heads(kernel: str, query: torch.Tensor, value: torch.Tensor) -> None:
    """Raises ConfigError for a dtype or a head size that flash attention does not have."""
    if query.dtype not in DTYPES:
        raise ConfigError(f"attention kernel {kernel} takes bfloat16 or float16, got {query.dtype}")
    if max(query.shape[-1], value.shape[-1]) > MOST_HEAD_SIZE:
        sizes = f"{query.shape[-1]} and {value.shape[-1]}"
        raise ConfigError(f"attention kernel {kernel} takes head sizes up to {MOST_HEAD_SIZE}, got {sizes}")


def rounded_size(size: int) -> int:
    """The next head size that kernels take."""
    return -(-size // HEAD_SIZE_MULTIPLE) * HEAD_SIZE_MULTIPLE


def widened(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """(S, K, H) -> (S, K, size), zeros behind; the same where H is `size`."""
    return pad(tensor, (0, size - tensor.shape[-1])) if tensor.shape[-1] < size else tensor


def is_whole(rows: Rows, buffer: torch.Tensor) -> bool:
    """Whether these are all rows of the buffer as they lie."""
    return len(rows) == buffer.shape[0] and rows.are_all_in_order


def rows_of(rows: Rows, buffer: torch.Tensor) -> slice | torch.Tensor:
    """To index the buffer, or one of as many rows, with."""
    return slice(None) if is_whole(rows, buffer) else on_device(rows, buffer.device)


def copy_ahead(arrays: Iterable[Rows], indices: Iterable[tuple[Rows, torch.Tensor]], device: torch.device) -> None:
    """In one copy instead of many small ones: arrays of operators, and row numbers that index part of a buffer."""
    copy_to(device, [*arrays, *(rows for rows, buffer in indices if not is_whole(rows, buffer))])


def taken(buffer: torch.Tensor, rows: Rows) -> torch.Tensor:
    """(S, ...) -> (R, ...), without a copy where it is the whole buffer."""
    return buffer if is_whole(rows, buffer) else buffer.index_select(0, on_device(rows, buffer.device))


def add_at(grad: torch.Tensor, rows: Rows, part: torch.Tensor) -> None:
    """Add (R, K, H or more) to `rows` of (S, K, H). A row that is there several times gets the sum."""
    part = part[..., : grad.shape[-1]].to(grad.dtype)
    if is_whole(rows, grad):
        grad += part
    else:
        grad.index_add_(0, on_device(rows, grad.device), part)


def is_causal(phase: Phase) -> bool:
    """Whether the operator is to hide what lies above the diagonal and nothing else."""
    return phase.causal and phase.window is None


def window_size(phase: Phase) -> tuple[int, int]:
    """(left, right) of the last key that each query sees, counted from the bottom right corner; -1 without bound."""
    if not phase.causal:
        assert phase.window is None, "a window is measured from a task's last key, which must be its last query's own"
        return -1, -1
    return (-1, 0) if phase.window is None else (phase.window - 1, 0)


def parameter_names(operator: Any) -> frozenset[str]:
    """Of a function, or of a custom operator of torch, which hides its own behind `*args`."""
    overload = getattr(operator, "_opoverload", None)
    if overload is not None:
        return frozenset(argument.name for argument in overload._schema.arguments)
    return frozenset(inspect.signature(operator).parameters)


def is_deterministic() -> bool:
    """Whether backward must give the same bits again, as `torch.use_deterministic_algorithms` (and with it Megatron's
    --deterministic-mode) asks for."""
    return torch.are_deterministic_algorithms_enabled()
