"""What is computed of a training run's quality: held-out loss by length, weights of tokens, noise of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import DataError

# Bounds of the buckets in windows: the last two hold documents that are cut even when nothing else is with them.
_BOUNDS_WINDOWS = (0.125, 0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number and its standard error."""

    value: float
    standard_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Documents by length: bucket i holds lengths in [bounds[i - 1], bounds[i]), the last all from bounds[-1] on.

    >>> Buckets.of_window(2048).labels
    ('< 256', '256-511', '512-1023', '1024-2047', '2048-4095', '>= 4096')
    """

    bounds: tuple[int, ...]

    @classmethod
    def of_window(cls, window_tokens: int) -> Buckets:
        """Bounds at 1/8, 1/4, 1/2, 1 and 2 windows."""
        return cls(bounds=tuple(int(window_tokens * share) for share in _BOUNDS_WINDOWS))

    @property
    def labels(self) -> tuple[str, ...]:
        between = [f"{low}-{high - 1}" for low, high in zip(self.bounds, self.bounds[1:], strict=False)]
        return (f"< {self.bounds[0]}", *between, f">= {self.bounds[-1]}")

    def numbers(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n,) bucket of each length."""
        return np.searchsorted(np.array(self.bounds), lengths, side="right").astype(np.int64)


def mean_loss(documents: NDArray[np.float64]) -> float:
    """Mean over tokens; documents: (n, 3), each its row, positions and sum of losses."""
    return float(documents[:, 2].sum() / documents[:, 1].sum())


def mean_loss_difference(documents: NDArray[np.float64], base: NDArray[np.float64]) -> Estimate:
    """Mean loss over tokens less that of `base` on the same documents.

    The standard error is of the documents: what other documents of the same kind would change. It is that of a ratio
    whose sampling units are documents, since the tokens of one are not independent.

    Raises:
        DataError: the documents are not the same, or fewer than two.
    """
    if documents.shape != base.shape or not np.array_equal(documents[:, :2], base[:, :2]):
        raise DataError(
            f"held-out losses must be of the same documents, got {len(documents)} and {len(base)} documents or other "
            "lengths: delete the heldout files of one run"
        )
    count = len(documents)
    if count < 2:
        raise DataError(f"a bucket must hold at least 2 held-out documents, got {count}")
    num_tokens = documents[:, 1]
    differences = documents[:, 2] - base[:, 2]
    value = differences.sum() / num_tokens.sum()
    residuals = differences - value * num_tokens
    error = sqrt(count / (count - 1) * float(residuals @ residuals)) / float(num_tokens.sum())
    return Estimate(value=float(value), standard_error=error)


def token_weights(
    steps: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64], buckets: Buckets, budget_tokens: int
) -> list[dict[str, float] | None]:
    """Per bucket, the weight of its tokens in the loss of their step, 1 where every step trains the budget.

    A step's loss is a mean over its T tokens, so each token of it weighs 1 / T: `budget_tokens` / T of what it weighs
    in plain.

    steps: of each step (documents, 3) int64, sequence, start and length.
    lengths: of whole sequences, by which documents, and all pieces of a cut one, belong to buckets.
    Returns:
        `mean` over the bucket's trained tokens and their `standard_deviation`; None of a bucket without tokens.
    """
    num_buckets = len(buckets.labels)
    steps = [step for step in steps if len(step)]  # while queues fill up, a step may train nothing
    weights = np.array([budget_tokens / step[:, 2].sum() for step in steps])
    tokens = np.stack(
        [np.bincount(buckets.numbers(lengths[step[:, 0]]), weights=step[:, 2], minlength=num_buckets) for step in steps]
    )  # (steps, buckets)
    result: list[dict[str, float] | None] = []
    for of_bucket in tokens.T:
        total = of_bucket.sum()
        if not total:
            result.append(None)
            continue
        mean = float(of_bucket @ weights / total)
        variance = float(of_bucket @ (weights - mean) ** 2 / total)
        result.append({"mean": mean, "standard_deviation": sqrt(variance)})
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """Of whole steps' gradients.

    noise_over_signal: tr(S) / |G|^2, how many steps' gradients must be averaged for noise as large as the signal.
    noise_scale_tokens: the same in tokens: McCandlish et al.'s simple noise scale if tokens were drawn one by one.
    signal: |G|^2. noise: tr(S).
    """

    noise_over_signal: Estimate
    noise_scale_tokens: float
    signal: float
    noise: float


def gradient_noise(inner_products: NDArray[np.float64], tokens: NDArray[np.int64]) -> GradientNoise:
    """From gradients g_i of N steps at the same weights, by their inner products (N, N), and the steps' tokens (N,).

    tr(S) is the sum of |g_i - mean|^2 over N - 1, |G|^2 = |mean|^2 - tr(S) / N: both without bias for steps that are
    independent. (Estimators of McCandlish et al., arXiv 1812.06162, appendix A.1, with batches of 1 and N steps.) The
    standard error is a jackknife's over steps.

    Raises:
        DataError: fewer than 3 steps, or noise so large that |G|^2 is not positive.
    """
    count = len(inner_products)
    if count < 3:
        raise DataError(f"gradient noise needs the gradients of at least 3 steps, got {count}")
    noise, signal = _noise_and_signal(inner_products)
    left_out = []
    for i in range(count):
        kept = np.delete(np.arange(count), i)
        part_noise, part_signal = _noise_and_signal(inner_products[np.ix_(kept, kept)])
        left_out.append(part_noise / part_signal)
    spread = np.array(left_out) - np.mean(left_out)
    error = sqrt((count - 1) / count * float(spread @ spread))
    ratio = Estimate(value=noise / signal, standard_error=error)
    return GradientNoise(
        noise_over_signal=ratio, noise_scale_tokens=ratio.value * float(tokens.mean()), signal=signal, noise=noise
    )


def _noise_and_signal(inner_products: NDArray[np.float64]) -> tuple[float, float]:
    count = len(inner_products)
    mean_squared = float(inner_products.mean())
    noise = (float(np.trace(inner_products)) - count * mean_squared) / (count - 1)
    signal = mean_squared - noise / count
    if signal <= 0:
        raise DataError(
            f"gradient noise needs steps enough for their mean to stand out, got |G|^2 = {signal:.3g} from {count}: "
            "raise --noise-steps"
        )
    return noise, signal


def loss_curve(losses: Sequence[float], tokens: Sequence[int], steps_a_point: int) -> list[list[float]]:
    """[tokens trained by then, mean loss per token] of every `steps_a_point` steps."""
    loss, count = np.array(losses), np.array(tokens, dtype=np.float64)
    trained = np.cumsum(count)
    points = []
    for first in range(0, len(loss), steps_a_point):
        part = slice(first, first + steps_a_point)
        points.append([float(trained[part][-1]), float(np.average(loss[part], weights=count[part]))])
    return points


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and coefficient of variation."""
    array = np.array(values, dtype=np.float64)
    return {"mean": float(array.mean()), "cv": float(array.std() / array.mean())}
