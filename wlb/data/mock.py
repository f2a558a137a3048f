"""Documents that no file holds: lengths with a long tail and tokens by arithmetic, both of a document's number alone.

Any rank computes any document, so a run needs no file and every rank sees the same data. Most lengths are
lognormal around 1/40 of the window, and one document in 64 is an outlier of a quarter of the window up to all of
it: they hold about one token in six, as in WLB-LLM's published lengths at 128K. Tokens of a document are an
arithmetic progression, so that a model has something to learn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from wlb.data.permutation import hash_numbers
from wlb.data.source import DocumentSource
from wlb.errors import ConfigError

_TABLE_BITS = 12
_NUM_LENGTHS = 1 << _TABLE_BITS
_NUM_OUTLIERS = _NUM_LENGTHS // 64
_MEDIAN_OF_WINDOW = 1 / 40
_SIGMA = 1.0  # of the logarithm
_SHORTEST_OUTLIER_OF_WINDOW = 1 / 4
_LONGEST_STRIDE = 8
_LABEL_TOKENS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MockDocuments:
    """A numbered set of documents, with the reading interface of an index of token files.

    count: documents. window_tokens: the longest has so many training positions, one fewer than it stores.
    vocab_size: token ids are below it. seed: chooses the set.
    """

    count: int
    window_tokens: int
    vocab_size: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("count", "window_tokens", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of mock documents must be >= 1, got {getattr(self, name)}")

    def __len__(self) -> int:
        return self.count

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Stored tokens of each document, (count,), read-only."""
        return _stored_lengths(self.count, self.window_tokens, self.seed)

    def get(self, row: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """`length` stored tokens of document `row` from `offset`, (length,); to its end without a length."""
        stop = int(self.sequence_lengths[row]) if length is None else offset + length
        start, stride = hash_numbers(np.array([2 * row, 2 * row + 1], dtype=np.uint64), self._token_key).tolist()
        start %= self.vocab_size  # first, or the sums would pass 64 bits
        places = np.arange(offset, stop, dtype=np.int64)
        tokens: NDArray[np.int64] = (start + (1 + stride % _LONGEST_STRIDE) * places) % self.vocab_size
        return tokens

    def rows(self, first: int, stop: int) -> MockRows:
        """Documents [first, stop) as a document source."""
        return MockRows(documents=self, first=first, stop=stop)

    @property
    def _token_key(self) -> int:
        # Apart from the key of the lengths, which is even.
        return 2 * self.seed + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MockRows:
    """The documents [first, stop) as a document source, by name: cheap to hand to a process."""

    documents: MockDocuments
    first: int
    stop: int

    def lengths(self) -> NDArray[np.int32]:
        """Stored tokens of every document of the set, those outside of the rows too, (count,)."""
        return self.documents.sequence_lengths

    def source(self) -> DocumentSource:
        """As of a token file: the last stored token is only ever a label."""
        return DocumentSource(lengths=self.lengths(), label_tokens=_LABEL_TOKENS, first=self.first, stop=self.stop)


@lru_cache(maxsize=4)
def _stored_lengths(count: int, window_tokens: int, seed: int) -> NDArray[np.int32]:
    numbers = hash_numbers(np.arange(count, dtype=np.uint64), 2 * seed)
    lengths = _length_table(window_tokens)[(numbers % np.uint64(_NUM_LENGTHS)).astype(np.int64)]
    lengths.flags.writeable = False
    return lengths


def _length_table(window_tokens: int) -> NDArray[np.int32]:
    """Stored tokens at equally likely quantiles, (_NUM_LENGTHS,).

    A table of integers, because the last bit of a vectorised exponential may differ from one processor to another,
    and with it a length and the plan of a rank.
    """
    shortest_outlier = window_tokens * _SHORTEST_OUTLIER_OF_WINDOW
    body = _NUM_LENGTHS - _NUM_OUTLIERS
    normal = NormalDist(mu=log(window_tokens * _MEDIAN_OF_WINDOW), sigma=_SIGMA)
    positions = [min(exp(normal.inv_cdf((i + 0.5) / body)), shortest_outlier) for i in range(body)]
    # From the shortest outlier to the window, both included, evenly in the logarithm.
    ratio = window_tokens / shortest_outlier
    positions += [shortest_outlier * ratio ** (i / (_NUM_OUTLIERS - 1)) for i in range(_NUM_OUTLIERS)]
    return np.array([max(1, round(p)) + _LABEL_TOKENS for p in positions], dtype=np.int32)
