"""Imbalance degree and coefficient of variation."""

import pytest

from wlb.errors import ConfigError
from wlb.metrics import coefficient_of_variation, imbalance_degree


@pytest.mark.parametrize(
    ("values", "expected"),
    [([2, 2, 2], 1.0), ([4, 0, 0, 0], 4.0), ([3, 1], 1.5), ([7], 1.0), ([0, 0], 1.0)],
)
def test_imbalance_degree(values, expected):
    assert imbalance_degree(values) == expected


def test_imbalance_degree_refuses_nonsense():
    with pytest.raises(ConfigError, match="values must hold at least one number"):
        imbalance_degree([])
    with pytest.raises(ConfigError, match="values must be >= 0, got -1"):
        imbalance_degree([2, -1])


@pytest.mark.parametrize(("values", "expected"), [([5, 5], 0.0), ([1, 3], 0.5), ([0, 0], 0.0)])
def test_coefficient_of_variation(values, expected):
    assert coefficient_of_variation(values) == expected


def test_coefficient_of_variation_refuses_nothing():
    with pytest.raises(ConfigError, match="at least one number"):
        coefficient_of_variation([])
