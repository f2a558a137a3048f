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
    """Of a function or an operator of torch."""
    return frozenset(_signature(operator).parameters)


def unused(operator: Any, num_positional: int, *names: str) -> dict[str, None]:
    """None for each parameter without a default that is not among the first `num_positional` or `names`.

    Raises ImportError where it cannot be called with these: it is of a release that the caller does not know.
    """
    signature = _signature(operator)
    parameters = list(signature.parameters.values())
    rest = {
        p.name: None
        for p in parameters[num_positional:]
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in names
    }
    try:
        signature.bind(*[None] * num_positional, **dict.fromkeys(names), **rest)
    except TypeError as error:
        name = getattr(operator, "__name__", operator)
        raise ImportError(f"{name} has other parameters than those of the known releases: {error}") from error
    return rest


def _signature(operator: Any) -> inspect.Signature:
    """An operator of torch, and a function that is made one, hides its own behind `*args`."""
    operator = getattr(operator, "_opoverload", operator)
    schema = getattr(getattr(operator, "default", operator), "_schema", None)
    if schema is None:
        return inspect.signature(operator)
    kind, no_default = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parameters = [
        inspect.Parameter(a.name, kind, default=a.default_value if a.has_default_value() else no_default)
        for a in schema.arguments
    ]
    return inspect.Signature(parameters)


def is_deterministic() -> bool:
    """Whether backward must give the same bits again, as `torch.use_deterministic_algorithms` (and with it Megatron's
    --deterministic-mode) asks for."""
    return torch.are_deterministic_algorithms_enabled()
