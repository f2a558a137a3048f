"""Which pieces of documents meet, for all ranks of a plan at once, in numpy.

Every token of every rank has a place on one line: rank * tokens of the micro-batch + index in the pack. Spans of a plan
lie there in order and apart, so what an interval meets are neighbours that two binary searches find.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wlb.sharding.plan import ShardPlan
from wlb.sharding.rows import Int64, expanded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Pieces of documents in columns, by rank, document and start.

    at: place on the line of the first token. ranks, starts, stops: rank, and positions in the document.
    rows: row of the first token where the rank holds it; of intervals that are wanted it has no meaning.
    num_tokens, cp_size: of the plan.
    """

    at: Int64
    ranks: Int64
    starts: Int64
    stops: Int64
    rows: Int64
    num_tokens: int
    cp_size: int

    def __len__(self) -> int:
        return len(self.at)

    @property
    def lengths(self) -> Int64:
        return self.stops - self.starts

    def of_rank(self, rank: int) -> Spans:
        """The pieces of one rank."""
        first, last = np.searchsorted(self.ranks, [rank, rank + 1])
        return self._taken(slice(first, last), self.at[first:last])

    def at_rank(self, rank: int) -> Spans:
        """All pieces, each where `rank` has these tokens on its part of the line."""
        return self._taken(slice(None), self.at + (rank - self.ranks) * self.num_tokens)

    def at_every_rank(self) -> Spans:
        """The pieces of one rank, on the part of rank 0, of rank 1, ..."""
        offsets = np.repeat(np.arange(self.cp_size), len(self))
        again = np.tile(np.arange(len(self)), self.cp_size)
        return self._taken(again, self.at[again] + (offsets - self.ranks[again]) * self.num_tokens)

    def before(self, lows: Int64) -> Spans:
        """What lies before each piece, from position `lows` of its document on."""
        return Spans(
            at=self.at - self.starts + lows,
            ranks=self.ranks,
            starts=lows,
            stops=self.starts,
            rows=self.rows,
            num_tokens=self.num_tokens,
            cp_size=self.cp_size,
        )

    def _taken(self, which: slice | Int64, at: Int64) -> Spans:
        return Spans(
            at=at,
            ranks=self.ranks[which],
            starts=self.starts[which],
            stops=self.stops[which],
            rows=self.rows[which],
            num_tokens=self.num_tokens,
            cp_size=self.cp_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlaps:
    """What two lists of pieces have in common, in the order of the first, then of the second.

    first, second: which ones meet. from_first, from_second: tokens from the beginning of either.
    """

    first: Int64
    second: Int64
    from_first: Int64
    from_second: Int64
    lengths: Int64

    def as_spans(self, second: Spans) -> Spans:
        """They as pieces of their own, at the places of the second list."""
        starts = second.starts[self.second] + self.from_second
        return Spans(
            at=second.at[self.second] + self.from_second,
            ranks=second.ranks[self.second],
            starts=starts,
            stops=starts + self.lengths,
            rows=second.rows[self.second] + self.from_second,
            num_tokens=second.num_tokens,
            cp_size=second.cp_size,
        )


def overlaps(first: Spans, second: Spans) -> Overlaps:
    """second: in order on the line, and apart. Pieces of the first list may be empty, and may meet each other."""
    low, high = first.at, first.at + first.lengths
    begin = np.searchsorted(second.at + second.lengths, low, side="right")
    end = np.maximum(np.searchsorted(second.at, high, side="left"), begin)
    one, two = np.repeat(np.arange(len(first)), end - begin), expanded(begin, end)
    start = np.maximum(low[one], second.at[two])
    lengths = np.minimum(high[one], second.at[two] + second.lengths[two]) - start
    return Overlaps(
        first=one, second=two, from_first=start - low[one], from_second=start - second.at[two], lengths=lengths
    )


def spans_of(plan: ShardPlan) -> Spans:
    """All that the ranks of a plan hold."""
    ranks, documents, starts, stops = plan.table.T
    lengths = stops - starts
    return Spans(
        at=ranks * plan.num_tokens + plan.starts[documents] + starts,
        ranks=ranks,
        starts=starts,
        stops=stops,
        rows=np.cumsum(lengths) - lengths - ranks * plan.rank_tokens,
        num_tokens=plan.num_tokens,
        cp_size=plan.cp_size,
    )


def wanted_of(spans: Spans, lows: Int64, ends: Int64) -> Spans:
    """Keys [low, end) that each span needs where low lies before it; what touches within a document is joined."""
    need = lows < spans.starts
    document_at = (spans.at - spans.starts)[need]
    lows, ends = lows[need], ends[need]
    begins = np.ones(len(lows), dtype=np.bool_)
    begins[1:] = (document_at[1:] != document_at[:-1]) | (lows[1:] > ends[:-1])
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(lows))[: len(first)] - 1
    return Spans(
        at=document_at[first] + lows[first],
        ranks=spans.ranks[need][first],
        starts=lows[first],
        stops=ends[last],
        rows=spans.rows[need][first],
        num_tokens=spans.num_tokens,
        cp_size=spans.cp_size,
    )
