"""scripts/slurm/train.sbatch under a fake Slurm: what it starts, and how it stops and goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.fakes import MODELS, NODES, ROOT, Cluster, slurm_variables

SBATCH = ROOT / "scripts/slurm/train.sbatch"
MOCK = ("ckpt", "tb", "MOCK", "MOCK")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster.build(tmp_path)


class BatchScript:
    """The script while it runs, with one task that waits for SIGTERM."""

    def __init__(self, cluster: Cluster, **variables: str) -> None:
        self.cluster = cluster
        self.process = subprocess.Popen(
            [SBATCH, "7b_128k", *MOCK],
            env=cluster.environment(**slurm_variables("7b_128k"), **variables),
            cwd=cluster.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        deadline_s = time.monotonic() + 30
        while "ready" not in self.task_said():
            assert time.monotonic() < deadline_s, "the task never began"
            time.sleep(0.02)

    def task_said(self) -> list[str]:
        path = self.cluster.folder / "ready"
        return path.read_text().split("\n") if path.exists() else []

    def end(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def requeued(self) -> list[list[str]]:
        return [call.argv for call in self.cluster.calls("scontrol") if call.argv[0] == "requeue"]


@pytest.fixture
def started(cluster: Cluster) -> Iterator[list[BatchScript]]:
    """Running scripts; whatever is left of them at the end is killed."""
    scripts: list[BatchScript] = []
    yield scripts
    for script in scripts:
        if script.process.poll() is None:
            os.killpg(script.process.pid, signal.SIGKILL)
            script.process.communicate()


@pytest.mark.parametrize("model", MODELS)
def test_one_task_a_gpu_with_ranks_logs_and_an_address(model: str, cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run(SBATCH, model, *MOCK, "--", "--seed", "5", **slurm_variables(model, SLURM_CPUS_PER_TASK="12"))
    assert done.returncode == 0, done.stderr
    (srun,) = cluster.calls("srun")
    assert "--kill-on-bad-exit=1" in srun.argv
    assert srun.value("--distribution") == "block"
    assert srun.value("--cpus-per-task") == "12"
    assert re.fullmatch(r"logs/\d{4}-\d\d-\d\d/wlb_4242_0\.log", srun.value("--output"))
    assert (tmp_path / srun.value("--output")).parent.is_dir(), "srun makes no folders"
    assert not [word for word in srun.argv if word.startswith("--container")]
    assert srun.argv[-6:] == [*MOCK[1:], "--", "--seed", "5"]
    (task,) = cluster.calls("python")
    assert task.argv[0] == str(ROOT / "pretrain_gpt_wlb.py")
    assert (task.env["MASTER_ADDR"], task.env["MASTER_PORT"]) == ("node17", str(15000 + 4242))
    assert (task.env["WORLD_SIZE"], task.env["RANK"]) == (str(8 * NODES[model]), "0")
    assert not [call for call in cluster.calls("scontrol") if call.argv[0] == "requeue"]


def test_in_a_container_the_images_python_runs_the_mounted_repository(cluster: Cluster) -> None:
    variables = {"CONTAINER_IMAGE": "/images/wlb.sqsh", "CONTAINER_MOUNTS": "/data:/data,/ckpt:/ckpt"}
    done = cluster.run(SBATCH, "7b_128k", *MOCK, **slurm_variables("7b_128k"), **variables)
    assert done.returncode == 0, done.stderr
    (srun,) = cluster.calls("srun")
    assert srun.value("--container-image") == "/images/wlb.sqsh"
    assert srun.value("--container-mounts") == f"{ROOT}:{ROOT},/data:/data,/ckpt:/ckpt"
    assert srun.value("--container-workdir") == str(ROOT)
    assert len(cluster.calls("python3")) == 1
    assert not cluster.calls("python"), "the host's environment means nothing in the image"


def test_a_restart_loads_what_it_saved_and_has_a_log_of_its_own(cluster: Cluster) -> None:
    for restart in ("0", "1"):
        variables = slurm_variables("7b_128k", SLURM_RESTART_COUNT=restart)
        assert cluster.run(SBATCH, "7b_128k", *MOCK, **variables).returncode == 0
    first, second = cluster.calls("python")
    assert second.argv == first.argv, "the same command goes on where the checkpoint says"
    assert first.value("--load") == first.value("--save") == "ckpt"
    logs = [call.value("--output") for call in cluster.calls("srun")]
    assert [log.rsplit("_", 1)[1] for log in logs] == ["0.log", "1.log"]


def test_the_warning_saves_and_requeues_once(cluster: Cluster, started: list[BatchScript]) -> None:
    script = BatchScript(cluster, FAKE_TRAIN="saves")
    started.append(script)
    os.kill(script.process.pid, signal.SIGUSR1)
    time.sleep(0.1)
    os.kill(script.process.pid, signal.SIGUSR1)  # some clusters warn again
    code, errors = script.end()
    assert code == 0, errors
    assert "saved" in script.task_said(), "the job may only be requeued once the checkpoint is written"
    assert [call.argv for call in cluster.calls("scancel")] == [["--signal=TERM", "4242"]]
    assert script.requeued() == [["requeue", "4242"]]


def test_a_termination_saves_and_is_left_to_slurm(cluster: Cluster, started: list[BatchScript]) -> None:
    """A user's scancel must not bring the job back; after a preemption Slurm requeues by itself."""
    script = BatchScript(cluster, FAKE_TRAIN="saves")
    started.append(script)
    os.kill(script.process.pid, signal.SIGTERM)
    code, errors = script.end()
    assert code == 0, errors
    assert "saved" in script.task_said()
    assert script.requeued() == []


