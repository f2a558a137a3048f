"""Tokens of one micro-batch, laid out for packed training.

Documents of 3 and 2 positions stored as [5 6 7 8] and [9 4 3], padded with 0 to a multiple of 4::

    tokens        5 6 7 | 9 4 | 0 0 0
    labels        6 7 8 | 4 3 | 0 0 0
    position_ids  0 1 2 | 0 1 | 0 1 2
    loss_mask     1 1 1 | 1 1 | 0 0 0
    cu_seqlens    0       3     5     8

Only the tail is padded, and padding is a segment of its own: it attends to itself and no document sees it.
A context-parallel rank reads and holds the spans of its shard only; labels come from the document, so that no token
is ever needed from another rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents import MicroBatch
from wlb.errors import ConfigError, DataError
from wlb.sharding.plan import ShardPlan, require_plan_of

ReadTokens = Callable[[int, int, int], NDArray[Any]]
"""(sequence, start, count) -> the `count` stored tokens of `sequence` from `start`, (count,) integers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTokens:
    """The shard of one rank, S tokens, of a packed sequence of T, padding included.

    tokens: (S,) int64. labels: (S,) int64, the next token of the same document.
    position_ids: (S,) int64, from 0 in each document piece and in the padding.
    loss_mask: (S,) float32, 1 on documents and 0 on padding.
    cu_seqlens: (segments + 1,) int32 of the whole pack, leading 0, last T; the padding, if any, is the last segment.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    cu_seqlens: NDArray[np.int32]


def padded_num_tokens(micro_batch: MicroBatch, pad_to_multiple: int) -> int:
    """T of the collated micro-batch, known from lengths alone: the least multiple, and at least one.

    Never 0: an empty micro-batch still passes through the model, as padding.
    """
    if pad_to_multiple < 1:
        raise ConfigError(f"pad_to_multiple must be >= 1, got {pad_to_multiple}")
    return max(1, -(-micro_batch.num_tokens // pad_to_multiple)) * pad_to_multiple


def padded_lengths(micro_batch: MicroBatch, pad_to_multiple: int) -> tuple[int, ...]:
    """Lengths of the segments: of the documents, and of the padding if there is any."""
    padding = padded_num_tokens(micro_batch, pad_to_multiple) - micro_batch.num_tokens
    return (*micro_batch.lengths, padding) if padding else micro_batch.lengths


def collate(
    micro_batch: MicroBatch,
    read: ReadTokens,
    *,
    plan: ShardPlan,
    rank: int = 0,
    padding_token: int,
    vocab_size: int | None = None,
) -> PackedTokens:
    """Read the tokens of `micro_batch` that `rank` holds, one read per span, and lay them out.

    plan: divides `padded_lengths` of the micro-batch; a last document beyond those of the micro-batch is padding.
    A span of n positions reads n + 1 stored tokens: the label of its last position is the next token of
    the same sequence, also where it was cut. padding_token is the token and the label of padding.
    vocab_size: refuse token ids outside [0, vocab_size).

    Raises DataError if a sequence is shorter than the index said or a token id is outside the vocabulary,
    ShardingError if the plan is of other documents.
    """
    documents = micro_batch.documents
    padding = plan.lengths[len(documents) :][:1]
    require_plan_of(plan, (*micro_batch.lengths, *padding), rank=rank)
    tokens = np.full(plan.rank_tokens, padding_token, dtype=np.int64)
    labels = np.full(plan.rank_tokens, padding_token, dtype=np.int64)
    loss_mask = np.zeros(plan.rank_tokens, dtype=np.float32)
    first = 0
    for number, span_start, span_stop in plan.spans_of(rank).tolist():
        count = span_stop - span_start
        stop = first + count
        if number < len(documents):
            document = documents[number]
            start = document.start + span_start
            stored = read(document.sequence, start, count + 1)
            _check(stored, document.sequence, start, count + 1, vocab_size)
            tokens[first:stop] = stored[:-1]
            labels[first:stop] = stored[1:]
            loss_mask[first:stop] = 1.0
        first = stop
    return PackedTokens(
        tokens=tokens,
        labels=labels,
        position_ids=plan.position_ids(rank),
        loss_mask=loss_mask,
        cu_seqlens=np.cumsum((0, *plan.lengths), dtype=np.int32),
    )


def _check(stored: NDArray[Any], sequence: int, start: int, count: int, vocab_size: int | None) -> None:
    if len(stored) != count:
        raise DataError(f"sequence {sequence} must hold {count} tokens from position {start}, got {len(stored)}")
    if vocab_size is not None and not (stored.max() < vocab_size and stored.min() >= 0):
        offset = int(np.flatnonzero((stored < 0) | (stored >= vocab_size))[0])
        raise DataError(
            f"token ids must be >= 0 and below the vocabulary size {vocab_size}, got {int(stored[offset])} at "
            f"position {start + offset} of sequence {sequence}"
        )
