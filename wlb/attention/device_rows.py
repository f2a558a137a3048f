"""Row numbers of a plan on a device."""

from __future__ import annotations

import torch

from wlb.sharding.rows import Rows


def on_device(rows: Rows, device: torch.device) -> torch.Tensor:
    """(rows,) of the dtype of the numbers. Copied once to each device that asks, without waiting for it."""
    if device not in rows.copies:
        copy = torch.from_numpy(rows.numbers)
        if device.type == "cuda":
            copy = copy.pin_memory().to(device, non_blocking=True)
        rows.copies[device] = copy
    tensor = rows.copies[device]
    assert isinstance(tensor, torch.Tensor)
    return tensor
