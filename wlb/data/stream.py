"""The documents of a run, in the order in which they arrive: a pure function of lengths, seed and position.

Nothing here reads a token. A stream looks at stored lengths (usually the memory map of an .idx file) and
hands out `Document`s; where it stands is a few integers, so that a saved run goes on without replaying.

Window of 8, stored documents of 6, 4 and 13 positions, not shuffled::

    cut="stream"   | 6 . 2 | 2 . 6 | 7 .     each multiple of 8 is a border, as in plain training
    cut="window"   | 6 | 4 | 8 | 5 |         only documents over the window are cut
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from wlb.data.permutation import Permutation
from wlb.documents import Document
from wlb.errors import ConfigError, DataError, StateError

DocumentCut = Literal["stream", "window"]

_STATE_VERSION = 1
_BLOCK = 512  # shuffled rows looked up at once; a cache only, never part of the state
_SCAN_CHUNK = 1 << 16  # sequences per pass of the scan at construction: 0.5 MB
_WEIGHT_SCALE = 1 << 32  # the largest weight becomes this integer


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCounters:
    """What a stream has handed out so far.

    documents_drawn: stored documents begun. pieces_drawn: `Document`s given out. tokens_drawn: their positions.
    cut_documents: stored documents that were cut into more than one piece.
    skipped_empty: sequences passed over because they hold no training position.
    epochs: per source, the epoch that its latest document belongs to.
    """

    documents_drawn: int
    pieces_drawn: int
    tokens_drawn: int
    cut_documents: int
    skipped_empty: int
    epochs: tuple[int, ...]


class DocumentStream:
    """Documents of one or several sources without end, reshuffled every epoch.

    sources: at least one. With several, each document comes from the source that is furthest behind its share
        of tokens (ties: the first), so shares hold to within one document at any time.
    window_tokens: longest piece handed out.
    cut: "stream" cuts where concatenating all documents and cutting at every multiple of the window would;
        "window" cuts only documents longer than the window, into full windows and a rest. The order of documents
        is the same for both.
    seed: chooses the order of every epoch of every source.
    shuffle: False keeps the stored order.

    Raises DataError if a source has no sequence with a training position, or a negative length.
    """

    def __init__(
        self,
        sources: tuple[DocumentSource, ...] | list[DocumentSource],
        *,
        window_tokens: int,
        cut: DocumentCut,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        if not sources:
            raise DataError("sources must hold at least one source, got none")
        if window_tokens < 1:
            raise ConfigError(f"window_tokens must be >= 1, got {window_tokens}")
        if cut not in get_args(DocumentCut):
            raise ConfigError(f"cut must be one of {', '.join(get_args(DocumentCut))}, got {cut!r}")
        self.window_tokens = window_tokens
        self.cut = cut
        self._config: dict[str, int | str] = {
            "window_tokens": window_tokens,
            "cut": cut,
            "seed": seed,
            "shuffle": int(shuffle),
            "num_sources": len(sources),
        }
        largest = max(s.weight for s in sources)
        # Integer weights: shares are compared without rounding, so every rank and every resume agrees.
        weights = [max(1, round(s.weight / largest * _WEIGHT_SCALE)) for s in sources]
        self._cursors = [
            _SourceCursor(s, number=i, weight=w, seed=seed, shuffle=shuffle)
            for i, (s, w) in enumerate(zip(sources, weights, strict=True))
        ]
        self._total_weight = sum(weights)
        self._deficits = [0] * len(sources)  # weight * tokens of all sources - total weight * own tokens
        self._documents_drawn = self._pieces_drawn = self._tokens_drawn = self._cut_documents = 0
        # The document of which pieces are still to come: (source, row, positions, first position not yet given).
        self._open: tuple[int, int, int, int] | None = None

    @property
    def epoch_tokens(self) -> int:
        """Training positions in one pass over every source."""
        return sum(int(c.fingerprint["positions"]) for c in self._cursors)

    @property
    def tokens_drawn(self) -> int:
        """Positions of all pieces given out."""
        return self._tokens_drawn

    @property
    def counters(self) -> StreamCounters:
        return StreamCounters(
            documents_drawn=self._documents_drawn,
            pieces_drawn=self._pieces_drawn,
            tokens_drawn=self._tokens_drawn,
            cut_documents=self._cut_documents,
            skipped_empty=sum(c.skipped for c in self._cursors),
            epochs=tuple(c.epoch for c in self._cursors),
        )

    def take(self, wanted_tokens: int, *, arrival: int, at_most_tokens: int | None = None) -> tuple[Document, ...]:
        """Draw whole pieces until they hold at least `wanted_tokens`; none if that is 0 or less.

        arrival: step index stamped on the pieces.
        at_most_tokens: stop before the piece that would take this draw beyond it; that piece is not lost, it
            comes first in the next draw. None means no bound.
        """
        pieces: list[Document] = []
        drawn = 0
        while drawn < wanted_tokens:
            source, row, positions, start = self._open or self._begin_document()
            room = self.window_tokens
            if self.cut == "stream":
                room -= self._tokens_drawn % self.window_tokens
            length = min(positions - start, room)
            if at_most_tokens is not None and drawn + length > at_most_tokens:
                self._open = (source, row, positions, start)
                break
            pieces.append(
                Document(
                    doc_id=self._pieces_drawn,
                    length=length,
                    arrival=arrival,
                    sequence=self._cursors[source].sequence_base + row,
                    start=start,
                )
            )
            drawn += length
            self._pieces_drawn += 1
            self._tokens_drawn += length
            stop = start + length
            if stop == positions:
                self._open = None
            else:
                self._cut_documents += start == 0
                self._open = (source, row, positions, stop)
        return tuple(pieces)

    def state(self) -> dict[str, Any]:
        """Where the stream stands: JSON-able, of a size that depends on the number of sources only."""
        return {
            "version": _STATE_VERSION,
            "config": dict(self._config),
            "data": [dict(c.fingerprint) for c in self._cursors],
            "sources": [[c.epoch, c.next, c.skipped, c.drawn_tokens] for c in self._cursors],
            "open": None if self._open is None else [self._open[0], self._open[1], self._open[3]],
            "documents_drawn": self._documents_drawn,
            "pieces_drawn": self._pieces_drawn,
            "tokens_drawn": self._tokens_drawn,
            "cut_documents": self._cut_documents,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`; reads no length but one and replays nothing.

        Raises StateError, and changes nothing, if the state is of other data or of another configuration.
        """
        try:
            same("stream version", state["version"], _STATE_VERSION)
            for name, present in self._config.items():
                same(f"stream {name}", state["config"][name], present)
            for i, cursor in enumerate(self._cursors):
                for name, value in cursor.fingerprint.items():
                    same(f"{name} of source {i}", state["data"][i][name], value)
            places = [(epoch, index, skipped, tokens) for epoch, index, skipped, tokens in state["sources"]]
            counts = [state[name] for name in ("documents_drawn", "pieces_drawn", "tokens_drawn", "cut_documents")]
            opened = None if state["open"] is None else self._reopen(*state["open"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"the saved stream state must be complete, got {error!r}") from error
        for cursor, (epoch, index, skipped, tokens) in zip(self._cursors, places, strict=True):
            cursor.seek(epoch=epoch, next_index=index, skipped=skipped, drawn_tokens=tokens)
        total = sum(c.drawn_tokens for c in self._cursors)
        self._deficits = [c.weight * total - self._total_weight * c.drawn_tokens for c in self._cursors]
        self._documents_drawn, self._pieces_drawn, self._tokens_drawn, self._cut_documents = counts
        self._open = opened

    def _reopen(self, source: int, row: int, start: int) -> tuple[int, int, int, int]:
        return source, row, self._cursors[source].positions_of(row), start

    def _begin_document(self) -> tuple[int, int, int, int]:
        deficits = self._deficits
        source = 0 if len(deficits) == 1 else deficits.index(max(deficits))
        row, positions = self._cursors[source].advance()
        if len(deficits) > 1:
            for i, cursor in enumerate(self._cursors):
                deficits[i] += cursor.weight * positions
            deficits[source] -= self._total_weight * positions
        self._documents_drawn += 1
        return source, row, positions, 0


class _SourceCursor:
    """The endless order of one source's rows, and the place in it."""

    def __init__(self, source: DocumentSource, *, number: int, weight: int, seed: int, shuffle: bool) -> None:
        # A plain view: numpy wraps every block read from a memory map in a memmap object, at 10 x the time.
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


def same(field: str, saved: object, present: object) -> None:
    """Raise StateError unless a saved field equals the present one."""
    if saved != present:
        raise StateError(f"{field} must be what the saved state was made with: saved {saved!r}, present {present!r}")


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
