"""Runs a function on several ranks, each a fork of one process that has imported Megatron already.

Importing costs ten seconds and most of a gigabyte; a fork costs neither. The fork server never starts a thread
pool or a process group, so what its children start is their own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from wlb.ports import free_port

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.harness.preload"])
_START_UP_S = 60.0
_LOG_TAIL_BYTES = 6000


class RankFailure(AssertionError):
    """A rank died, raised, or did not end in time; holds the end of its log."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call `function(*args)` on every rank; returns the results by rank.

    function: importable by name in the children. Its result is pickled.
    timeout_s: for all ranks together; then every rank is killed.

    Raises:
        RankFailure: naming the rank that failed first.
    """
    deadline_s = time.monotonic() + timeout_s + _START_UP_S
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world_size)]
        variables = _rank_variables(world_size) | (env or {})
        receivers: list[Connection] = []
        processes = []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            here = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = _CONTEXT.Process(target=_child, args=(function, args, here, logs[rank], sender))
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        try:
            return _collect(processes, receivers, logs, deadline_s)
        finally:
            for process in processes:
                _kill_with_children(process)


def _collect(
    processes: Sequence[Any], receivers: Sequence[Connection], logs: Sequence[Path], deadline_s: float
) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        pending = [r for r in range(len(processes)) if r not in results]
        ready = wait([receivers[r] for r in pending], timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise RankFailure(f"ranks {pending} did not end in time\n{_tail(logs[pending[0]])}")
        for rank in [r for r in pending if receivers[r] in ready]:
            try:
                outcome, value = receivers[rank].recv()
            except EOFError:
                processes[rank].join(5)
                outcome, value = "died", f"exit code {processes[rank].exitcode}"
            if outcome != "returned":
                raise RankFailure(f"rank {rank} {outcome}: {value}\n{_tail(logs[rank])}")
            results[rank] = value
    return [results[rank] for rank in range(len(processes))]


def _kill_with_children(process: Any) -> None:
    """Ranks lead process groups of their own, so what they started (checkpoint writers) ends with them."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _child(
    function: Callable[..., Any], args: tuple[Any, ...], variables: dict[str, str], log: Path, sender: Connection
) -> None:
    os.setsid()
    os.environ.update(variables)
    with log.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    try:
        sender.send(("returned", function(*args)))
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        sender.send(("raised", f"{type(error).__name__}: {error}"))
    finally:
        sender.close()
        sys.stdout.flush()
        # No interpreter shutdown: process groups of siblings that died would be waited for.
        os._exit(0)


def _rank_variables(world_size: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def _tail(log: Path) -> str:
    if not log.exists():
        return "(no log)"
    text = log.read_bytes()[-_LOG_TAIL_BYTES:]
    return text.decode(errors="replace")
