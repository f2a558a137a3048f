"""What a step trains: documents, and the packed micro-batches that hold them.

Data flows through these types in one direction::

    index file -> Document -> MicroBatch -> StepPlan -> packed tensors -> gradient

A `Document` is a run of *training positions*: position i feeds token i and is taught token i + 1 of the
same document, so a stored document of L tokens gives L - 1 positions and its last token is only ever a
label. Lengths everywhere in this package count positions ("tokens" for short). A document longer than
the window is cut, and each piece is a Document of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A run of training positions that attend only to each other.

    doc_id: rank in arrival order; unique in a run; breaks every tie.
    length: positions, > 0.
    arrival: index of the step whose arrivals it belongs to.
    sequence: row of the index it comes from (of the concatenated index, for blends).
    start: first of its positions in that sequence, > 0 only for a later piece of a cut document.

    Packers read `doc_id`, `length` and `arrival`; only the reader of tokens looks at the other two.
    """

    doc_id: int
    length: int
    arrival: int
    sequence: int
    start: int

    def __post_init__(self) -> None:
        if self.length <= 0:
            raise ValueError(f"length must be > 0, got {self.length} (document {self.doc_id})")


def documents_from_lengths(lengths: Iterable[int], *, arrival: int = 0, first_id: int = 0) -> tuple[Document, ...]:
    """Documents for planning without an index: document i is sequence `first_id + i`, whole."""
    return tuple(
        Document(doc_id=i, length=int(n), arrival=arrival, sequence=i, start=0)
        for i, n in enumerate(lengths, start=first_id)
    )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One packed sequence: documents back to back.

    >>> MicroBatch(documents=documents_from_lengths([5, 2])).cu_seqlens
    array([0, 5, 7], dtype=int32)
    """

    documents: tuple[Document, ...]

    @cached_property
    def num_tokens(self) -> int:
        return sum(d.length for d in self.documents)

    @cached_property
    def max_seqlen(self) -> int:
        return max((d.length for d in self.documents), default=0)

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """int32, leading 0: document i is at [cu_seqlens[i], cu_seqlens[i + 1])."""
        return np.fromiter(accumulate((d.length for d in self.documents), initial=0), dtype=np.int32)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(d.length for d in self.documents)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What every rank trains in one optimizer step.

    replicas: for each data-parallel rank its micro-batches in the order in which the pipeline runs them.
    waiting: documents that arrived and are not trained yet (outlier queues and carried ones).
    """

    step: int
    replicas: tuple[tuple[MicroBatch, ...], ...]
    waiting: tuple[Document, ...]

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        return tuple(m for replica in self.replicas for m in replica)

    @cached_property
    def num_tokens(self) -> int:
        return sum(m.num_tokens for m in self.micro_batches)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit digest of which document is trained where, equal on ranks that hold the same plan."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(str(self.step).encode())
        for replica in self.replicas:
            digest.update(b"|r")
            for m in replica:
                digest.update(b"|m")
                for d in m.documents:
                    digest.update(f",{d.doc_id}:{d.sequence}:{d.start}:{d.length}".encode())
        return int.from_bytes(digest.digest(), "big") >> 1

    def mean_delay_steps(self) -> float:
        """Steps that the trained tokens of this step waited, averaged over tokens."""
        tokens = self.num_tokens
        if tokens == 0:
            return 0.0
        return sum((self.step - d.arrival) * d.length for m in self.micro_batches for d in m.documents) / tokens


def total_tokens(documents: Sequence[Document]) -> int:
    """Positions in `documents`."""
    return sum(d.length for d in documents)
