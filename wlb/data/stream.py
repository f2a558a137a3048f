"""The documents of a run, in the order in which they arrive: a pure function of lengths, seed and position.

Nothing here reads a token. A stream looks at stored lengths (usually the memory map of an .idx file) and
hands out `Document`s; where it stands is a few integers, so that a saved run goes on without replaying.

Window of 8, stored documents of 6, 4 and 13 positions, not shuffled::

    cut="stream"   | 6 . 2 | 2 . 6 | 7 .     each multiple of 8 is a border, as in plain training
    cut="window"   | 6 | 4 | 8 | 5 |         only documents over the window are cut
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from wlb.data.saved_state import require_equal
from wlb.data.source import DocumentSource, SourceCursor
from wlb.documents import Document
from wlb.errors import ConfigError, DataError, StateError

__all__ = ["DocumentCut", "DocumentSource", "DocumentStream", "StreamCounters"]

DocumentCut = Literal["stream", "window"]

_STATE_VERSION = 1
_WEIGHT_SCALE = 1 << 32  # the largest weight becomes this integer


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
            SourceCursor(s, number=i, weight=w, seed=seed, shuffle=shuffle)
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

    def take(
        self, wanted_tokens: int, *, arrival: int, at_most_tokens: int | None = None, cut_last: bool = False
    ) -> tuple[Document, ...]:
        """Draw whole pieces until they hold at least `wanted_tokens`; none if that is 0 or less.

        arrival: step index stamped on the pieces.
        at_most_tokens: stop before the piece that would take this draw beyond it; that piece is not lost, it
            comes first in the next draw. None means no bound.
        cut_last: cut the last piece so that the draw holds exactly `wanted_tokens`; its rest comes first in the next.
        """
        pieces: list[Document] = []
        drawn = 0
        while drawn < wanted_tokens:
            source, row, positions, start = self._open or self._begin_document()
            room = self.window_tokens
            if self.cut == "stream":
                room -= self._tokens_drawn % self.window_tokens
            length = min(positions - start, room)
            if cut_last:
                length = min(length, wanted_tokens - drawn)
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
            require_equal("stream version", saved=state["version"], present=_STATE_VERSION)
            for name, present in self._config.items():
                require_equal(f"stream {name}", saved=state["config"][name], present=present)
            for i, cursor in enumerate(self._cursors):
                for name, value in cursor.fingerprint.items():
                    require_equal(f"{name} of source {i}", saved=state["data"][i][name], present=value)
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
