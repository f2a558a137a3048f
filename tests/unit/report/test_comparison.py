from dataclasses import replace

import pytest

from tests.unit.report.synthetic_run import BALANCED, MAKESPAN, SQUARE_S, TOKEN_S, WINDOW, write_run
from wlb.cost import FittedCost, QuadraticTime
from wlb.errors import ConfigError, DataError
from wlb.report import compare, fit_first_half, load_run, table
from wlb.report.comparison import load_manifest
from wlb.report.lanes import measured_lanes, predicted_lanes
from wlb.report.picture import shown_steps
from wlb.report.prediction import StepModel, fit_steps

CORPUS = {"documents": 12, "tokens": 1200, "p50": 60, "p99": 100, "max": 100, "seed": 1}


def compare_all(runs, **changed):
    plain, wlb, makespan = runs
    values = {"corpus": CORPUS, "fitted_on": "test", "model": fit_first_half(plain)} | changed
    return compare(plain, {"wlb": wlb, "makespan": makespan}, **values)


@pytest.fixture
def runs(run_folders):
    return tuple(load_run(folder) for folder in run_folders)


@pytest.fixture
def report(runs):
    return compare_all(runs)


def test_the_fit_finds_the_cost_that_the_run_was_made_with(runs):
    model = fit_first_half(runs[0])
    assert model.crossover_tokens == pytest.approx(TOKEN_S / SQUARE_S)
    assert model.outside_s == pytest.approx(0.01)
    for stage in model.stages:
        assert stage.forward.square_s == pytest.approx(SQUARE_S / 3)
        assert stage.backward.token_s == pytest.approx(TOKEN_S * 2 / 3)


def test_unseen_steps_are_predicted(runs):
    model = fit_first_half(runs[0])
    for run in runs:
        for step, logged in list(zip(run.steps, run.log.steps, strict=True))[2:]:
            assert model.step_s(step) == pytest.approx(logged.elapsed_s)


def test_the_report_has_the_fields_that_readers_rely_on(report):
    assert list(report)[:8] == [
        "corpus",
        "window",
        "crossover_over_window",
        "runs",
        "speedup",
        "speedup_work",
        "predicted_speedup",
        "predicted_speedup_work",
    ]
    assert report["corpus"] == {"documents": 12, "tokens": 1200, "p50": 60, "p99": 100, "max": 100}
    assert report["window"] == WINDOW
    assert report["crossover_over_window"] == pytest.approx(0.25)
    for run in report["runs"].values():
        assert list(run)[:11] == [
            "steps",
            "tokens",
            "tokens_per_s",
            "packed_flops_per_s",
            "step_s_median",
            "imbalance_degree",
            "first_loss",
            "final_loss",
            "mean_delay_steps",
            "waiting_tokens",
            "max_micro_batch_tokens",
        ]


def test_the_numbers_of_a_run(report):
    run = report["runs"]["wlb"]
    assert (run["steps"], run["tokens"], run["max_micro_batch_tokens"], run["waiting_tokens"]) == (6, 1040, 100, 0)
    assert (run["first_loss"], run["final_loss"]) == (7.0, 6.5)
    assert run["mean_delay_steps"] == pytest.approx(0.5 * (1040 - 90) / 1040)  # nothing is late in the first step
    assert run["documents"] == 18


@pytest.mark.parametrize("name", ["wlb", "makespan"])
def test_rates_are_compared_per_token_and_per_operation(report, name):
    plain, balanced, ratios = report["runs"]["plain"], report["runs"][name], report["speedups"][name]
    # The same pieces: equal tokens and equal work, so both ratios are the ratio of the seconds.
    assert ratios["speedup"] == pytest.approx(plain["total_s"] / balanced["total_s"])
    # All runs took exactly what the fitted costs say.
    assert ratios["speedup"] == pytest.approx(ratios["predicted_speedup"])
    assert ratios["speedup"] == pytest.approx(ratios["speedup_work"])
    assert ratios["predicted_speedup"] == pytest.approx(plain["predicted_s"] / balanced["predicted_s"])
    assert ratios["predicted_speedup"] == pytest.approx(ratios["predicted_speedup_work"])


def test_wlb_is_more_even_than_plain(report):
    assert report["runs"]["wlb"]["imbalance_degree"] < report["runs"]["plain"]["imbalance_degree"]


def test_the_headline_is_the_last_run_given(report):
    assert report["headline"] == "makespan"
    assert list(report["runs"]) == ["plain", "wlb", "makespan"]
    assert list(report["speedups"]) == ["wlb", "makespan"]
    assert {name: report[name] for name in report["speedups"]["makespan"]} == report["speedups"]["makespan"]
    assert report["speedup"] != pytest.approx(report["speedups"]["wlb"]["speedup"])


@pytest.mark.parametrize("names", [(), ("plain",), ("wlb", "plain")])
def test_balanced_runs_need_names_of_their_own(runs, names):
    with pytest.raises(ConfigError, match="none named 'plain', got"):
        compare(runs[0], dict.fromkeys(names, runs[1]), fit_first_half(runs[0]), corpus=CORPUS, fitted_on="")


def test_the_same_pieces_in_every_step_leave_plains_losses(report):
    assert report["exactness"] == {
        "wlb": {"same_pieces_in_every_step": False, "max_loss_difference": None},
        "makespan": {"same_pieces_in_every_step": True, "max_loss_difference": 0.0},
    }
    assert "makespan trained plain's very pieces in every step: losses are plain's to the last digit" in table(report)
    assert "wlb trained plain's very pieces" not in table(report)


