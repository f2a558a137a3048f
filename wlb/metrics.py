"""Numbers that say how even a division of work is."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from wlb.errors import ConfigError


def imbalance_degree(values: Sequence[float]) -> float:
    """max * n / sum, the published definition (WLB-LLM, arXiv 2503.17924, section 3): 1 is perfect, n the worst.

    values: work of each micro-batch, replica or rank; at least one, none negative. Nothing to do is even: 1.

    >>> imbalance_degree([3, 1, 1, 1])
    2.0
    """
    if not values:
        raise ConfigError("values must hold at least one number, got none")
    if min(values) < 0:
        raise ConfigError(f"values must be >= 0, got {min(values)}")
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Population standard deviation over the mean; 0 where all values are equal.

    >>> coefficient_of_variation([1, 3])
    0.5
    """
    if not values:
        raise ConfigError("values must hold at least one number, got none")
    mean = sum(values) / len(values)
    if mean == 0:
        return 0.0
    return sqrt(sum((v - mean) ** 2 for v in values) / len(values)) / abs(mean)
