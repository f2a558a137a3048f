"""Costs fitted on a run whose micro-batches vary in size, as the quickstart's calibration makes them."""

import random

import pytest

from tests.unit.report.synthetic_run import MAKESPAN, MICRO_BATCH_S, PLAIN, SQUARE_S, TOKEN_S, write_run
from wlb.cost import FittedCost, QuadraticTime
from wlb.errors import DataError
from wlb.report import fit_range, load_run
from wlb.report.measured import MeasuredStep, RankStep
from wlb.report.prediction import StepModel, fit_steps

# Seconds of the quickstart's first stage: the fixed time is that of 1,000 tokens.
FORWARD = QuadraticTime(square_s=3.2e-9, token_s=7.2e-6, micro_batch_s=7.2e-3)
BACKWARD = QuadraticTime(square_s=8.5e-9, token_s=1.2e-5, micro_batch_s=1.2e-2)


def calibration_step(rng, number):
    """10 micro-batches of 100 to 8,192 tokens in one stage; each pass takes its cost, give or take 5 %."""
    lengths, forward, backward, now_s = [], [], [], 0.0
    for _ in range(10):
        left, documents = rng.randint(100, 8192), []
        while left:
            documents.append(rng.randint(min(left, 50), left))
            left -= documents[-1]
        lengths.append(tuple(documents))
        for cost, passes in ((FORWARD, forward), (BACKWARD, backward)):
            seconds = cost.seconds(documents) * rng.gauss(1, 0.05)
            passes.append((now_s, now_s + seconds))
            now_s += seconds
    rank = RankStep(
        rank=0,
        pp_rank=0,
        dp_rank=0,
        begin_s=0.0,
        end_s=now_s,
        lengths=tuple(lengths),
        forward=tuple(forward),
        backward=tuple(backward),
    )
    return MeasuredStep(step=number, ranks=(rank,))


@pytest.mark.parametrize("seed", range(8))
def test_noisy_micro_batches_of_many_sizes_tell_all_three_costs(seed):
    rng = random.Random(seed)
    steps = [calibration_step(rng, i) for i in range(4)]
    model = fit_steps(steps, [s.end_s for s in steps])
    for fitted, true in ((model.stages[0].forward, FORWARD), (model.stages[0].backward, BACKWARD)):
        assert fitted.square_s == pytest.approx(true.square_s, rel=0.25), f"seed {seed}"
        assert fitted.token_s == pytest.approx(true.token_s, rel=0.25), f"seed {seed}"
        assert fitted.micro_batch_s == pytest.approx(true.micro_batch_s, rel=0.25), f"seed {seed}"
        for documents in ((8192,), (2048,) * 4, (500,), (3000, 3000)):
            assert fitted.seconds(documents) == pytest.approx(true.seconds(documents), rel=0.08), f"seed {seed}"
    assert model.overhead_tokens == pytest.approx(1000, rel=0.3)


def test_costs_of_uneven_micro_batches_predict_every_run(tmp_path):
    runs = {
        name: load_run(write_run(tmp_path / name, steps, micro_batch_s=MICRO_BATCH_S))
        for name, steps in (("plain", PLAIN), ("makespan", MAKESPAN))
    }
    model = fit_range(runs["makespan"], range(2, 6))
    assert model.overhead_tokens == pytest.approx(MICRO_BATCH_S / TOKEN_S)
    assert model.crossover_tokens == pytest.approx(TOKEN_S / SQUARE_S)
    for run in runs.values():
        for step, logged in list(zip(run.steps, run.log.steps, strict=True))[2:]:
            assert model.step_s(step) == pytest.approx(logged.elapsed_s)


def test_equal_sizes_hide_the_fixed_time_so_more_micro_batches_are_predicted_wrongly(tmp_path):
    full = [[[100], [60, 40]], [[50, 50], [20, 80]], [[30, 70], [100]], [[10, 90], [45, 55]], [[100], [25, 75]]]
    halves = [[[60], [100], [40]]] * 5
    plain = load_run(write_run(tmp_path / "plain", full, micro_batch_s=MICRO_BATCH_S))
    more = load_run(write_run(tmp_path / "more", halves, micro_batch_s=MICRO_BATCH_S))
    model = fit_range(plain, range(2, 5))
    assert model.step_s(plain.steps[4]) == pytest.approx(plain.log.steps[4].elapsed_s)
    assert model.step_s(more.steps[4]) != pytest.approx(more.log.steps[4].elapsed_s, rel=1e-3)


def test_the_cost_file_says_what_a_micro_batch_costs_in_tokens():
    cost = FittedCost(forward=FORWARD, backward=BACKWARD)
    assert StepModel(stages=(cost, cost), outside_s=0.1).to_json()["overhead_tokens"] == pytest.approx(1000)


def test_no_time_per_token_is_refused():
    fixed = QuadraticTime(square_s=1, token_s=0, micro_batch_s=1)
    with pytest.raises(DataError, match="must show a time per token"):
        _ = StepModel(stages=(FittedCost(forward=fixed, backward=fixed),), outside_s=0).overhead_tokens
