"""The launchers' command lines with a tiny model on the CPU: trained, stopped by Slurm's warning, gone on with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.harness.training import CPU_ARGS
from tests.launch.fakes import ROOT, Cluster, slurm_variables
from wlb.ports import free_port

TINY = {
    "NUM_LAYERS": "2",
    "HIDDEN_SIZE": "32",
    "FFN_HIDDEN_SIZE": "64",
    "NUM_ATTENTION_HEADS": "4",
    "SEQ_LENGTH": "256",
    "VOCAB_SIZE": "127",
    "GLOBAL_BATCH_SIZE": "4",
    "LR_WARMUP_ITERS": "1",
    "TP": "1",
    "CP": "2",
    "PP": "1",
    "PRECISION": "fp32",
    "TRANSFORMER_IMPL": "local",
    "PYTHON": sys.executable,
    "PYTHONWARNINGS": "ignore",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
}
# Last, and so the ones that count.
FLAGS = ["--", *CPU_ARGS, "--eval-iters", "1", "--eval-interval", "2"]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster.build(tmp_path)


def _iterations(log: str) -> list[int]:
    return [int(n) for n in re.findall(r"^.*iteration +(\d+)/.*lm loss", log, flags=re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [("7b_128k", {}), ("70b_128k", {"TP": "4", "CP": "1", "NUM_QUERY_GROUPS": "2"})],
    ids=["cp2", "more ranks than groups"],
)
def test_two_steps_on_mock_data(model: str, layout: dict[str, str], cluster: Cluster, tmp_path: Path) -> None:
    variables = TINY | layout | {"TRAIN_ITERS": "2", "MASTER_PORT": str(free_port())}
    variables["GPUS_PER_NODE"] = "4" if variables["TP"] == "4" else "2"
    done = subprocess.run(
        [ROOT / f"scripts/train_{model}.sh", "ckpt", "tb", "MOCK", "MOCK", *FLAGS, "--save-interval", "100"],
        env=cluster.environment(**variables),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert _iterations(done.stdout) == [1, 2]
    assert "validation loss at iteration 2" in done.stdout
    assert list((tmp_path / "tb").iterdir()), "TensorBoard got nothing"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slurms_warning_saves_training_and_packing_and_the_next_run_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """The whole way: batch script, fake srun, two real training processes, SIGUSR1, SIGTERM, checkpoint, requeue."""
    tiny = TINY | {"FAKE_NUM_TASKS": "2", "FAKE_HOST": "localhost", "TRAIN_ITERS": "100000", "SAVE_INTERVAL": "100000"}

    def start(*flags: str, **more: str) -> subprocess.Popen[str]:
        variables = slurm_variables("7b_128k", MASTER_PORT=str(free_port())) | tiny | more
        return subprocess.Popen(
            [ROOT / "scripts/slurm/train.sbatch", "7b_128k", "ckpt", "tb", "MOCK", "MOCK", *FLAGS, *flags],
            env=cluster.environment(**variables),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def output_of(process: subprocess.Popen[str], *, warn_at: int | None) -> str:
        """Reads to the end; sends the warning once that iteration is done. Kills all after four minutes."""
        timer = threading.Timer(240, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        lines = []
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if warn_at is not None and _iterations(line) == [warn_at]:
                    os.kill(process.pid, signal.SIGUSR1)
        timer.cancel()
        return "".join(lines)

    first = start()
    log = output_of(first, warn_at=3)
    assert first.returncode == 0, log[-4000:]
    stopped_at = int((tmp_path / "ckpt/latest_checkpointed_iteration.txt").read_text())
    assert 3 <= stopped_at == _iterations(log)[-1]
    assert sorted(path.name for path in (tmp_path / "ckpt").rglob("train_dataloader_*.pt")) == [
        "train_dataloader_dprank000.pt"
    ]
    assert [call.argv for call in cluster.calls("scontrol") if call.argv[0] == "requeue"] == [["requeue", "4242"]]
    second = start("--exit-interval", "1", SLURM_RESTART_COUNT="1")
    log = output_of(second, warn_at=None)
    assert second.returncode == 0, log[-4000:]
    assert "packing goes on from" in log
    assert _iterations(log) == [stopped_at + 1]
    assert len([call for call in cluster.calls("scontrol") if call.argv[0] == "requeue"]) == 1
