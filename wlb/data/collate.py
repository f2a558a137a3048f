"""Tokens of one micro-batch, laid out for packed training.

Documents of 3 and 2 positions stored as [5 6 7 8] and [9 4 3], padded with 0 to a multiple of 4::

    tokens        5 6 7 | 9 4 | 0 0 0
    labels        6 7 8 | 4 3 | 0 0 0
    position_ids  0 1 2 | 0 1 | 0 1 2
    loss_mask     1 1 1 | 1 1 | 0 0 0
    cu_seqlens    0       3     5     8

Only the tail is padded, and padding is a segment of its own: it attends to itself and no document sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents import Document, MicroBatch
from wlb.errors import ConfigError, DataError

ReadTokens = Callable[[int, int, int], NDArray[Any]]
"""(sequence, start, count) -> the `count` stored tokens of `sequence` from `start`, (count,) integers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTokens:
    """One packed sequence of T tokens, padding included.

    tokens: (T,) int64. labels: (T,) int64, the next token of the same document.
    position_ids: (T,) int64, from 0 in each document piece and in the padding.
    loss_mask: (T,) float32, 1 on documents and 0 on padding.
    cu_seqlens: (segments + 1,) int32, leading 0, last T; the padding, if any, is the last segment.
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


def collate(
    micro_batch: MicroBatch,
    read: ReadTokens,
    *,
    pad_to_multiple: int,
    padding_token: int,
    vocab_size: int | None = None,
) -> PackedTokens:
    """Read the tokens of `micro_batch`, one read per document, and lay them out.

    A document of n positions reads n + 1 stored tokens: the label of its last position is the next token of
    the same sequence, also where it was cut. padding_token is the token and the label of padding.
    vocab_size: refuse token ids outside [0, vocab_size).

    Raises DataError if a sequence is shorter than the index said or a token id is outside the vocabulary.
    """
    num_tokens = padded_num_tokens(micro_batch, pad_to_multiple)
    num_real = micro_batch.num_tokens
    tokens = np.full(num_tokens, padding_token, dtype=np.int64)
    labels = np.full(num_tokens, padding_token, dtype=np.int64)
    loss_mask = np.zeros(num_tokens, dtype=np.float32)
    loss_mask[:num_real] = 1.0
    cu_seqlens = micro_batch.cu_seqlens
    first = 0
    for document in micro_batch.documents:
        stored = read(document.sequence, document.start, document.length + 1)
        _check(stored, document, vocab_size)
        stop = first + document.length
        tokens[first:stop] = stored[:-1]
        labels[first:stop] = stored[1:]
        first = stop
    if num_real < num_tokens:
        cu_seqlens = np.append(cu_seqlens, np.int32(num_tokens))
    starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))  # (segments,) -> (T,)
    return PackedTokens(
        tokens=tokens,
        labels=labels,
        position_ids=np.arange(num_tokens, dtype=np.int64) - starts,
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
    )


def _check(stored: NDArray[Any], document: Document, vocab_size: int | None) -> None:
    if len(stored) != document.length + 1:
        raise DataError(
            f"sequence {document.sequence} must hold {document.length + 1} tokens from position {document.start}, "
            f"got {len(stored)}"
        )
    if vocab_size is not None and not (stored.max() < vocab_size and stored.min() >= 0):
        offset = int(np.flatnonzero((stored < 0) | (stored >= vocab_size))[0])
        raise DataError(
            f"token ids must be >= 0 and below the vocabulary size {vocab_size}, got {int(stored[offset])} at "
            f"position {document.start + offset} of sequence {document.sequence}"
        )
