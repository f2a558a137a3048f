"""Runs processes, a few at a time, and says how far they are. For benchmarks/convergence.py."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wlb.errors import ConfigError, WlbError
from wlb.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
_POLL_S, _SAY_S = 1.0, 60.0


class RunsFailed(WlbError):
    """Some of the processes ended with an error; the others went on to their end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process to run: its output goes to the end of `log`. progress: one line on how far it is."""

    name: str
    command: list[str]
    log: Path
    progress: Callable[[], str]


@contextmanager
def only_user_of(folder: Path) -> Iterator[None]:
    """Holds the folder for this process: two that train the same runs would spoil each other's files.

    Raises:
        ConfigError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--folder must not be in use by another benchmark, got {folder}") from None
        yield


def run_jobs(jobs: list[Job], num_processes: int) -> None:
    """All of them, `num_processes` at a time; ends them when it is ended itself.

    Raises:
        RunsFailed: naming those that failed, once all others have ended.
    """
    waiting, failed = list(jobs), []
    running: dict[subprocess.Popen[bytes], Job] = {}
    said_s = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < num_processes:
                job = waiting.pop(0)
                print(f"{time.strftime('%H:%M:%S')} {job.name} begins: {job.progress()}", flush=True)
                running[_start(job)] = job
            time.sleep(_POLL_S)
            for process in [p for p in running if p.poll() is not None]:
                job = running.pop(process)
                print(
                    f"{time.strftime('%H:%M:%S')} {job.name} ends with {process.returncode}: {job.progress()}",
                    flush=True,
                )
                if process.returncode:
                    failed.append(f"{job.name} ({job.log})")
            if time.monotonic() - said_s >= _SAY_S:
                said_s = time.monotonic()
                for job in running.values():
                    print(f"{time.strftime('%H:%M:%S')} {job.name}: {job.progress()}", flush=True)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    if failed:
        raise RunsFailed(
            f"{len(failed)} of {len(jobs)} processes ended with an error, see the end of: {', '.join(failed)}"
        )


def _start(job: Job) -> subprocess.Popen[bytes]:
    # One process is a world of its own; one thread each, or processes would take the cores from each other.
    world = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    single = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_VISIBLE_DEVICES": ""}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ | world | single | {"PYTHONPATH": path}
    with job.log.open("ab") as log:
        return subprocess.Popen(job.command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
