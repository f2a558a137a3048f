"""The scripts around training, with a stand-in for Python: what they show, keep and say when training fails."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ITERATION = (
    " [2026-01-01 10:00:00.000000] iteration        3/      24 | elapsed time per iteration (ms): 1777.2 | "
    "lm loss: 7.219001E+00 | loss scale: 1.0 |"
)


@pytest.fixture
def train(tmp_path):
    """train(printed, exit_code) runs quickstart_train.sh with a Python that prints and exits so."""
    venv = tmp_path / "an environment"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text('#!/bin/sh\nif [ "$1" = -c ]; then echo 29999; exit 0; fi\ncat "$PRINTED"\nexit "$EXIT_CODE"\n')
    python.chmod(0o755)

    def run(printed, exit_code, *, layout="pp2"):
        (tmp_path / "printed").write_text(printed)
        return subprocess.run(
            [
                ROOT / "scripts/quickstart_train.sh",
                tmp_path / "a run",
                tmp_path / "corpus",
                layout,
                "24",
                "--seed",
                "1",
            ],
            env=os.environ | {"WLB_VENV": str(venv), "PRINTED": str(tmp_path / "printed"), "EXIT_CODE": str(exit_code)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_progress_is_shown_and_everything_kept(train, tmp_path):
    done = train(f"loading ...\n{ITERATION}\n", 0)
    assert done.returncode == 0, done.stderr
    assert "step   3 of 24   loss 7.219    1.78 s a step" in done.stdout
    assert "loading" not in done.stdout
    assert (tmp_path / "a run/log.txt").read_text() == f"loading ...\n{ITERATION}\n"
    command = (tmp_path / "a run/command.txt").read_text()
    assert "--pipeline-model-parallel-size 2" in command
    assert command.endswith("--seed 1 \n")


def test_an_earlier_run_leaves_no_time_line_behind(train, tmp_path):
    (tmp_path / "a run/timeline").mkdir(parents=True)
    (tmp_path / "a run/timeline/rank000.jsonl").touch()
    assert train(ITERATION, 0).returncode == 0
    assert not (tmp_path / "a run/timeline").exists()


@pytest.mark.parametrize(
    ("printed", "sentence"),
    [
        ("error (rank 1): --seq-length must be even, got 3\nValueError: later", "--seq-length must be even, got 3"),
        ("[default0]:error (rank 0): no index\n", "no index"),
        ("pretrain_gpt_wlb.py: error: unrecognized arguments: --x\n", "unrecognized arguments: --x"),
        ("Traceback\n  torch.foo\nRuntimeError: gloo\ntorch.distributed.ChildFailedError:\n", "RuntimeError: gloo"),
        ("Killed\n", "no error was printed"),
    ],
)
def test_a_failure_is_a_sentence_and_the_path_of_the_log(train, tmp_path, printed, sentence):
    failed = train(printed, 1)
    assert failed.returncode == 1
    assert failed.stderr == f"error: training stopped: {sentence}\n       log: {tmp_path}/a run/log.txt\n"


def test_an_unknown_layout_is_refused_before_anything_is_done(train, tmp_path):
    assert train("", 0, layout="pp4").stderr == "error: LAYOUT must be pp2, dp2 or tp2, got pp4\n"
    refused = subprocess.run(
        [ROOT / "scripts/quickstart.sh"],
        env=os.environ | {"LAYOUT": "cp2"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr == "error: LAYOUT must be pp2, dp2 or tp2, got cp2\n"
