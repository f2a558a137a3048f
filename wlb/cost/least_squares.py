"""Seconds as a sum of non-negative terms, by least squares of the relative error.

Relative: a short measurement counts as much as a long one. Non-negative: nothing gets faster by more work, and terms
that the data cannot tell apart do not cancel each other.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray


def fit_seconds(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds per unit of each feature, (F,), none negative.

    features: (measurements, F), a few. seconds: (measurements,), > 0.
    """
    num_features = features.shape[1]
    scale = features.max(axis=0)  # squares are 10^9 where a constant is 1: without this the fit loses digits
    scale[scale == 0] = 1.0
    rows = features / scale / seconds[:, None]  # dividing by the time makes every residual a relative error
    target = np.ones(len(seconds))
    best = np.zeros(num_features)
    best_error = float("inf")
    # With few coefficients trying every subset of them is the exact non-negative solution.
    for count in range(1, num_features + 1):
        for chosen in combinations(range(num_features), count):
            columns = list(chosen)
            solution = np.linalg.lstsq(rows[:, columns], target, rcond=None)[0]
            error = float(np.sum((rows[:, columns] @ solution - target) ** 2))
            # More terms must earn their place by more than rounding.
            if (solution >= 0).all() and error < best_error * (1 - 1e-9):
                best_error = error
                best = np.zeros(num_features)
                best[columns] = solution
    return best / scale