def test_the_largest_difference_of_a_loss_counts(runs, tmp_path):
    close = write_run(tmp_path / "close", MAKESPAN, losses=[7.0, 6.9, 6.8, 6.7 * (1 + 1e-4), 6.6, 6.5])
    report = compare_all((*runs[:2], load_run(close)))
    assert report["exactness"]["makespan"]["max_loss_difference"] == pytest.approx(1e-4, rel=1e-2)
    assert "losses are plain's to within 1.0e-04 of them" in table(report)
    far = write_run(tmp_path / "far", MAKESPAN, losses=[7.0, 6.9, 6.8, 6.7 * 0.98, 6.6, 6.5])
    report = compare_all((*runs[:2], load_run(far)))
    assert "NOTE: makespan trained" in table(report)
    assert "losses should be plain's, but differ by up to 2.0e-02 of them" in table(report)


def test_the_step_that_is_shown_is_plains_where_the_pieces_are(runs, report):
    plain, wlb, makespan = runs
    shown = shown_steps(report, {"plain": plain, "wlb": wlb, "makespan": makespan})
    assert list(shown) == ["plain", "wlb", "makespan"]
    assert shown["wlb"].step == wlb.typical_step().step
    assert shown["makespan"].step == shown["plain"].step == plain.typical_step().step


def test_the_headline_keeps_its_place_among_many_runs(runs, report):
    names = ["a", "b", "c"]
    many = {"headline": "c", "exactness": dict.fromkeys(names, report["exactness"]["wlb"])}
    assert list(shown_steps(many, {"plain": runs[0]} | dict.fromkeys(names, runs[1]))) == ["plain", "a", "c"]


def test_a_machine_that_did_other_work_is_said(report):
    assert report["runs"]["plain"]["pass_deviation"] == pytest.approx(0, abs=1e-6)
    assert "NOTE" not in table(report)
    report["runs"]["wlb"]["pass_deviation"] = 0.25
    assert "NOTE: passes took 25% more or less than their cost" in table(report)


def test_a_micro_batch_that_was_held_up_does_not_move_the_fit(runs):
    step = runs[0].steps[3]
    start_s, stop_s = step.ranks[0].forward[0]
    late = replace(step.ranks[0], forward=((start_s, stop_s + 5), *step.ranks[0].forward[1:]))
    steps = [*runs[0].steps[:3], replace(step, ranks=(late, *step.ranks[1:])), *runs[0].steps[4:]]
    model = fit_steps(steps, [s.elapsed_s for s in runs[0].log.steps])
    assert model.stages[0].forward.square_s == pytest.approx(SQUARE_S / 3)
    assert model.stages[0].forward.token_s == pytest.approx(TOKEN_S / 3)


def test_other_pieces_are_refused(runs, tmp_path):
    other = load_run(write_run(tmp_path / "other", [*BALANCED[:5], [[20, 80], [5, 94, 1]]]))
    with pytest.raises(
        DataError, match=r"plain and makespan must train the same pieces .* got 18 pieces of 1040 tokens and 19 of 1040"
    ):
        compare_all((runs[0], runs[1], other))


def test_a_run_that_delays_may_cut_elsewhere_but_not_train_more(runs, tmp_path):
    whole = write_run(tmp_path / "whole", [*BALANCED[:5], [[20, 80], [5, 95]]], max_delay_steps=4)
    assert compare_all((runs[0], runs[1], load_run(whole)))["exactness"]["makespan"]["max_loss_difference"] is None
    more = write_run(tmp_path / "more", [*BALANCED[:5], [[20, 80], [5, 117]]], max_delay_steps=4)
    with pytest.raises(DataError, match=r"plain and makespan must train as many tokens within 2% .* got 1040 and 1062"):
        compare_all((runs[0], runs[1], load_run(more)))


def test_a_manifest_without_a_field_is_refused(runs):
    with pytest.raises(DataError, match="'p99'"):
        compare_all(runs, corpus={"documents": 1, "tokens": 1, "p50": 1})


def test_attention_that_was_not_seen_has_no_crossover():
    linear = QuadraticTime(square_s=0, token_s=1, micro_batch_s=0)
    model = StepModel(stages=(FittedCost(forward=linear, backward=linear),), outside_s=0)
    with pytest.raises(DataError, match="got 0 s per squared token and 2 s per token"):
        _ = model.crossover_tokens


def test_the_table_has_a_column_and_a_line_of_ratios_for_each_run(report):
    text = table(report)
    for name in ("wlb", "makespan"):
        r = report["speedups"][name]
        assert f"over plain: per token {r['speedup']:.3f} x measured, {r['predicted_speedup']:.3f} x predicted" in text
    lines = text.splitlines()
    assert next(line for line in lines if "makespan" in line).split() == ["plain", "wlb", "makespan"]
    assert next(line for line in lines if line.startswith("micro-batches")).split() == [
        "micro-batches",
        "12",
        "12",
        "17",
    ]
    assert "12 documents, 1,200 tokens" in text
    assert "makespan chose 17 micro-batches where plain has 12" in text
    assert "wlb chose" not in text


@pytest.mark.parametrize(("text", "reason"), [("[1]", "JSON object, got list"), ("{", "must be JSON")])
def test_a_broken_manifest_is_refused(tmp_path, text, reason):
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(DataError, match=reason):
        load_manifest(path)


def test_lanes_of_prediction_and_measurement_agree_without_noise(runs):
    model = fit_first_half(runs[0])
    for step in (runs[0].steps[3], runs[1].steps[4], runs[2].steps[2]):
        measured, predicted = measured_lanes(step), predicted_lanes(step, model)
        assert [lane.name for lane in measured.lanes] == ["rank 0\nstage 1", "rank 1\nstage 2"]
        assert measured.end_s == pytest.approx(predicted.end_s)
        assert measured.waiting_share == pytest.approx(predicted.waiting_share)
        assert measured.waiting_share > 0
