"""Thresholds of the outlier queues from the lengths of the data.

The paper tunes thresholds by hand and does not publish them. This is our rule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import ConfigError, DataError

DEFAULT_NUM_QUEUES = 2
MAX_QUEUES = 4
_GRID = 32  # candidates are multiples of window / 32, from window / 8 on
_FIRST = 4
_MAX_LENGTHS = 1_000_000  # more are thinned evenly: a histogram needs no more


def derive_thresholds(
    lengths: Sequence[int] | NDArray[Any],
    window_tokens: int,
    num_queues: int = DEFAULT_NUM_QUEUES,
    *,
    num_micro_batches: int = 4,
    max_mean_delay_steps: float = 0.5,
    max_fill_steps: float = 16.0,
) -> tuple[int, ...]:
    """At most `num_queues` thresholds in tokens, increasing; () if no queue would be both filled and quick.

    lengths: of stored documents; those over the window count as the pieces they are cut into, those <= 0 not.
    num_micro_batches: N of a step.
    max_mean_delay_steps: predicted mean delay per token; the default is what the paper reports.
    max_fill_steps: a queue must fill within so many steps, or its documents would wait for hundreds.

    A queue gives every micro-batch of a step one document of its band, so two things stay uneven: how much
    the documents of a band differ, and what is in no band at all. Of the thresholds on a grid of window / 32 those
    are taken that leave least: the sum of d^4 below the first threshold plus, in each band, the sum of squared
    differences of d^2 from the band's mean; d^2 because attention is what differs.

    Both bounds follow from the rate of a band. If a share p of all documents, of mean length m, is in it and the
    mean of all is M, then N documents arrive in M / (window p) steps, whatever N is; a document waits for half of
    that times (N - 1) / N; and as the band holds p m / M of all tokens, the band adds (N - 1) / N * m / (2 window)
    steps to the mean delay per token, whatever its share. So each queue costs a delay that depends on its
    mean length alone, and half a step pays for about two; where a third would push the others down to short
    documents, two are returned.
    """
    if not 0 <= num_queues <= MAX_QUEUES:
        raise ConfigError(f"num_queues must be in [0, {MAX_QUEUES}], got {num_queues}")
    if window_tokens < 1:
        raise ConfigError(f"window_tokens must be >= 1, got {window_tokens}")
    if num_micro_batches < 1:
        raise ConfigError(f"num_micro_batches must be >= 1, got {num_micro_batches}")
    bands = _Bands(piece_counts(lengths, window_tokens), window_tokens)
    max_mean_tokens = float("inf")  # of the bands' mean lengths, added up
    if num_micro_batches > 1:
        max_mean_tokens = 2 * max_mean_delay_steps * window_tokens * num_micro_batches / (num_micro_batches - 1)
    min_share = bands.mean_tokens / (window_tokens * max_fill_steps)
    best: tuple[float, tuple[int, ...]] = (float("inf"), ())
    for count in range(1, num_queues + 1):
        for chosen in combinations(range(1, len(bands.edges) - 1), count):
            uneven = bands.uneven(chosen, min_share=min_share, max_mean_tokens=max_mean_tokens)
            if uneven is not None and uneven < best[0]:
                best = uneven, chosen
    return tuple(bands.edges[i] for i in best[1])


class _Bands:
    """Moments of the lengths below each candidate, so that any choice of thresholds costs a few subtractions.

    edges: 0, the candidates, window + 1.
    """

    def __init__(self, piece_counts: dict[int, int], window_tokens: int) -> None:
        candidates = sorted({max(1, window_tokens * k // _GRID) for k in range(_FIRST, _GRID)})
        self.edges = [0, *candidates, window_tokens + 1]
        bins = [[0, 0, 0, 0] for _ in self.edges[1:]]
        # Exact integers: every rank derives the same thresholds whatever its processor's vector width.
        for length, count in piece_counts.items():
            moments = bins[bisect_right(self.edges, length) - 1]
            for power, term in enumerate((1, length, length**2, length**4)):
                moments[power] += count * term
        self._count, self._tokens, self._square, self._fourth = (
            [0, *accumulate(moments[k] for moments in bins)] for k in range(4)
        )
        self.mean_tokens = self._tokens[-1] / self._count[-1]

    def uneven(self, chosen: tuple[int, ...], *, min_share: float, max_mean_tokens: float) -> float | None:
        """What stays uneven with these edges as thresholds; None if a bound is broken."""
        left: float = self._fourth[chosen[0]]
        mean_tokens = 0.0
        for low, high in zip(chosen, (*chosen[1:], len(self.edges) - 1), strict=True):
            count = self._count[high] - self._count[low]
            if count <= 0 or count < min_share * self._count[-1]:
                return None
            mean_tokens += (self._tokens[high] - self._tokens[low]) / count
            left += self._fourth[high] - self._fourth[low] - (self._square[high] - self._square[low]) ** 2 / count
        return left if mean_tokens <= max_mean_tokens else None


def piece_counts(lengths: Sequence[int] | NDArray[Any], window_tokens: int) -> dict[int, int]:
    """How many pieces there are of each length once documents over the window are cut."""
    stored = np.asarray(lengths)
    stored = np.asarray(stored[:: len(stored) // _MAX_LENGTHS + 1], dtype=np.int64)
    stored = stored[stored > 0]
    if not len(stored):
        raise DataError("lengths must hold at least one document of more than 0 tokens")
    rests, counts = np.unique(stored % window_tokens, return_counts=True)
    pieces = dict(zip(rests.tolist(), counts.tolist(), strict=True))
    pieces.pop(0, None)
    pieces[window_tokens] = int((stored // window_tokens).sum())
    return pieces
