"""--mock-data with --wlb-packing: documents of varied length without a file, split, planned and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import run_ranks
from tests.harness.training import Layout, train

WINDOW = 64  # of the harness


def _open(options: dict[str, Any]) -> dict[str, Any]:
    """What --mock-data opens, or the error it raises. Runs in a rank."""
    from argparse import Namespace

    from megatron.wlb.token_files import open_token_files
    from wlb.errors import ConfigError

    named = ("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path")
    args: dict[str, Any] = dict.fromkeys((*named, "per_split_data_args_path", "split"))
    args |= {"mock_data": True, "seq_length": WINDOW, "seed": 1, **options}
    try:
        files = open_token_files(Namespace(**args), vocab_size=100)
    except ConfigError as error:
        return {"error": str(error)}
    stored = int(files.rows[0][0].lengths()[12])
    return {
        "rows": [[(rows.first, rows.stop) for rows in split] for split in files.rows],
        "stored": stored,
        "read": [len(files.read(12, 0, stored)), len(files.read(12, stored - 1, 9))],
    }


def test_the_split_is_even_or_as_asked_and_documents_end() -> None:
    even, asked, empty, none = run_ranks(_each, 1, [{}, {"split": "100,0,0"}, {"split": "0,50,50"}, {"mock_data": 0}])[
        0
    ]
    assert even["rows"] == [[(0, 65536)], [(65536, 131072)], [(131072, 196608)]]
    assert even["read"] == [even["stored"], 1]
    assert asked["rows"] == [[(0, 196608)], [], []]
    assert empty["error"] == "--split must leave sequences to the training split, got 0,50,50"
    assert none["error"].startswith("--data-path must name .bin/.idx data with --wlb-packing, got none")


def _each(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_open(case) for case in cases]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(), []),
        # Documents that wait: thresholds are chosen from the mock lengths, which takes seconds.
        pytest.param(
            Layout(cp=2), ["--wlb-cp-sharding", "--wlb-max-delay-steps", "4"], id="delay", marks=pytest.mark.slow
        ),
    ],
)
def test_a_packed_run_trains_on_mock_data(layout: Layout, options: list[str], tmp_path: Path) -> None:
    """Training and evaluation."""
    ledger = tmp_path / "ledger.jsonl"
    args = ["--mock-data", "--wlb-packing", *options, "--wlb-ledger", ledger]
    evaluating = ["--eval-interval", "12", "--eval-iters", "1", "--lr", "1e-2"]
    run = train([*args, *evaluating], layout=layout, iterations=12)
    assert sum(run.losses[-4:]) < 0.98 * sum(run.losses[:4]), "progressions can be learnt"
    assert "validation loss at iteration 12" in run.log
    steps = [json.loads(line)["replicas"] for line in ledger.read_text().splitlines()]
    documents = [tuple(d) for step in steps for replica in step for micro_batch in replica for d in micro_batch]
    lengths = [length for *_, length in documents]
    assert len(documents) == len(set(documents)) > 20
    assert max(lengths) > WINDOW / 4 >= 16 > min(lengths), "outliers and short documents"


@pytest.mark.slow
def test_another_seed_is_other_data(tmp_path: Path) -> None:
    from tests.harness.processes import RankFailure

    args = ["--mock-data", "--wlb-packing", "plain", "--save", tmp_path, "--load", tmp_path, "--save-interval", "2"]
    train(args, iterations=2)
    with pytest.raises(RankFailure, match="StateError"):
        train([*args, "--seed", "77", "--override-opt-param-scheduler"], iterations=4)
