"""Runs the sections of the GPU check in another process, so that none of them can lose the others.

A kernel that writes where it must not takes the process's CUDA context with it, and one that never ends takes the
process. So a worker runs the sections and tells of each; where it dies, hangs or ends, another one goes on with the
sections that are left. Nothing here loads torch.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron.wlb.gpu_check.results import Announcement, Result, save_results
from wlb.errors import WlbError

_START_UP_S = 150.0  # importing torch, Megatron and Transformer Engine from a cold disk
_ENDING_S = 10.0


class CheckNotStarted(WlbError):
    """The worker said nothing: there is nothing to report."""


def supervise(
    command: Sequence[str], folder: Path, *, total_s: float, start_up_s: float = _START_UP_S
) -> Generator[dict[str, Any] | Result, None, None]:
    """Run every section; yields the worker's description of the machine once, then each result as it comes.

    Args:
        command: starts a worker; `--seconds LEFT` is added. What it prints on stdout must be messages, one JSON object
            a line: `{"hello": {...}, "sections": [...]}` first, then for each section `{"begin": name, "limit_s": s,
            "budget_s": s}` and `{"result": {...}}`. It passes over sections that `folder` says have ended, and may end
            after any of them.
        total_s: no section is begun after them, and what runs then is stopped.

    Raises:
        CheckNotStarted: the first worker ended without a word.
    """
    deadline_s = time.monotonic() + total_s
    done: list[Result] = []
    left: list[Announcement] | None = None
    while left is None or left:
        now_s = time.monotonic()
        if left is not None and now_s >= deadline_s:
            yield from (a.failed(f"not begun: the {total_s:.0f} s of the check were over") for a in left)
            return
        save_results(done, folder)
        num_done = len(done)
        with _worker([*command, "--seconds", f"{deadline_s - now_s:.1f}"]) as worker:
            running: Announcement | None = None
            begin_s, budget_s, limit_s = now_s, 0.0, min(deadline_s, now_s + start_up_s)
            while True:
                message, reason = worker.next_message(limit_s)
                if message is None:
                    break
                if "hello" in message:
                    if left is None:
                        left = [Announcement(**a) for a in message["sections"]]
                        yield message["hello"]
                    limit_s = deadline_s
                elif "begin" in message:
                    assert left is not None
                    running = next(a for a in left if a.name == message["begin"])
                    begin_s, budget_s = time.monotonic(), message["budget_s"]
                    limit_s = min(deadline_s, begin_s + message["limit_s"])
                else:
                    done.append(Result(**message["result"]))
                    running, limit_s = None, deadline_s
                    left = [a for a in left or () if a.name != done[-1].name]
                    yield done[-1]
            if running is not None:
                done.append(running.failed(reason, duration_s=time.monotonic() - begin_s, budget_s=budget_s))
                left = [a for a in left or () if a is not running]
                yield done[-1]
        if left is None:
            raise CheckNotStarted(f"the process that runs the checks must start, but it {reason}")
        if len(done) == num_done:
            yield from (a.failed(f"not begun: the process that runs the checks {reason}") for a in left)
            return


class _Worker:
    def __init__(self, command: Sequence[str]) -> None:
        # A group of its own: what it starts (training runs) ends with it.
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def next_message(self, limit_s: float) -> tuple[dict[str, Any] | None, str]:
        """The next one; or None and why there is none: it `ran past N s` or `ended with ...`."""
        asked_s = time.monotonic()
        try:
            line = self._lines.get(timeout=max(0.0, limit_s - asked_s))
        except queue.Empty:
            return None, f"ran past {max(0.0, limit_s - asked_s):.0f} s and was stopped"
        if line is None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_ENDING_S)
            code = self.process.returncode
            if code is None:
                return None, "closed its output and did not end"
            return None, f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
        return json.loads(line), ""

    def stop(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(_ENDING_S)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()


@contextmanager
def _worker(command: Sequence[str]) -> Iterator[_Worker]:
    worker = _Worker(command)
    try:
        yield worker
    finally:
        worker.stop()
