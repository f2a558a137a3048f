"""The scripts around training, with a stand-in for Python: what they show, keep and say when training fails."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ITERATION = (
    " [2026-01-01 10:00:00.000000] iteration        3/      24 | elapsed time per iteration (ms): 1777.2 | "
    "lm loss: 7.219001E+00 | loss scale: 1.0 |"
)


# Of a stand-in for Python: whether packages are there, and a port.
_ANSWERS = 'if [ "$1" = -c ]; then exit 0; fi\nif [ "$2" = wlb.ports ]; then echo 29999; exit 0; fi\n'


@pytest.fixture
def train(tmp_path):
    """train(printed, exit_code) runs quickstart_train.sh with a Python that prints and exits so."""
    venv = tmp_path / "an environment"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(f'#!/bin/sh\n{_ANSWERS}cat "$PRINTED"\nexit "$EXIT_CODE"\n')
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
    assert train("", 0, layout="pp4").stderr == "error: LAYOUT must be pp2, dp2, tp2, cp2, cp2pp2 or cp2dp2, got pp4\n"
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


@pytest.fixture
def quickstart(tmp_path):
    """quickstart(failing) runs a copy of the scripts with a Python that notes its calls; a run named so fails."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\n{_ANSWERS}echo "$@" >>"$CALLS"\n'
        'if [ "$2" = cost ]; then echo 2000; exit 0; fi\ncat "$PRINTED"\n'
        'case "$*" in *"$FAILING"*) echo "error (rank 0): no such flag"; exit 1 ;; esac\n'
    )
    python.chmod(0o755)
    shutil.copytree(ROOT / "scripts", tmp_path / "copy" / "scripts")
    (tmp_path / "printed").write_text(f"{ITERATION}\n")

    def run(failing="nothing fails"):
        more = {"PRINTED": str(tmp_path / "printed"), "CALLS": str(tmp_path / "calls"), "FAILING": failing}
        done = subprocess.run(
            [tmp_path / "copy/scripts/quickstart.sh"],
            env=os.environ | {"WLB_VENV": str(tmp_path), "LAYOUT": "dp2"} | more,
            capture_output=True,
            text=True,
            check=False,
        )
        return done, (tmp_path / "calls").read_text().splitlines()

    return run


def test_quickstart_measures_costs_elsewhere_then_trains_three_ways_and_compares(quickstart):
    done, calls = quickstart()
    assert done.returncode == 0, done.stderr
    corpus, calibration, cost, plain, wlb, makespan, compare = calls
    assert "build_corpus.py" in corpus
    assert "--train-iters 6 " in calibration
    assert calibration.endswith("--seed 2 --wlb-packing makespan --wlb-overhead-tokens 0")
    out = "runs/quickstart"
    assert cost == f"tools/report.py cost {out}/calibration --json {out}/cost.json"
    assert plain.endswith("--seed 1 --wlb-packing plain")
    for name, call in (("wlb", wlb), ("makespan", makespan)):
        assert call.endswith(f"--seed 1 --wlb-packing {name} --wlb-cost-profile {out}/cost.json")
        assert f"--wlb-timeline {out}/{name}/timeline" in call
    # The same pieces only if the steps are as many and cut alike.
    assert {call.split("--train-iters ")[1].split()[0] for call in (plain, wlb, makespan)} == {"18"}
    assert all("--wlb-document-cut stream" in call for call in (plain, wlb, makespan))
    assert f"--balanced wlb={out}/wlb makespan={out}/makespan --fit-from {out}/calibration" in compare
    assert "--layout dp2" in compare
    assert "step   3 of 24   loss 7.219" in done.stdout


def test_quickstart_ends_with_the_run_that_failed(quickstart, tmp_path):
    done, calls = quickstart("--wlb-packing wlb")
    assert done.returncode == 1
    assert "--wlb-packing wlb" in calls[-1]
    log = tmp_path / "copy/runs/quickstart/wlb/log.txt"
    assert done.stderr == f"error: training stopped: no such flag\n       log: {log}\n"
