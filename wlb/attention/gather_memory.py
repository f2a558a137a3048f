"""Measures what gathered keys and values hold: watches every tensor that a call allocates.

Shapes: W = K * (H + V) numbers of a row's key and value, K key/value heads, H head size of keys, V of values.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_LETTING_GO_S = 0.5


class GatherMemory(TorchDispatchMode):
    """While active, follows all (rows, W) tensors: keys with their values on their way and gathered, and their
    gradients.

    peak_bytes: most that were alive at once, with those that are sent and those that just arrived.
    attending_bytes: most that were alive while attention read gathered keys, on the CPU.
    """

    def __init__(self, row_numbers: int) -> None:
        """row_numbers: W."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._row_numbers = row_numbers
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget the peaks, not what is alive."""
        self.peak_bytes = self.attending_bytes = 0

    @property
    def live_bytes(self) -> int:
        """Of the followed tensors whose memory is in use now."""
        dead = [key for key, (weak, _) in self._storages.items() if weak.expired()]  # type: ignore[no-untyped-call]
        for key in dead:
            del self._storages[key]
        return sum(num_bytes for _, num_bytes in self._storages.values())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view has the memory of an argument; what looks like rows in it may be something else.
        taken = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[1] == self._row_numbers:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in taken:
                    weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    self._storages[storage.data_ptr()] = (weak, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if _ATTENTION in func.name():
            read = {key for t in args if isinstance(t, torch.Tensor) and (key := self._followed(t)) is not None}
            if read:
                self.attending_bytes = max(self.attending_bytes, self._settled_bytes(read))
        return result

    def _settled_bytes(self, read: set[int]) -> int:
        """Alive, once the thread of an exchange that has ended let go of its tensors: it does so a moment later."""
        deadline_s = time.monotonic() + _LETTING_GO_S
        while (live := self.live_bytes) > sum(self._storages[key][1] for key in read):
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.001)
        return live

    def _followed(self, tensor: torch.Tensor) -> int | None:
        key = tensor.untyped_storage().data_ptr()
        return key if key in self._storages else None
