"""Row numbers of a buffer, in numpy: made with a plan, copied to a device by whoever executes it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Numbers = Int64 | NDArray[np.int32]


class Rows:
    """Row numbers.

    copies: by device, of an executor; not pickled. See `wlb.attention.device_rows`.
    """

    def __init__(self, numbers: Numbers) -> None:
        """numbers: int64, or int32 for the edges that kernels take."""
        self._pieces: tuple[Int64, Int64] | None = None
        self._numbers: Numbers | None = numbers
        self._count = len(numbers)
        self.copies: dict[Any, Any] = {}

    @classmethod
    def between(cls, starts: Int64, stops: Int64) -> Rows:
        """All rows [start, stop), one piece after the other.

        They are written out when somebody asks, so that a plan of thousands of rows crosses a process boundary as the
        few pieces that it is made of.

        >>> Rows.between(np.array([4, 0]), np.array([6, 1])).numbers.tolist()
        [4, 5, 0]
        """
        rows = cls.__new__(cls)
        rows._pieces, rows._numbers, rows.copies = (starts, stops), None, {}
        rows._count = int((stops - starts).sum())
        return rows

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (Rows, (self._numbers,)) if self._pieces is None else (Rows.between, self._pieces)

    def __len__(self) -> int:
        return self._count

    @property
    def numbers(self) -> Numbers:
        """(rows,)"""
        if self._numbers is None:
            assert self._pieces is not None
            self._numbers = expanded(*self._pieces)
        return self._numbers

    @cached_property
    def are_all_in_order(self) -> bool:
        """Whether these are rows 0, 1, 2, ..."""
        if self._pieces is None:
            return np.array_equal(self.numbers, np.arange(len(self)))
        starts, stops = self._pieces
        filled = starts < stops
        starts, stops = starts[filled], stops[filled]
        return not len(starts) or bool(starts[0] == 0 and (starts[1:] == stops[:-1]).all())


def expanded(starts: Int64, stops: Int64) -> Int64:
    """Numbers of all [start, stop), one after the other."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    numbers = np.repeat(starts - ends + lengths, lengths)
    numbers += np.arange(len(numbers))
    return numbers
