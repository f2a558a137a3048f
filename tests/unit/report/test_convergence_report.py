"""A report over synthetic runs: what is compared with what, what is left out, and what is refused."""

import json

import numpy as np
import pytest

from wlb.errors import DataError
from wlb.report.convergence import CHECKPOINTS, Experiment, report_of
from wlb.report.convergence_table import table_of

STEPS = 4 * CHECKPOINTS
LENGTHS = np.array([7, 9, 40, 40, *[20] * 4, 64, 70])  # the last six are held out
BUDGET = 64


@pytest.fixture
def experiment(tmp_path):
    return Experiment(
        folder=tmp_path,
        names=("plain", "wlb"),
        seeds=(1, 2),
        steps=STEPS,
        window_tokens=32,
        budget_tokens=BUDGET,
        noise_steps=4,
        lengths=LENGTHS,
        first_heldout=4,
    )


def write_run(experiment, name, seed, *, loss=3.0, heldout_loss=2.0, tokens=BUDGET, iterations=STEPS):
    """Each step trains sequences 0 and 2; every held-out token has the same loss."""
    run = experiment.run(name, seed)
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text(str(iterations))
    documents = [[0, 0, 0, 7], [1, 2, 0, tokens - 7]]
    run.ledger.write_text("".join(json.dumps({"step": s, "replicas": [[documents]]}) + "\n" for s in range(STEPS)))
    run.log.write_text(
        "".join(
            f" iteration {s + 1}/ {STEPS} | elapsed time per iteration (ms): 1.0 | lm loss: {loss:.6E} | "
            f"grad norm: 0.5 | waiting tokens: 3 | mean delay (steps): 0.25 | max delay (steps): 2 |\n"
            for s in range(STEPS)
        )
    )
    for iteration in experiment.evaluated:
        rows = [[4 + i, int(n), float(n * heldout_loss)] for i, n in enumerate(LENGTHS[4:])]
        run.heldout(iteration).write_text(json.dumps({"documents": rows}))
    gradients = np.array([[2, 1], [2, -1], [2, 1], [2, -1.0]])
    for iteration in experiment.differentiated:
        stored = {"tokens": [tokens] * 4, "losses": [3.0] * 4, "inner_products": (gradients @ gradients.T).tolist()}
        run.gradients(iteration).write_text(json.dumps(stored))
    return run


def test_runs_are_compared_with_plain_of_their_seed(experiment):
    write_run(experiment, "plain", 1, heldout_loss=2.0)
    write_run(experiment, "plain", 2, heldout_loss=2.5)
    write_run(experiment, "wlb", 2, heldout_loss=2.25, tokens=2 * BUDGET)
    report = report_of(experiment)
    assert report["incomplete"] == ["wlb_seed1"]
    assert report["largest_probe_error"] == 0
    wlb = report["runs"]["wlb"]["2"]
    heldout = wlb["heldout"][str(STEPS)]
    assert set(heldout) == {"16-31", ">= 64", "all"}
    for entry in heldout.values():
        assert entry["loss"] == pytest.approx(2.25)
        assert entry["difference"]["value"] == pytest.approx(-0.25)
    assert report["seed_spread"]["all"] == pytest.approx(0.5 / 2**0.5)
    assert "difference" not in report["runs"]["plain"]["1"]["heldout"][str(STEPS)]["all"]
    assert (wlb["trained_tokens"], wlb["mean_delay_steps"], wlb["max_delay_steps"]) == (2 * BUDGET * STEPS, 0.25, 2)
    assert wlb["gradient_noise"][str(experiment.differentiated[0])]["noise_over_signal"]["value"] == pytest.approx(
        4 / 11
    )


def test_weights_follow_from_the_ledger(experiment):
    write_run(experiment, "plain", 1)
    write_run(experiment, "wlb", 1, tokens=2 * BUDGET)
    runs = report_of(experiment)["runs"]
    # Bounds 4, 8, 16, 32, 64: sequence 0 has 7 positions, sequence 2 has 40.
    for name, weight in (("plain", 1.0), ("wlb", 0.5)):
        means = [w and w["mean"] for w in runs[name]["1"]["weights"]]
        assert means == [None, weight, None, None, weight, None]


def test_the_table_has_a_line_a_run_and_says_what_is_missing(experiment):
    write_run(experiment, "plain", 1)
    write_run(experiment, "wlb", 1, heldout_loss=2.25)
    header, plain, wlb, missing = table_of(report_of(experiment)).splitlines()
    assert header.split()[:2] == ["run", "seed"]
    assert plain.split()[:2] == ["plain", "1"]
    assert "+0.2500" in wlb
    assert missing == "not complete, left out: plain_seed2, wlb_seed2"


def test_a_report_needs_plain(experiment):
    write_run(experiment, "wlb", 1)
    write_run(experiment, "plain", 1, iterations=STEPS - 1)
    with pytest.raises(DataError, match="run plain must be complete"):
        report_of(experiment)


def test_a_probe_that_sees_another_loss_than_training_is_refused(experiment):
    write_run(experiment, "plain", 1, loss=3.001)
    with pytest.raises(DataError, match=r"the probe's loss of step 20 of plain_seed1 must be the 3\.001"):
        report_of(experiment)


def test_only_what_is_missing_is_computed(experiment):
    plain = write_run(experiment, "plain", 1)
    assert experiment.missing_tasks("plain", 1, prefix="corpus") == []
    plain.heldout(STEPS).unlink()
    first = experiment.differentiated[0]
    plain.gradients(first).unlink()
    heldout, gradients = experiment.missing_tasks("plain", 1, prefix="corpus")
    assert (heldout["kind"], heldout["first"], heldout["stop"]) == ("heldout", 4, 10)
    assert heldout["output"] == str(plain.heldout(STEPS))
    assert (gradients["kind"], gradients["weights"]) == ("gradients", str(plain.weights(first)))
    assert gradients["steps"] == [[[0, 0, 7], [2, 0, 57]]] * 4


def test_gradients_are_taken_at_the_weights_of_plain(experiment):
    wlb = write_run(experiment, "wlb", 1)
    for iteration in experiment.differentiated:
        wlb.gradients(iteration).unlink()
    assert experiment.missing_tasks("wlb", 1, prefix="corpus") == []
    plain = write_run(experiment, "plain", 1)
    tasks = experiment.missing_tasks("wlb", 1, prefix="corpus")
    assert [t["weights"] for t in tasks] == [str(plain.weights(i)) for i in experiment.differentiated]


def test_evaluated_iterations_have_checkpoints(experiment):
    assert experiment.evaluated == (20, 40, 60, 80)
    assert experiment.differentiated == (20, 40, 60)
    assert all(i % experiment.save_interval == 0 for i in experiment.evaluated)


def test_the_picture_is_a_png(experiment, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is not drawn")
    from wlb.report.convergence_picture import draw

    write_run(experiment, "plain", 1)
    write_run(experiment, "plain", 2, heldout_loss=2.5)
    write_run(experiment, "wlb", 1, heldout_loss=2.25)
    path = tmp_path / "picture"
    draw(report_of(experiment), path)
    assert path.read_bytes().startswith(b"\x89PNG")
