"""Names of runs, and folders that interrupted runs leave behind."""

import json

import pytest

from wlb.errors import ConfigError, DataError, StateError
from wlb.report.convergence_runs import RunFolder, Variant


def ledger_line(step, *documents):
    return json.dumps({"step": step, "replicas": [[[list(d) for d in documents]]]}) + "\n"


def log_line(iteration, loss):
    return f" iteration {iteration}/ 4 | elapsed time per iteration (ms): 10.0 | lm loss: {loss:.6E} |\n"


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(path=tmp_path / "plain_seed1")
    run.checkpoints.mkdir(parents=True)
    return run


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("plain", ["--wlb-packing", "plain"]),
        ("plain+window", ["--wlb-packing", "plain", "--wlb-document-cut", "window"]),
        ("wlb", ["--wlb-packing", "wlb", "--wlb-thresholds", "5", "9"]),
        (
            "makespan+delay64",
            ["--wlb-packing", "makespan", "--wlb-max-delay-steps", "64", "--wlb-thresholds", "5", "9"],
        ),
        (
            "wlb+delay8+stream",
            [
                *("--wlb-packing", "wlb", "--wlb-max-delay-steps", "8", "--wlb-intake", "budget"),
                *("--wlb-thresholds", "5", "9", "--wlb-document-cut", "stream"),
            ],
        ),
    ],
)
def test_a_name_says_the_flags(name, flags):
    variant = Variant.named(name)
    assert variant.name == name
    assert variant.flags((5, 9)) == flags


@pytest.mark.parametrize("name", ["nothing", "plain+", "plain+delay", "plain+delay0", "wlb+delay2+delay3", "wlb+row"])
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError, match="--runs"):
        Variant.named(name)


def test_a_folder_of_other_settings_is_refused(folder):
    folder.prepare({"flags": "--seed 1"})
    folder.prepare({"flags": "--seed 1"})
    with pytest.raises(StateError, match="got flags --seed 1, now --seed 2"):
        folder.prepare({"flags": "--seed 2"})


def test_steps_that_come_again_leave_the_ledger(folder):
    """Step 2 was trained after the checkpoint of iteration 2; a line was being written when the run ended."""
    folder.ledger.write_text("".join(ledger_line(s, (s, s, 0, 7)) for s in range(3)) + '{"step":3,"repl')
    (folder.checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
    folder.prepare({})
    assert folder.trained_iterations() == 2
    assert folder.ledger.read_text() == "".join(ledger_line(s, (s, s, 0, 7)) for s in range(2))
    assert [step.tolist() for step in folder.ledger_steps()] == [[[0, 0, 7]], [[1, 0, 7]]]


def test_without_a_checkpoint_all_steps_come_again(folder):
    folder.ledger.write_text(ledger_line(0, (0, 0, 0, 7)))
    folder.prepare({})
    assert folder.trained_iterations() == 0
    assert folder.ledger.read_text() == ""


def test_the_last_line_of_a_step_counts(folder):
    folder.log.write_text(log_line(1, 7.0) + log_line(2, 6.0) + "restarted\n" + log_line(2, 5.0) + log_line(3, 4.0))
    assert [step.loss for step in folder.logged_steps()] == [7.0, 5.0, 4.0]


def test_missing_steps_are_said(folder):
    with pytest.raises(DataError, match=r"log .*log.txt: must hold every step from 0 on, got 0 steps"):
        folder.logged_steps()
    folder.log.write_text(log_line(1, 7.0) + log_line(3, 6.0))
    with pytest.raises(DataError, match="got 2 steps"):
        folder.logged_steps()
    folder.ledger.write_text(ledger_line(1, (0, 0, 0, 7)))
    with pytest.raises(DataError, match=r"ledger .*: must hold every step from 0 on, got 1 steps"):
        folder.ledger_steps()
