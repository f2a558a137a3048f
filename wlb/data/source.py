"""One source of documents: rows of an index, and the endless order in which they come."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wlb.data.permutation import Permutation
from wlb.errors import DataError

_BLOCK = 512  # shuffled rows looked up at once; a cache only, never part of the state
_SCAN_CHUNK = 1 << 16  # sequences per pass of the scan at construction: 0.5 MB


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentSource:
    """The sequences [first, stop) of one index: one data set of a blend, or one split of it.

    lengths: stored tokens per sequence, (num_sequences,) integers; may be a read-only memory map, is not copied.
    label_tokens: stored tokens at the end of a sequence that are only labels: 1 for token files, 0 for a plain
        trace of lengths. A sequence has max(0, stored - label_tokens) training positions.
    stop: None means to the end.
    weight: share of the run's tokens that comes from this source, relative to the other sources'.
    sequence_base: added to the row to give `Document.sequence`, so that sources of a blend stay apart.
    """

    lengths: NDArray[Any]
    label_tokens: int
    first: int = 0
    stop: int | None = None
    weight: float = 1.0
    sequence_base: int = 0

    def __post_init__(self) -> None:
        if self.lengths.ndim != 1 or self.lengths.dtype.kind not in "iu":
            raise DataError(
                f"lengths must be a vector of integers, got shape {self.lengths.shape} of {self.lengths.dtype}"
            )
        if self.label_tokens not in (0, 1):
            raise DataError(f"label_tokens must be 0 or 1, got {self.label_tokens}")
        if not 0 <= self.rows.start < self.rows.stop <= len(self.lengths):
            raise DataError(
                f"first and stop must hold at least one of the {len(self.lengths)} sequences, "
                f"got [{self.rows.start}, {self.rows.stop})"
            )
        if not (isfinite(self.weight) and self.weight > 0):
            raise DataError(f"weight must be > 0 and finite, got {self.weight}")

    @property
    def rows(self) -> range:
        """Rows of `lengths` that belong to this source."""
        return range(self.first, len(self.lengths) if self.stop is None else self.stop)


class DocumentRows(Protocol):
    """The sequences [first, stop) of one data set by name: cheap to hand to the process that plans."""

    @property
    def first(self) -> int: ...

    @property
    def stop(self) -> int: ...

    def lengths(self) -> NDArray[Any]:
        """Stored tokens of every sequence of the data set, those outside of the rows too."""
        ...

    def source(self) -> DocumentSource:
        """Open the data set."""
        ...


class SourceCursor:
    """The endless order of one source's rows, and the place in it: epoch `epoch`, next element `next`.

    number: place of the source in the blend; part of the shuffle's key, so equal data sets differ in order.
    weight: integer share of tokens.
    skipped: sequences without a training position passed over. drawn_tokens: positions of documents handed out.
    """

    def __init__(self, source: DocumentSource, *, number: int, weight: int, seed: int, shuffle: bool) -> None:
        # A view, so that blocks read from a memory map are plain arrays.
        self._lengths = np.asarray(source.lengths)
        self._label_tokens = source.label_tokens
        self._first = source.rows.start
        self._size = len(source.rows)
        self._key = (seed, number)
        self._shuffle = shuffle
        self.sequence_base = source.sequence_base
        self.weight = weight
        self.fingerprint = _fingerprint(source, number=number, weight=weight)
        self.seek(epoch=0, next_index=0, skipped=0, drawn_tokens=0)

    def seek(self, *, epoch: int, next_index: int, skipped: int, drawn_tokens: int) -> None:
        self.epoch = epoch
        self.next = next_index
        self.skipped = skipped
        self.drawn_tokens = drawn_tokens
        self._permutation: Permutation | None = None
        self._block: list[tuple[int, int]] = []  # reversed: the next (row, positions) is the last

    def advance(self) -> tuple[int, int]:
        """The next row with a training position, and the number of its positions."""
        while True:
            if not self._block:
                self._fill_block()
            self.next += 1
            row, positions = self._block.pop()
            if positions > 0:
                self.drawn_tokens += positions
                return row, positions
            self.skipped += 1

    def positions_of(self, row: int) -> int:
        return max(0, int(self._lengths[row]) - self._label_tokens)

    def _fill_block(self) -> None:
        if self.next == self._size:
            self.epoch += 1
            self.next = 0
            self._permutation = None
        stop = min(self.next + _BLOCK, self._size)
        if self._shuffle:
            if self._permutation is None:
                self._permutation = Permutation(size=self._size, key=(*self._key, self.epoch))
            rows = self._permutation.block(self.next, stop) + self._first
        else:
            rows = np.arange(self.next, stop) + self._first
        positions = self._lengths[rows].astype(np.int64) - self._label_tokens
        self._block = list(zip(rows.tolist(), positions.tolist(), strict=True))
        self._block.reverse()


def _fingerprint(source: DocumentSource, *, number: int, weight: int) -> dict[str, int]:
    """What tells this data from other data, by one pass in bounded memory over the stored lengths."""
    rows = source.rows
    positions = checksum = 0
    lengths = np.asarray(source.lengths)
    for first in range(rows.start, rows.stop, _SCAN_CHUNK):
        chunk = lengths[first : min(first + _SCAN_CHUNK, rows.stop)].astype("<i8")
        if chunk.min() < 0:
            row = first + int(chunk.argmin())
            raise DataError(f"lengths must be >= 0, got {chunk.min()} for sequence {row} of source {number}")
        checksum = zlib.crc32(chunk, checksum)
        positions += int(np.maximum(chunk - source.label_tokens, 0).sum())
    if positions == 0:
        raise DataError(
            f"source {number} must hold a sequence with a training position, but each of its {len(rows)} sequences "
            f"[{rows.start}, {rows.stop}) has at most {source.label_tokens} stored tokens"
        )
    return {
        "num_sequences": len(lengths),
        "first": rows.start,
        "stop": rows.stop,
        "label_tokens": source.label_tokens,
        "weight": weight,
        "sequence_base": source.sequence_base,
        "positions": positions,
        "lengths_crc32": checksum,
    }
