"""Numbers that can be checked by eye, and estimators against what they estimate."""

from math import sqrt

import numpy as np
import pytest

from wlb.errors import DataError
from wlb.report.convergence_measures import (
    Buckets,
    gradient_noise,
    loss_curve,
    mean_loss,
    mean_loss_difference,
    spread,
    token_weights,
)

BUCKETS = Buckets(bounds=(10, 100))


def test_buckets_begin_at_their_bound():
    assert Buckets.of_window(64).bounds == (8, 16, 32, 64, 128)
    assert BUCKETS.labels == ("< 10", "10-99", ">= 100")
    assert BUCKETS.numbers(np.array([1, 9, 10, 99, 100, 5000])).tolist() == [0, 0, 1, 1, 2, 2]


def test_mean_loss_weighs_tokens_equally():
    # row, positions, sum of losses: (4 + 20) / (2 + 6), where a mean over documents would give (2 + 10 / 3) / 2
    assert mean_loss(np.array([[0, 2, 4.0], [1, 6, 20.0]])) == 3.0


def test_a_difference_common_to_all_tokens_has_no_error():
    base = np.array([[0, 2, 4.0], [1, 6, 20.0], [2, 5, 11.0]])
    better = base - np.array([0, 0, 0.5]) * base[:, [1, 1, 1]]
    estimate = mean_loss_difference(better, base)
    assert estimate.value == pytest.approx(-0.5)
    assert estimate.standard_error == pytest.approx(0, abs=1e-12)


def test_the_error_of_a_difference_is_that_of_a_mean_over_equal_documents():
    base = np.array([[i, 10, 30.0] for i in range(4)])
    changes = np.array([1.0, -1.0, 3.0, 1.0])
    other = base + np.outer(changes * 10, [0, 0, 1])
    estimate = mean_loss_difference(other, base)
    assert estimate.value == pytest.approx(changes.mean())
    assert estimate.standard_error == pytest.approx(changes.std(ddof=1) / sqrt(4))


def test_other_documents_are_not_compared():
    base = np.array([[0, 2, 4.0], [1, 6, 20.0]])
    with pytest.raises(DataError, match="must be of the same documents"):
        mean_loss_difference(np.array([[0, 2, 4.0], [2, 6, 20.0]]), base)
    with pytest.raises(DataError, match="at least 2 held-out documents, got 1"):
        mean_loss_difference(base[:1], base[:1])


def test_a_token_weighs_less_in_a_longer_step():
    lengths = np.array([5, 50, 150])
    # Budget 100: a step of 50 tokens, of which each weighs 2, a step of 200, 1/2, and one while queues fill up.
    steps = [np.array([[0, 0, 5], [1, 0, 45]]), np.empty((0, 3), dtype=np.int64), np.array([[2, 0, 150], [1, 0, 50]])]
    short, middle, long = token_weights(steps, lengths, BUCKETS, 100)
    assert short == {"mean": 2.0, "standard_deviation": 0.0}
    assert long == {"mean": 0.5, "standard_deviation": 0.0}
    assert middle["mean"] == pytest.approx((45 * 2 + 50 * 0.5) / 95)
    assert middle["standard_deviation"] == pytest.approx(sqrt(45 * 50) / 95 * 1.5)


def test_pieces_belong_to_the_bucket_of_their_document():
    short, middle, long = token_weights([np.array([[0, 100, 5]])], np.array([105]), BUCKETS, 5)
    assert (short, middle) == (None, None)
    assert long == {"mean": 1.0, "standard_deviation": 0.0}


def test_gradient_noise_of_vectors_that_can_be_checked_by_eye():
    # Mean (2, 0), deviations (0, 1), (0, -1), (0, 1), (0, -1): tr(S) = 4 / 3, |G|^2 = 4 - 1 / 3.
    gradients = np.array([[2, 1], [2, -1], [2, 1], [2, -1.0]])
    noise = gradient_noise(gradients @ gradients.T, np.array([100, 100, 100, 300]))
    assert noise.noise == pytest.approx(4 / 3)
    assert noise.signal == pytest.approx(11 / 3)
    assert noise.noise_over_signal.value == pytest.approx(4 / 11)
    assert noise.noise_scale_tokens == pytest.approx(150 * 4 / 11)


def test_gradient_noise_finds_signal_and_noise_it_was_made_of():
    rng = np.random.default_rng(3)
    signal, deviation, size, count, rounds = rng.normal(size=400), 1.5, 400, 24, 40
    estimates = []
    for _ in range(rounds):
        gradients = signal + deviation * rng.normal(size=(count, size))
        estimates.append(gradient_noise(gradients @ gradients.T, np.full(count, 10)))
    true_noise, true_signal = deviation**2 * size, float(signal @ signal)
    assert np.mean([e.noise for e in estimates]) == pytest.approx(true_noise, rel=0.01)
    assert np.mean([e.signal for e in estimates]) == pytest.approx(true_signal, rel=0.02)
    ratios = [e.noise_over_signal for e in estimates]
    assert np.mean([r.standard_error for r in ratios]) == pytest.approx(np.std([r.value for r in ratios]), rel=0.4)


def test_gradients_without_a_common_part_are_refused():
    with pytest.raises(DataError, match="raise --noise-steps"):
        gradient_noise(np.eye(4), np.full(4, 10))
    with pytest.raises(DataError, match="at least 3 steps, got 2"):
        gradient_noise(np.ones((2, 2)), np.full(2, 10))


def test_a_point_of_the_curve_is_a_mean_over_tokens():
    assert loss_curve([4.0, 1.0, 3.0], [10, 30, 10], 2) == [[40.0, 1.75], [50.0, 3.0]]


def test_spread():
    assert spread([1.0, 3.0]) == {"mean": 2.0, "cv": 0.5}
