"""Costs fitted on a run whose micro-batches vary in size, as the quickstart's calibration makes them."""

import random

import pytest

from tests.unit.report.synthetic_run import (
    CP_COST,
    CP_MORE,
    CP_PLAIN,
    CP_PRICES,
    MAKESPAN,
    MICRO_BATCH_S,
    PLAIN,
    SQUARE_S,
    TOKEN_S,
    cp_division,
    write_cp_run,
    write_run,
)
from wlb.cost import FittedCost, QuadraticTime
from wlb.errors import DataError
from wlb.report import fit_range, fit_runs, load_run
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


@pytest.fixture
def cp_model(tmp_path):
    """Costs of two context-parallel ranks, from a run of each of three sharders."""
    runs = [
        load_run(write_cp_run(tmp_path / f"calibration_{name}", CP_MORE, sharder=name))
        for name in ("per_sequence", "per_document", "hybrid")
    ]
    return fit_runs(runs, range(2, 6))


def test_divided_micro_batches_tell_the_cost_of_undivided_ones_and_of_dividing(cp_model):
    (cost,) = cp_model.stages
    for fitted, true in ((cost.forward, CP_COST.forward), (cost.backward, CP_COST.backward)):
        assert fitted.square_s == pytest.approx(true.square_s, rel=0.02)
        assert fitted.token_s == pytest.approx(true.token_s, rel=0.02)
    assert cp_model.prices.tile_tokens == CP_PRICES.tile_tokens
    assert cp_model.prices.received_token_pairs == pytest.approx(CP_PRICES.received_token_pairs, rel=0.05)
    assert cp_model.to_json()["prices"]["tile_tokens"] == CP_PRICES.tile_tokens
    assert cp_model.outside_s == pytest.approx(0.01)


@pytest.mark.parametrize("steps", [CP_PLAIN, CP_MORE])
@pytest.mark.parametrize("sharder", [None, "per_sequence", "per_document", "adaptive", "hybrid"])
def test_one_model_predicts_every_sharder(cp_model, tmp_path, steps, sharder):
    run = load_run(write_cp_run(tmp_path / "run", steps, sharder=sharder, operations_per_byte=300.0))
    assert run.division == cp_division(sharder or "per_sequence", operations_per_byte=300.0)
    model = run.modelled(cp_model)
    for step, logged in zip(run.steps, run.log.steps, strict=True):
        assert model.step_s(step) == pytest.approx(logged.elapsed_s, rel=0.01)
    assert run.summary(cp_model)["pass_deviation"] < 0.01
    assert run.total_s(cp_model) == pytest.approx(sum(s.elapsed_s for s in run.log.steps), rel=0.01)


def test_sharders_can_be_told_to_weigh_what_travels_as_it_was_measured(cp_model, tmp_path):
    run = load_run(write_cp_run(tmp_path / "run", CP_PLAIN))
    weighed = cp_division("hybrid", operations_per_byte=run.operations_per_byte(CP_PRICES))
    assert weighed.sharding.costs.received_token_pairs == CP_PRICES.received_token_pairs


def test_a_run_of_one_rank_is_not_divided(tmp_path):
    run = load_run(write_run(tmp_path / "run", PLAIN))
    assert run.division is None
    assert fit_range(run, range(2, 6)).prices is None


def test_runs_with_and_without_context_parallelism_are_not_fitted_together(tmp_path):
    steps = load_run(write_run(tmp_path / "run", PLAIN)).steps[:2]
    with pytest.raises(DataError, match="for all 2 steps or for none, got 1"):
        fit_steps(steps, [1.0, 1.0], [None, cp_division("hybrid")])
