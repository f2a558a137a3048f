"""Row numbers of a buffer, in numpy: made with a plan, copied to a device by whoever executes it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


class Rows:
    """Row numbers.

    numbers: int64, or int32 for the edges that kernels take.
    copies: by device, of an executor; not pickled. See `wlb.attention.device_rows`.
    """

    def __init__(self, numbers: Int64 | NDArray[np.int32]) -> None:
        self.numbers = numbers
        self.copies: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[type[Rows], tuple[Int64 | NDArray[np.int32]]]:
        return Rows, (self.numbers,)

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def are_all_in_order(self) -> bool:
        """Whether these are rows 0, 1, 2, ..."""
        return np.array_equal(self.numbers, np.arange(len(self.numbers)))


def ranges(pairs: Iterable[tuple[int, int]]) -> Int64:
    """Numbers of all [start, stop), one after the other."""
    each = [np.arange(start, stop, dtype=np.int64) for start, stop in pairs]
    return np.concatenate(each) if each else np.empty(0, dtype=np.int64)