def test_a_run_that_could_not_save_is_requeued_with_a_warning(cluster: Cluster, started: list[BatchScript]) -> None:
    script = BatchScript(cluster, FAKE_TRAIN="saves badly")
    started.append(script)
    os.kill(script.process.pid, signal.SIGUSR1)
    code, errors = script.end()
    assert code == 0
    assert "warning: training ended with 5 while it was to save; it goes on from the last checkpoint" in errors
    assert script.requeued() == [["requeue", "4242"]]


def test_a_refused_requeue_is_an_error(cluster: Cluster, started: list[BatchScript]) -> None:
    script = BatchScript(cluster, FAKE_TRAIN="saves", FAKE_SCONTROL_FAILS="requeue")
    started.append(script)
    os.kill(script.process.pid, signal.SIGUSR1)
    code, errors = script.end()
    assert code != 0
    assert "error: scontrol requeue 4242 failed; submit the job again to go on" in errors


def test_a_failure_is_the_jobs_and_requeues_nothing(cluster: Cluster) -> None:
    done = cluster.run(SBATCH, "7b_128k", *MOCK, **slurm_variables("7b_128k"), FAKE_TRAIN="fails")
    assert done.returncode == 3
    assert not [call for call in cluster.calls("scontrol") if call.argv[0] == "requeue"]


REFUSED = [
    (["13b", *MOCK], {}, "error: MODEL must be one of 70b_128k 7b_128k, got 13b"),
    (["7b_128k", "ckpt"], {}, "error: MODEL and four arguments must be given, got 2"),
    (["7b_128k", *MOCK], {"SLURM_SUBMIT_DIR": "/"}, "error: WLB_ROOT must be the repository (or submit there), got /"),
]


@pytest.mark.parametrize(("arguments", "variables", "sentence"), REFUSED, ids=["model", "arguments", "folder"])
def test_mistakes_are_refused_in_a_sentence(
    arguments: list[str], variables: dict[str, str], sentence: str, cluster: Cluster
) -> None:
    done = cluster.run(SBATCH, *arguments, **(slurm_variables("7b_128k") | variables))
    assert done.returncode == 2
    assert sentence in done.stderr
    assert not cluster.calls("srun")


def test_slurm_runs_a_copy_of_the_script(cluster: Cluster, tmp_path: Path) -> None:
    copy = shutil.copy(SBATCH, tmp_path / "slurm_script")
    done = cluster.run(Path(copy), "7b_128k", *MOCK, **slurm_variables("7b_128k"))
    assert done.returncode == 0, done.stderr
    assert len(cluster.calls("python")) == 1


def test_the_header_asks_for_what_the_script_relies_on() -> None:
    """sbatch stops reading options at the first command."""
    lines = SBATCH.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line.removeprefix("#SBATCH ") for line in lines[:first_command] if line.startswith("#SBATCH ")]
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]
    wanted = {"--requeue", "--signal=B:USR1@300", "--ntasks-per-node=8", "--gpus-per-node=8", "--nodes=8"}
    assert wanted <= set(options)
    assert not [option for option in options if option.startswith("--gpus-per-task")]
