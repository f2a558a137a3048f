"""Putting documents one by one where least work is: the inner loop of every balancing packer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from wlb.documents import Document, total_tokens
from wlb.errors import PackingError

Fallback = Literal["shortest", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Filled micro-batches.

    filled: documents of each micro-batch, in the order in which they were placed.
    work: work of each micro-batch, in the unit that `place` was given.
    left: documents that fitted nowhere, in the order in which they were tried.
    """

    filled: tuple[tuple[Document, ...], ...]
    work: tuple[int, ...]
    left: tuple[Document, ...]


class _Lowest:
    """Index of the smallest of some integers that only grow; ties give the lowest index."""

    def __init__(self, count: int) -> None:
        self.values = [0] * count
        self._heap = [(0, i) for i in range(count)]

    def index(self) -> int:
        while self._heap[0][0] != self.values[self._heap[0][1]]:
            heappop(self._heap)  # out of date: the value has grown since and has an entry further down
        return self._heap[0][1]

    def add(self, index: int, amount: int) -> None:
        self.values[index] += amount
        heappush(self._heap, (self.values[index], index))


def place(
    documents: Sequence[Document],
    *,
    num_micro_batches: int,
    limit_tokens: int,
    work: Callable[[int], int],
    fallback: Fallback,
) -> Placement:
    """Give each document, in the order given, to the micro-batch with least work.

    limit_tokens: a micro-batch holds at most so many.
    work: integer work > 0 of a document of this length.
    fallback: where a document goes that does not fit there: to the micro-batch with the fewest tokens
        ("shortest", as Algorithm 1 of WLB-LLM has it) or to the one with least work among those it fits ("any").
        If it fits nowhere it is left.

    As every document has some work, no micro-batch stays empty while documents are as many as micro-batches.
    """
    filled: list[list[Document]] = [[] for _ in range(num_micro_batches)]
    works, tokens = _Lowest(num_micro_batches), _Lowest(num_micro_batches)
    left: list[Document] = []
    for document in documents:
        length = document.length
        target = works.index()
        if tokens.values[target] + length > limit_tokens:
            target = tokens.index()
            if tokens.values[target] + length > limit_tokens:
                left.append(document)
                continue
            if fallback == "any":
                target = min(
                    (i for i in range(num_micro_batches) if tokens.values[i] + length <= limit_tokens),
                    key=works.values.__getitem__,
                )
        filled[target].append(document)
        works.add(target, work(length))
        tokens.add(target, length)
    return Placement(filled=tuple(tuple(f) for f in filled), work=tuple(works.values), left=tuple(left))


def place_all(
    documents: Sequence[Document],
    *,
    num_micro_batches: int,
    num_replicas: int,
    limit_tokens: int,
    work: Callable[[int], int],
    fallback: Fallback,
) -> Placement:
    """Place every document, longest first, in as many micro-batches beyond `num_micro_batches` as that takes.

    The count stays a multiple of `num_replicas` above `num_micro_batches`. `left` is empty.
    """
    ordered = longest_first(documents)
    require_fit(ordered, limit_tokens=limit_tokens)
    missing_tokens = total_tokens(ordered) - num_micro_batches * limit_tokens
    count = num_micro_batches
    while True:
        extra = max(0, -(-missing_tokens // limit_tokens))
        count += -(-extra // num_replicas) * num_replicas
        placement = place(ordered, num_micro_batches=count, limit_tokens=limit_tokens, work=work, fallback=fallback)
        if not placement.left:
            return placement
        missing_tokens = total_tokens(placement.left)


def longest_first(documents: Sequence[Document]) -> list[Document]:
    """Sorted by length, longest first; equal lengths by document id."""
    return sorted(documents, key=lambda d: (-d.length, d.doc_id))


def require_fit(documents: Sequence[Document], *, limit_tokens: int) -> None:
    """Raise PackingError if a document fits in no micro-batch."""
    for d in documents:
        if d.length > limit_tokens:
            raise PackingError(
                f"length must be <= {limit_tokens}, the longest document that fits a micro-batch, "
                f"got {d.length} (document {d.doc_id})"
            )
