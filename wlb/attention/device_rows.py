"""Row numbers and other arrays of the host on a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from wlb.attention.transport import rounded_rows
from wlb.sharding.rows import Rows

_ALIGNMENT = 64  # bytes; kernels read what follows in a buffer as fast as what begins it


def on_device(rows: Rows, device: torch.device) -> torch.Tensor:
    """(rows,) of the dtype of the numbers. Copied once to each device that asks, without waiting for it."""
    if device not in rows.copies:
        copy_to(device, [rows])
    tensor = rows.copies[device]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def copy_to(device: torch.device, many: Iterable[Rows]) -> None:
    """In one copy, all of them that are not there yet."""
    missing = [rows for rows in dict.fromkeys(many) if device not in rows.copies]
    tensors = to_device([rows.numbers for rows in missing], device)
    for rows, tensor in zip(missing, tensors, strict=True):
        rows.copies[device] = tensor


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """(n,) tensors of (n,) arrays; on a CPU in the memory of the arrays.

    On CUDA they go through one pinned buffer and one copy, of which the device's tensors are parts. There is no ring of
    buffers of ours: PyTorch keeps pinned memory by powers of two, and gives a buffer away again only once an event says
    that the copy out of it is over, so a step pins memory only the first time that it needs so many buffers at once.
    """
    if device.type == "cpu" or not arrays:
        return [torch.from_numpy(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    host = torch.empty(rounded_rows(starts[-1]), dtype=torch.uint8, pin_memory=True)
    parts = [slice(start, start + array.nbytes) for array, start in zip(arrays, starts, strict=False)]
    tensors = [torch.from_numpy(array) for array in arrays]
    for part, tensor in zip(parts, tensors, strict=True):
        host[part].view(tensor.dtype).copy_(tensor)
    there = host.to(device, non_blocking=True)
    return [there[part].view(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
