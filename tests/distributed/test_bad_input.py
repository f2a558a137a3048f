"""What cannot be trained is refused in a sentence, before training, with a non-zero exit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import RankFailure
from tests.harness.training import CPU_ARGS, MODEL_ARGS, train

ROOT = Path(__file__).resolve().parents[2]


def _message(args: list[Any]) -> str:
    with pytest.raises(RankFailure) as failure:
        train(args, iterations=2)
    first_line = str(failure.value).splitlines()[0]
    assert "iteration        1/" not in str(failure.value), "training had begun"
    return first_line


@pytest.fixture
def packed(toy_data: Path) -> list[Any]:
    return ["--data-path", toy_data, "--split", "100,0,0", "--wlb-packing", "wlb"]


REFUSED = [
    (["--micro-batch-size", "2"], "--micro-batch-size must be 1 with --wlb-packing, got 2"),
    (
        ["--cuda-graph-impl", "local", "--te-rng-tracker"],
        "--cuda-graph-impl must be none with --wlb-packing, got local",
    ),
    (["--mtp-num-layers", "1"], "--mtp-num-layers must be unset with --wlb-packing, got 1"),
    (
        ["--position-embedding-type", "mrope", "--mrope-section", "2", "1", "1"],
        "--position-embedding-type must not be mrope with --wlb-packing, got mrope",
    ),
    (["--dataloader-type", "cyclic"], "--dataloader-type must be unset or external with --wlb-packing, got cyclic"),
    (["--rampup-batch-size", "4", "2", "16"], "--rampup-batch-size must be unset (Megatron ignores it"),
    (["--iterations-to-skip", "1"], "--iterations-to-skip must be unset with --wlb-packing, got"),
    (["--full-validation"], "--full-validation must be off with --wlb-packing, got True"),
    (["--attention-dropout", "0.1"], "--attention-dropout must be 0 with --wlb-packing, got 0.1"),
    (["--attention-backend", "local", "--spec", "local"], "--spec must be unset"),
    (
        ["--num-experts", "4", "--disable-bias-linear", "--moe-router-load-balancing-type", "global_aux_loss"],
        "--moe-router-load-balancing-type must not be global_aux_loss",
    ),
    (["--window-size", "8,2"], "--window-size must end in ,0 (a query sees no key behind its own)"),
    (["--wlb-operations-per-byte", "-1"], "--wlb-operations-per-byte must be finite and >= 0, got -1"),
    (
        ["--wlb-keep-gathered-kv", "--cp-comm-type", "p2p"],
        "--wlb-keep-gathered-kv needs --cp-comm-type all_gather (a ring holds no gathered keys), got True",
    ),
    (["--wlb-thresholds", "40", "24"], "--wlb-thresholds must be > 0 and increase strictly, got 40 24"),
    (["--wlb-thresholds", "24", "24"], "--wlb-thresholds must be > 0 and increase strictly, got 24 24"),
    (["--wlb-thresholds", "24", "96"], "--wlb-thresholds must stay below the cap of a micro-batch, 96 tokens, got 96"),
    (["--wlb-cap-windows", "1.0"], "--wlb-cap-windows must be > 1 with packer wlb"),
    (["--wlb-cap-windows", "nan"], "--wlb-cap-windows must be > 1 with packer wlb"),
    (["--wlb-packing", "makespan", "--wlb-cap-windows", "inf"], "--wlb-cap-windows must be >= 1 with packer makespan"),
    (
        ["--wlb-packing", "makespan", "--wlb-thresholds", "24"],
        "--wlb-thresholds needs --wlb-max-delay-steps >= 1 with packer makespan, got 24",
    ),
    (["--wlb-packing", "greedy", "--wlb-thresholds", "24"], "--wlb-thresholds is read by wlb and makespan"),
    (
        ["--wlb-packing", "makespan", "--wlb-max-delay-steps", "4", "--wlb-cap-windows", "2", "--wlb-thresholds", "65"],
        "--wlb-thresholds must be at most --seq-length, 64, the longest piece of a document, got 65",
    ),
    (["--wlb-intake", "budget"], "--wlb-intake needs --wlb-max-delay-steps >= 1, got budget"),
    (["--wlb-packing", "makespan", "--wlb-intake", "budget"], "--wlb-intake is read by wlb only, got budget"),
    (
        ["--wlb-intake", "budget", "--wlb-max-delay-steps", "4", "--wlb-num-queues", "1"],
        "--wlb-num-queues is read by --wlb-intake algorithm1 only, got 1",
    ),
    (
        ["--wlb-packing", "plain", "--wlb-cap-windows", "2"],
        "--wlb-cap-windows is read by wlb and makespan and two_stage and solver",
    ),
    (
        ["--wlb-packing", "two_stage", "--wlb-cap-windows", "0.5"],
        "--wlb-cap-windows must be >= 1 with packer two_stage",
    ),
    (["--wlb-packing", "wlb", "--wlb-solver-seconds", "2"], "--wlb-solver-seconds is read by solver only, got 2.0"),
    (["--wlb-packing", "solver", "--wlb-solver-seconds", "0"], "--wlb-solver-seconds must be finite and > 0, got 0.0"),
    (
        ["--wlb-packing", "solver", "--wlb-solver-lengths", "fixed", "--wlb-cap-windows", "1.5"],
        "--wlb-cap-windows must be 1 with --wlb-solver-lengths fixed, got 1.5",
    ),
    (["--split", "0,100,0"], "--split must leave sequences to the training split, got 0,100,0"),
    (["--wlb-crossover", "-5"], "--wlb-crossover must be finite and > 0, got -5"),
    (["--wlb-packing", "greedy", "--wlb-greedy-window", "-1"], "--wlb-greedy-window must be >= 1, got -1"),
    (["--wlb-num-queues", "9"], "--wlb-num-queues must be in [0, 4], got 9"),
    (
        ["--wlb-packing", "makespan", "--wlb-cap-windows", "0.5"],
        "--wlb-cap-windows must be >= 1 with packer makespan",
    ),
    (
        ["--wlb-packing", "makespan", "--wlb-cap-windows", "2", "--wlb-in-flight-windows", "1"],
        "--wlb-in-flight-windows must be >= the cap of a micro-batch, 2.0 windows, got 1.0",
    ),
    (["--wlb-packing", "makespan", "--wlb-search-evaluations", "-1"], "--wlb-search-evaluations must be >= 0, got -1"),
    (
        ["--wlb-packing", "wlb", "--wlb-max-delay-steps", "4"],
        "--wlb-max-delay-steps is read by makespan and two_stage, and by wlb with --wlb-intake budget, got 4",
    ),
    (["--wlb-packing", "makespan", "--wlb-max-delay-steps", "-1"], "--wlb-max-delay-steps must be >= 0, got -1"),
    (["--wlb-plan-ahead", "-1"], "--wlb-plan-ahead must be >= 0, got -1"),
    (["--wlb-cost-profile", "nowhere.json"], "cost file nowhere.json must be readable JSON"),
    (["--sft"], "--sft must be off"),
    (["--wlb-packng", "makespan"], "--wlb-* flags must exist, got --wlb-packng: was --wlb-packing meant?"),
    (["--wlb-cap-window=2"], "--wlb-* flags must exist, got --wlb-cap-window: was --wlb-cap-windows meant?"),
    (["--mock-data"], "data must come from one source, got --mock-data and --data-path: give one of them only"),
    (
        ["--transformer-impl", "transformer_engine"],
        "without Transformer Engine a run needs --transformer-impl local: give",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_options_are_refused_by_name(options: list[str], sentence: str, packed: list[Any]) -> None:
    assert sentence in _message([*packed, *options])


def test_our_flags_need_packing(toy_data: Path) -> None:
    args = ["--data-path", toy_data, "--split", "100,0,0", "--wlb-ledger", "somewhere"]
    assert "--wlb-ledger needs --wlb-packing, got somewhere without it" in _message(args)


def test_missing_data(packed: list[Any], tmp_path: Path) -> None:
    packed[1] = tmp_path / "nothing"
    assert f"{tmp_path / 'nothing'}.idx is not a file" in _message(packed)


def test_a_prefix_with_its_suffix(packed: list[Any], toy_data: Path) -> None:
    packed[1] = f"{toy_data}.bin"
    assert f"{toy_data}.bin.idx is not a file: give the prefix without .bin" in _message(packed)


def test_no_evaluation_interval_is_megatrons_of_old() -> None:
    """As docs/start_gpu.md trains; Megatron's loop would divide by None. The start says what is queued and cut, too."""
    options = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--mock-data", "--wlb-packing"]
    run = train(options, iterations=2, without=("--eval-interval",))
    assert len(run.losses) == 2
    assert "--eval-interval is 1000" in run.log
    assert "> --wlb-packing makespan: no queues of long documents, documents cut where plain cuts them\n" in run.log


