"""Faults that public trackers report of training runs, where no other test is of their kind.

docs/correctness.md has the whole list.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.data import write_index
from tests.harness.processes import RankFailure
from tests.harness.training import Layout, train
from wlb.packing import PACKERS

OPTIONS = {"makespan": ["--wlb-overhead-tokens", "2", "--wlb-crossover", "16"], "wlb": ["--wlb-thresholds", "40"]}
EVAL_ITERS = 2


def _unequal_evaluation(folder: Path, undo: ExitStack) -> None:
    """Evaluation packs whole documents, so that micro-batches differ in tokens; ranks write down what each one lost."""
    from megatron.wlb import data_provider, step
    from megatron.wlb.parallel import ParallelDims
    from megatron.wlb.patches.registry import replace

    evaluation_spec, masked_loss = data_provider._evaluation_spec, step.masked_loss

    def whole_documents(*args: Any) -> Any:
        return changed(evaluation_spec(*args), cut="window")

    def writing(loss_mask: Any, output: Any) -> Any:
        result = masked_loss(loss_mask, output)
        if not output.requires_grad:
            rank = ParallelDims.current().rank
            with (folder / f"{rank}.jsonl").open("a") as file:
                file.write(json.dumps([float(result[0]), int(result[1])]) + "\n")
        return result

    replace(undo, data_provider, "_evaluation_spec", whole_documents)
    replace(undo, step, "masked_loss", writing)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(cp=2)], ids=str)
def test_validation_loss_is_a_mean_over_tokens(
    layout: Layout, toy_data: Path, start_checkpoint: Path, tmp_path: Path
) -> None:
    """Over all micro-batches and ranks, and not a mean of their means, which is printed to see that it differs."""
    args = [
        *("--data-path", toy_data, "--split", "80,20,0", "--wlb-packing", "plain"),
        *("--load", start_checkpoint, "--finetune", "--no-load-optim", "--no-load-rng"),
        *("--eval-iters", str(EVAL_ITERS), "--eval-interval", "1"),
    ]
    run = train(args, layout=layout, iterations=1, sabotage=partial(_unequal_evaluation, tmp_path))
    (logged, *_) = re.findall(r"validation loss at iteration 1 \| lm loss value: ([0-9.E+-]+)", run.log)
    ranks = [[json.loads(row) for row in path.read_text().splitlines()] for path in sorted(tmp_path.glob("*.jsonl"))]
    assert len(ranks) == layout.world_size
    count = EVAL_ITERS * 8 // layout.dp
    rows = [row for rank in ranks for row in rank[:count]]
    assert len(rows) == count * layout.world_size
    over_tokens = sum(loss for loss, _ in rows) / sum(tokens for _, tokens in rows)
    of_means = sum(loss / tokens for loss, tokens in rows if tokens) / sum(tokens > 0 for _, tokens in rows)
    print(f"mean over tokens {over_tokens}, mean of means {of_means}, logged {logged}")
    assert abs(of_means / over_tokens - 1) > 1e-3
    assert float(logged) == pytest.approx(over_tokens, rel=2e-6)


@pytest.mark.parametrize(
    "packer",
    [pytest.param(p, marks=[] if p in ("plain", "wlb", "makespan") else pytest.mark.slow) for p in sorted(PACKERS)],
)
def test_few_documents_on_three_replicas_neither_hang_nor_get_lost(packer: str, tmp_path: Path) -> None:
    """10 documents divide neither by replicas nor by micro-batches: epochs run on, and each document as often.

    Two more have nothing to train: no token, and one that could only be a label.
    """
    ten = [[*range(1, length + 1)] for length in (60, 2, 41, 7, 33, 3, 18, 50, 5, 26)]
    prefix = write_index(tmp_path / "ten", [[], *ten, [5]])
    args = [
        *("--data-path", prefix, "--split", "100,0,0", "--wlb-packing", packer, *OPTIONS.get(packer, [])),
        *("--global-batch-size", "6", "--wlb-ledger", tmp_path / "ledger", "--wlb-document-cut", "window"),
    ]
    run = train(args, layout=Layout(dp=3), iterations=5, timeout_s=60)
    assert len(run.losses) == 5
    assert all(math.isfinite(value) for value in (*run.losses, *run.grad_norms))
    rows = [json.loads(line) for line in (tmp_path / "ledger").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(5))
    sequences = Counter(d[1] for row in rows for replica in row["replicas"] for m in replica for d in m)
    assert set(sequences) == set(range(1, 11))
    assert min(sequences.values()) >= 2
    assert max(sequences.values()) - min(sequences.values()) <= 1


@pytest.mark.slow
def test_dropout_goes_on_where_it_was(toy_data: Path, tmp_path: Path) -> None:
    """The generators of random numbers are saved: a resumed run drops what the unbroken one drops."""
    args = ["--data-path", toy_data, "--split", "100,0,0", "--wlb-packing", "plain", "--hidden-dropout", "0.2"]
    layout, loading = Layout(cp=2), ["--load", tmp_path]
    unbroken = train(args, layout=layout, iterations=4)
    saving = ["--save", tmp_path, "--save-interval", "2", "--exit-interval", "2"]
    first = train([*args, *saving], layout=layout, iterations=4)
    resumed = train([*args, *loading], layout=layout, iterations=4)
    assert first.losses + resumed.losses == pytest.approx(unbroken.losses, rel=1e-6)
    # The control: with the generators of a fresh start, other numbers are dropped.
    forgetful = train([*args, *loading, "--no-load-rng"], layout=layout, iterations=4)
    assert abs(forgetful.losses[0] / unbroken.losses[2] - 1) > 1e-4


RECURRENT = [
    (["--experimental-attention-variant", "gated_delta_net"], "--experimental-attention-variant must be unset"),
    (["--hybrid-layer-pattern", "M*M-"], "--hybrid-layer-pattern must be off"),
    (["--mtp-num-layers", "1"], "--mtp-num-layers must be unset"),
]


@pytest.mark.parametrize(("options", "sentence"), RECURRENT, ids=lambda v: v[0] if isinstance(v, list) else "")
def test_layers_that_need_the_tokens_before_theirs_are_refused(
    options: list[str], sentence: str, toy_data: Path
) -> None:
    """They would take a rank's tokens for neighbours."""
    args = ["--data-path", toy_data, "--split", "100,0,0", "--wlb-packing", "plain", *options]
    with pytest.raises(RankFailure) as failure:
        train(args, layout=Layout(cp=2), iterations=1)
    assert f"ConfigError: {sentence}" in str(failure.value)
    assert "iteration        1/" not in str(failure.value), "training had begun"
