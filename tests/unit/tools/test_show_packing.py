"""The tool that shows a packed step, run as its user runs it, on steps of a few documents."""

import re

import pytest

from wlb.cost import CrossoverCost
from wlb.documents import MicroBatch, StepPlan, documents_from_lengths
from wlb.report.step_picture import PlannedStep, step_table
from wlb.schedule import PipelineModel


def _step(*micro_batches, num_stages=1):
    """One replica with micro-batches of these lengths, whose time is that of their tokens."""
    batches, first = [], 0
    for lengths in micro_batches:
        batches.append(MicroBatch(documents=documents_from_lengths(lengths, first_id=first)))
        first += len(lengths)
    cost = CrossoverCost(crossover_tokens=1e12, overhead_tokens=0)
    plan = StepPlan(step=0, replicas=(tuple(batches),), waiting=())
    return PlannedStep.of(plan, PipelineModel.equal_stages(cost, num_stages))


def test_without_a_pipeline_nobody_waits():
    step = _step((3, 1), (4,))
    assert step.time_over_ideal == pytest.approx(1)
    assert step.imbalance == pytest.approx(1)
    assert step.lanes.waiting_share == pytest.approx(0)


def test_two_stages_wait_for_each_other_once_in_a_single_micro_batch():
    # Forward and backward of one micro-batch go through two stages one after the other: each works half of the time.
    step = _step((8,), num_stages=2)
    assert step.time_over_ideal == pytest.approx(2)
    assert step.lanes.waiting_share == pytest.approx(0.5)


def test_the_table_has_a_row_a_micro_batch():
    lines = step_table("plain", _step((6, 2), (4,)))
    assert lines[0].startswith("plain: 2 micro-batches, 12 tokens, imbalance 1.33, 1.00 of ideal")
    assert [line.split() for line in lines[2:]] == [
        ["1", "1", "8", "2", "6", "1.33"],
        ["1", "2", "4", "1", "4", "0.67"],
    ]


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(n) for n in [5, 90, 7, 12, 100, 3, 40, 8, 21, 64] * 20))
    return path


def test_packers_train_plans_of_their_own(run, lengths, capsys):
    shown = ("--lengths-file", lengths, "--window", 100, "--pp", 2, "--micro-batches", 4, "--step", 3)
    assert (
        run("show_packing", *shown, "--crossover", 30, "--overhead-tokens", 1, "--packers", "plain", "wlb", "makespan")
        == 0
    )
    printed = capsys.readouterr().out
    times = {name: float(ratio) for name, ratio in re.findall(r"^(\w+): .* ([\d.]+) of ideal", printed, re.MULTILINE)}
    assert list(times) == ["plain", "wlb", "makespan"]
    assert 1 <= times["makespan"] <= times["plain"]
    assert printed.startswith("lengths.txt, step 3: 1 replica of 2 stages, window 100,")


def test_a_picture_is_drawn_twice_alike(run, lengths, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        shown = ("--window", 100, "--pp", 2, "--dp", 2, "--micro-batches", 2, "--step", 1, "--out", picture)
        assert run("show_packing", "--lengths-file", lengths, *shown) == 0
    one, two = (picture.read_bytes() for picture in pictures)
    assert one == two
    assert b"makespan: tokens" in one
    assert "picture: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--step", "-1"], "--step must be >= 0, got -1"),
        (
            ["--packers", "plain", "none"],
            "--packers must be of plain, greedy, wlb, makespan, two_stage, solver, got none",
        ),
        (["--out", "plan.pdf"], "--out must end in .png or .svg, got plan.pdf"),
        (["--cap-windows", "0.5"], "--cap-windows must be >= 1 and finite, got 0.5"),
        (["--packers", "wlb", "--cap-windows", "1"], "--cap-windows must be > 1 with wlb and finite, got 1.0"),
        (["--pp", "0"], "num_stages must be >= 1, got 0"),
    ],
)
def test_what_cannot_be_shown_is_refused(run, lengths, capsys, argv, sentence):
    assert run("show_packing", "--lengths-file", lengths, *argv) == 1
    assert sentence in capsys.readouterr().err
