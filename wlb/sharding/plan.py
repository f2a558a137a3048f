"""Which context-parallel rank holds which tokens of a micro-batch.

Documents of 5 and 3 tokens over 2 ranks, each document cut head-tail::

    document 0   0 1 2 3 4         rank 0   0:[0, 2)  0:[4, 5)  1:[2, 3)
    document 1   0 1 2             rank 1   0:[2, 4)  1:[0, 2)

Every rank holds equally many tokens, in the order of its spans: its *shard*. A token keeps its position in its
document, and attends to the keys [0, position] of it wherever they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

import numpy as np

from wlb.errors import ShardingError
from wlb.sharding.rows import Int64, expanded


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Positions [start, stop) of one document; its causal keys are [0, stop).

    document: index in the micro-batch.
    """

    document: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """A partition of a micro-batch's documents into equal shards, one a rank.

    lengths: of the documents; padding, if any, is the last of them.
    ranks: spans of each rank, in the order in which it holds them: by document, then by start. A rank's spans do
        not touch each other within a document: what is contiguous is one span.

    Raises:
        ShardingError: the spans are no partition, are out of order, or the ranks hold unequally many tokens.
    """

    lengths: tuple[int, ...]
    ranks: tuple[tuple[Span, ...], ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ShardingError("cp_size must be >= 1, got 0 ranks")
        tokens = [sum(s.num_tokens for s in spans) for spans in self.ranks]
        if len(set(tokens)) > 1:
            raise ShardingError(f"every rank must hold equally many tokens, got {tokens}")
        for rank, spans in enumerate(self.ranks):
            for s in spans:
                if not (0 <= s.document < len(self.lengths) and 0 <= s.start < s.stop <= self.lengths[s.document]):
                    raise ShardingError(f"a span must lie in its document, got {s} on rank {rank}")
            for one, two in pairwise(spans):
                if (one.document, one.stop) >= (two.document, two.start):
                    raise ShardingError(
                        f"spans must be ordered by document and start, and not touch, got {one} before {two} "
                        f"on rank {rank}"
                    )
        at = [0] * len(self.lengths)
        for s in sorted((s for spans in self.ranks for s in spans), key=lambda s: (s.document, s.start)):
            if s.start != at[s.document]:
                raise ShardingError(f"document {s.document} must be held once from {at[s.document]}, got {s}")
            at[s.document] = s.stop
        for document, (stop, length) in enumerate(zip(at, self.lengths, strict=True)):
            if stop != length:
                raise ShardingError(f"document {document} must be held up to {length}, got {stop}")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            # Of a plan that came as a table, the objects are made for whoever asks: there may be thousands.
            if name != "ranks" or "table" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            ranks: list[list[Span]] = [[] for _ in range(self.cp_size)]
            for rank, document, start, stop in self.table.tolist():
                ranks[rank].append(Span(document=document, start=start, stop=stop))
            self.__dict__["ranks"] = tuple(map(tuple, ranks))
            return self.__dict__["ranks"]

    @cached_property
    def cp_size(self) -> int:
        return len(self.ranks)

    @property
    def num_tokens(self) -> int:
        """Of the micro-batch."""
        return sum(self.lengths)

    @property
    def rank_tokens(self) -> int:
        """Of one shard."""
        return self.num_tokens // self.cp_size

    @cached_property
    def starts(self) -> Int64:
        """(D,) index of each document's first token in the pack."""
        return np.cumsum((0, *self.lengths[:-1]), dtype=np.int64)[: len(self.lengths)]

    def spans_of(self, rank: int) -> Int64:
        """(spans, 3) document, start, stop of what `rank` holds."""
        first, last = np.searchsorted(self.table[:, 0], [rank, rank + 1])
        return self.table[first:last, 1:]

    def position_ids(self, rank: int) -> Int64:
        """(T / cp,) position in its document of each token that `rank` holds."""
        _, starts, stops = self.spans_of(rank).T
        return expanded(starts, stops)

    def pack_indices(self, rank: int) -> Int64:
        """(T / cp,) index in the pack of each token that `rank` holds."""
        documents, starts, stops = self.spans_of(rank).T
        first = self.starts[documents]
        return expanded(first + starts, first + stops)

    @cached_property
    def rearrange(self) -> Int64:
        """(T,) `pack[rearrange]` is the shard of rank 0, then of rank 1, ..."""
        return np.concatenate([self.pack_indices(r) for r in range(self.cp_size)])

    @cached_property
    def restore(self) -> Int64:
        """(T,) undoes `rearrange`: `pack[rearrange][restore]` is the pack."""
        restore = np.empty(self.num_tokens, dtype=np.int64)
        restore[self.rearrange] = np.arange(self.num_tokens)
        return restore

    def causal_pairs(self, rank: int) -> int:
        """(query, key) pairs that `rank` computes."""
        return sum(span_pairs(s.start, s.stop) for s in self.ranks[rank])

    def received_tokens(self, rank: int) -> int:
        """Tokens whose keys and values `rank` needs from others: of each document up to its last query."""
        last: dict[int, int] = {}
        for s in self.ranks[rank]:
            last[s.document] = s.stop  # spans are ordered by start
        return sum(last.values()) - self.rank_tokens

    @cached_property
    def fingerprint(self) -> int:
        """63-bit digest, equal where plans are."""
        digest = hashlib.blake2b(self.table.tobytes(), digest_size=8)
        digest.update(np.array((self.cp_size, *self.lengths), dtype=np.int64).tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    @cached_property
    def table(self) -> Int64:
        """(spans, 4) rank, document, start, stop: what crosses a process boundary."""
        rows = [(rank, s.document, s.start, s.stop) for rank, spans in enumerate(self.ranks) for s in spans]
        return np.array(rows, dtype=np.int64).reshape(len(rows), 4)

    @classmethod
    def from_table(cls, table: Int64, *, lengths: Sequence[int], cp_size: int) -> ShardPlan:
        """Undo `table`. Nothing is checked again: it was when the plan was made, and ranks compare fingerprints."""
        plan = object.__new__(cls)
        plan.__dict__.update(lengths=tuple(lengths), table=table, cp_size=cp_size)
        return plan


def span_pairs(start: int, stop: int) -> int:
    """Exact causal (query, key) pairs of the queries [start, stop) of a document.

    >>> span_pairs(0, 3), span_pairs(2, 3)
    (6, 3)
    """
    return (stop * (stop + 1) - start * (start + 1)) // 2


def plan_of_chunks(lengths: Sequence[int], cp_size: int, pieces: Iterable[tuple[int, int, int, int]]) -> ShardPlan:
    """A plan from (rank, document, start, stop) pieces in any order; empty ones are left out, touching ones joined."""
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(cp_size)]
    for rank, document, start, stop in pieces:
        if start < stop:
            ranks[rank].append((document, start, stop))
    joined: list[tuple[Span, ...]] = []
    for held in ranks:
        spans: list[tuple[int, int, int]] = []
        for document, start, stop in sorted(held):
            if spans and spans[-1][0] == document and spans[-1][2] == start:
                start = spans.pop()[1]
            spans.append((document, start, stop))
        joined.append(tuple(Span(document=d, start=a, stop=b) for d, a, b in spans))
    return ShardPlan(lengths=tuple(lengths), ranks=tuple(joined))


def unsharded(lengths: Sequence[int]) -> ShardPlan:
    """Everything on one rank."""
    whole = tuple(Span(document=i, start=0, stop=n) for i, n in enumerate(lengths))
    return ShardPlan(lengths=tuple(lengths), ranks=(whole,))


def require_plan_of(plan: ShardPlan, lengths: Sequence[int], *, rank: int) -> None:
    """Raises ShardingError unless `plan` divides these documents, naming `rank` and the first one that differs."""
    for document, (planned, length) in enumerate(zip_longest(plan.lengths, lengths, fillvalue=0)):
        if planned != length:
            raise ShardingError(
                f"rank {rank}: the shard plan must fit its micro-batch, but document {document} has {length} tokens "
                f"and the plan divides {planned}"
            )


def require_divisible(lengths: Sequence[int], cp_size: int) -> int:
    """Tokens of a shard. Raises ShardingError unless every rank can hold as many."""
    if cp_size < 1:
        raise ShardingError(f"cp_size must be >= 1, got {cp_size}")
    for document, length in enumerate(lengths):
        if length < 1:
            raise ShardingError(f"lengths must be >= 1, got {length} (document {document})")
    tokens = sum(lengths)
    if tokens % cp_size:
        raise ShardingError(f"tokens of a micro-batch must be a multiple of cp_size = {cp_size}, got {tokens}")
    return tokens // cp_size
