"""What a packed run prints and writes: fields, scalars, packed work, evaluation, time lines."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness.training import Layout, train

FIELDS = [
    "imbalance micro-batches",
    "imbalance replicas",
    "tokens",
    "padding tokens",
    "micro-batches",
    "max micro-batch tokens",
    "waiting documents",
    "waiting tokens",
    "mean delay (steps)",
    "max delay (steps)",
    "epoch",
    "cut documents",
    "empty documents",
    "planning (ms)",
    "plan wait (ms)",
    "imbalance ranks measured",
]
MEGATRON_FIELDS = [
    "consumed samples",
    "elapsed time per iteration (ms)",
    "learning rate",
    "global batch size",
    "lm loss",
]


def _packed(data: Path, *more: Any) -> list[Any]:
    return ["--data-path", data, "--split", "90,10,0", "--wlb-packing", "wlb", "--wlb-thresholds", "40", *more]


def test_our_fields_follow_megatrons_in_the_log_line(toy_data: Path) -> None:
    run = train(_packed(toy_data), layout=Layout(pp=2), iterations=2)
    lines = [line for line in run.log.splitlines() if "elapsed time per iteration" in line]
    assert len(lines) == 2
    names = [field.split(":")[0].strip() for field in lines[-1].split("|")[1:] if ":" in field]
    assert names[: len(MEGATRON_FIELDS)] == MEGATRON_FIELDS
    assert names[-len(FIELDS) - 1 :] == ["number of nan iterations", *FIELDS]


def test_scalars_have_twins_over_samples(toy_data: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(_packed(toy_data, "--tensorboard-dir", tmp_path), layout=Layout(dp=2), iterations=3)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for field in FIELDS:
        by_iteration = events.Scalars(f"wlb/{field}")
        by_samples = events.Scalars(f"wlb/{field} vs samples")
        assert [e.step for e in by_iteration] == [1, 2, 3]
        assert [e.step for e in by_samples] == [8, 16, 24]
        assert [e.value for e in by_iteration] == [e.value for e in by_samples]


def _print_counted_work(undo: ExitStack) -> None:
    import megatron.training.training as training

    from megatron.wlb.patches.registry import replace

    original = training.num_floating_point_operations

    def counted(*args: Any, **kwargs: Any) -> Any:
        print("counted", kwargs["total_real_tokens_in_batch"], kwargs["seqlen_squared_sum_in_batch"])
        return original(*args, **kwargs)

    replace(undo, training, "num_floating_point_operations", counted)


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, dp=2), Layout(cp=2)], ids=str)
def test_operations_are_those_of_the_packed_documents(layout: Layout, toy_data: Path, tmp_path: Path) -> None:
    """Sum of squared lengths, not --seq-length squared; once, however many ranks hold a document; not evaluation."""
    evaluating = ["--eval-iters", "1", "--eval-interval", "1"]
    run = train(
        _packed(toy_data, *evaluating, "--wlb-ledger", tmp_path / "ledger"),
        layout=layout,
        iterations=2,
        sabotage=_print_counted_work,
    )
    for row in map(json.loads, (tmp_path / "ledger").read_text().splitlines()):
        lengths = [length for replica in row["replicas"] for m in replica for *_, length in m]
        assert f"counted {float(sum(lengths))} {float(sum(n * n for n in lengths))}" in run.log
        (line,) = [text for text in run.log.splitlines() if f"iteration {row['step'] + 1:8}/" in text]
        assert f"| consumed samples: {8 * (row['step'] + 1):12} |" in line
        assert f"| tokens: {sum(lengths)} |" in line


def test_validation_loss_does_not_depend_on_layout_or_packer(toy_data: Path, start_checkpoint: Path) -> None:
    start = ["--load", start_checkpoint, "--finetune", "--no-load-optim", "--no-load-rng"]
    data = ["--data-path", toy_data, "--split", "80,20,0", "--eval-iters", "2", "--eval-interval", "1"]
    losses = []
    for packer, layout in (("plain", Layout()), ("makespan", Layout(pp=2)), ("wlb", Layout(dp=2))):
        # A learning rate of 0: every run evaluates the weights of the checkpoint.
        args = [*data, *start, "--wlb-packing", packer, "--lr", "0", "--min-lr", "0"]
        run = train(args, layout=layout, iterations=1)
        (loss, *_) = re.findall(r"validation loss at iteration 1 \| lm loss value: ([0-9.E+-]+)", run.log)
        losses.append(float(loss))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert losses[0] > 1


def test_time_lines_hold_every_pass(toy_data: Path, tmp_path: Path) -> None:
    train(_packed(toy_data, "--wlb-timeline", tmp_path), layout=Layout(pp=2), iterations=2)
    for rank in range(2):
        rows = [json.loads(line) for line in (tmp_path / f"rank{rank:03d}.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1]
        for row in rows:
            names = [name for name, *_ in row["events"]]
            count = len(row["lengths"])
            assert names.count("forward-compute") == names.count("backward-compute") == count >= 8
            assert all(row["begin_s"] <= start <= stop <= row["end_s"] for _, start, stop in row["events"])
