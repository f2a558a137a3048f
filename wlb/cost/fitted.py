"""Cost fitted to measured micro-batches: seconds = a * (sum of squared lengths) + b * tokens + c.

Forward and backward are fitted on their own, with coefficients that cannot be negative, by least squares of the
relative error: a short micro-batch counts as much as a long one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb.cost.least_squares import fit_seconds
from wlb.cost.model import causal_pairs, message_s, require_not_negative
from wlb.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMicroBatch:
    """One timed micro-batch: its documents' lengths and the seconds of its two passes."""

    lengths: tuple[int, ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuadraticTime:
    """square_s * sum of squared lengths + token_s * tokens + micro_batch_s."""

    square_s: float
    token_s: float
    micro_batch_s: float

    def __post_init__(self) -> None:
        for name in ("square_s", "token_s", "micro_batch_s"):
            require_not_negative(name, getattr(self, name))

    def seconds(self, lengths: Iterable[int]) -> float:
        """Of one micro-batch."""
        squares, tokens = _features(lengths)
        return self.square_s * squares + self.token_s * tokens + self.micro_batch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCost:
    """A cost model of one stretch of layers from its measured times. Implements `CostModel`.

    latency_s, bytes_per_s: of one message between ranks; bytes_per_s None means that moving data is free.
    """

    forward: QuadraticTime
    backward: QuadraticTime
    latency_s: float = 0.0
    bytes_per_s: float | None = None

    @property
    def fixed_s(self) -> float:
        return self.forward.micro_batch_s

    def attention_s(self, q_tokens: int, kv_tokens: int) -> float:
        return self.forward.square_s * 2 * causal_pairs(q_tokens, kv_tokens)

    def linear_s(self, tokens: int) -> float:
        return self.forward.token_s * tokens

    def communication_s(self, num_bytes: int) -> float:
        return message_s(num_bytes, latency_s=self.latency_s, bytes_per_s=self.bytes_per_s)

    def forward_s(self, lengths: Iterable[int]) -> float:
        return self.forward.seconds(lengths)

    def backward_s(self, lengths: Iterable[int]) -> float:
        return self.backward.seconds(lengths)


def fit_cost(measured: Sequence[MeasuredMicroBatch]) -> FittedCost:
    """The cost model closest to the measured times.

    measured: at least 3 micro-batches, times > 0. Raises DataError otherwise.

    Lengths that all look alike cannot tell the three terms apart; the fit then still predicts such micro-batches.
    """
    if len(measured) < 3:
        raise DataError(f"measured must hold at least 3 micro-batches, got {len(measured)}")
    for i, m in enumerate(measured):
        if not (0 < m.forward_s < float("inf") and 0 < m.backward_s < float("inf")):
            raise DataError(
                f"measured seconds must be finite and > 0, got {m.forward_s} and {m.backward_s} (micro-batch {i})"
            )
    features = np.array([(*_features(m.lengths), 1.0) for m in measured])  # (micro-batches, 3)
    return FittedCost(
        forward=_fit(features, np.array([m.forward_s for m in measured])),
        backward=_fit(features, np.array([m.backward_s for m in measured])),
    )


def _features(lengths: Iterable[int]) -> tuple[int, int]:
    squares = tokens = 0
    for n in lengths:
        squares += n * n
        tokens += n
    return squares, tokens


def _fit(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> QuadraticTime:
    square_s, token_s, micro_batch_s = fit_seconds(features, seconds).tolist()
    return QuadraticTime(square_s=square_s, token_s=token_s, micro_batch_s=micro_batch_s)