def test_no_data_named() -> None:
    assert "--data-path must name .bin/.idx data" in _message(["--wlb-packing", "plain"])


@pytest.mark.parametrize("kind", ["idx", "bin"])
def test_truncated_files(kind: str, packed: list[Any], toy_data: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "short"
    for suffix in ("idx", "bin"):
        shutil.copy(f"{toy_data}.{suffix}", f"{prefix}.{suffix}")
    with open(f"{prefix}.{kind}", "r+b") as file:
        file.truncate(Path(f"{prefix}.{kind}").stat().st_size // 2)
    packed[1] = prefix
    message = _message(packed)
    assert "DataError" in message
    assert f"{prefix}.{kind}" in message


def test_token_beyond_the_vocabulary(packed: list[Any], tmp_path: Path) -> None:
    from tests.harness.data import write_index

    packed[1] = write_index(tmp_path / "other_tokenizer", [[1, 2, 3, 4], [5, 4000, 6]])
    assert "token ids must be below the vocabulary size 128, got 4000 in sequence 1" in _message(packed)


def test_empty_documents_only(packed: list[Any], tmp_path: Path) -> None:
    """One token is a label without an input: nothing to train."""
    from tests.harness.data import write_index

    packed[1] = write_index(tmp_path / "labels_only", [[1], [2], [3]])
    assert "must hold a sequence of more than 1 token in the train split" in _message(packed)


def test_a_corpus_of_a_single_document_trains(packed: list[Any], tmp_path: Path) -> None:
    from tests.harness.data import write_index

    packed[1] = write_index(tmp_path / "single", [[*range(1, 101)] * 3])
    assert len(train(packed, iterations=2).losses) == 2


def test_the_command_exits_with_1_and_one_sentence(packed: list[Any]) -> None:
    argv = [*MODEL_ARGS, *CPU_ARGS, "--train-iters", "2", *map(str, packed), "--micro-batch-size", "2"]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "pretrain_gpt_wlb.py", *argv],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 1
    assert "error (rank 0): --micro-batch-size must be 1 with --wlb-packing, got 2" in run.stderr.splitlines()
    assert "Traceback" not in run.stderr
