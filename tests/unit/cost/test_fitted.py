"""Fitting measured micro-batches."""

import random

import pytest

from wlb.cost import MeasuredMicroBatch, QuadraticTime, document_work_ns, fit_cost
from wlb.errors import ConfigError, DataError

FORWARD = QuadraticTime(square_s=3e-9, token_s=2e-6, micro_batch_s=4e-3)
BACKWARD = QuadraticTime(square_s=8e-9, token_s=3.5e-6, micro_batch_s=5e-3)


def _measured(rng, *, noise, forward=FORWARD, backward=BACKWARD, count=40):
    batches = []
    for _ in range(count):
        lengths = tuple(rng.randint(1, 4000) for _ in range(rng.randint(1, 6)))
        batches.append(
            MeasuredMicroBatch(
                lengths=lengths,
                forward_s=forward.seconds(lengths) * rng.uniform(1 - noise, 1 + noise),
                backward_s=backward.seconds(lengths) * rng.uniform(1 - noise, 1 + noise),
            )
        )
    return batches


def test_exact_times_give_back_their_coefficients():
    cost = fit_cost(_measured(random.Random(0), noise=0.0))
    for got, wanted in ((cost.forward, FORWARD), (cost.backward, BACKWARD)):
        assert got.square_s == pytest.approx(wanted.square_s, rel=1e-6)
        assert got.token_s == pytest.approx(wanted.token_s, rel=1e-6)
        assert got.micro_batch_s == pytest.approx(wanted.micro_batch_s, rel=1e-6)
    assert cost.forward_s([10, 5]) == pytest.approx(3e-9 * 125 + 2e-6 * 15 + 4e-3, rel=1e-6)
    assert cost.backward_s([10, 5]) == pytest.approx(8e-9 * 125 + 3.5e-6 * 15 + 5e-3, rel=1e-6)


def test_noisy_times_predict_other_micro_batches():
    cost = fit_cost(_measured(random.Random(1), noise=0.05))
    for m in _measured(random.Random(2), noise=0.0):
        assert cost.forward_s(m.lengths) == pytest.approx(m.forward_s, rel=0.05)
        assert cost.backward_s(m.lengths) == pytest.approx(m.backward_s, rel=0.05)


def test_coefficients_are_never_negative():
    # Seconds fall with length: any free least squares would take a negative slope.
    measured = [MeasuredMicroBatch(lengths=(n,), forward_s=1 / n, backward_s=1 / n) for n in (10, 20, 40, 80)]
    cost = fit_cost(measured)
    assert cost.forward.square_s == cost.forward.token_s == 0.0
    assert cost.forward.micro_batch_s > 0


def test_the_fitted_model_is_a_cost_model():
    cost = fit_cost(_measured(random.Random(0), noise=0.0))
    assert cost.attention_s(100, 100) == pytest.approx(3e-5, rel=1e-6)
    assert cost.attention_s(40, 100) + cost.attention_s(60, 60) == pytest.approx(cost.attention_s(100, 100))
    assert cost.linear_s(100) == pytest.approx(2e-4, rel=1e-6)
    assert cost.fixed_s == pytest.approx(4e-3, rel=1e-6)
    assert cost.communication_s(1000) == 0.0
    assert document_work_ns(cost, 1000) == 5_000_000


def test_too_little_or_impossible_data_is_refused():
    good = MeasuredMicroBatch(lengths=(4,), forward_s=1.0, backward_s=1.0)
    with pytest.raises(DataError, match="measured must hold at least 3 micro-batches, got 2"):
        fit_cost([good, good])
    bad = MeasuredMicroBatch(lengths=(4,), forward_s=0.0, backward_s=1.0)
    with pytest.raises(DataError, match=r"seconds must be finite and > 0, got 0\.0 and 1\.0 \(micro-batch 3\)"):
        fit_cost([good, good, good, bad])
    with pytest.raises(ConfigError, match="token_s must be finite and >= 0, got -1"):
        QuadraticTime(square_s=0, token_s=-1, micro_batch_s=0)
