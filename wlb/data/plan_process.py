"""Plans steps in a process beside this one that runs ahead.

Planning in Python takes the interpreter from the thread that launches kernels; a process of its own does not.
It reads lengths through its own memory map, imports neither torch nor Megatron, and stays a few steps ahead, so
that training waits only where planning takes longer than a step.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import deque
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from wlb.data.plan_source import PlannerSpec
from wlb.data.planned_step import PlannedStep, pack_micro_batches, unpack_micro_batches
from wlb.data.sharded_step import pack_shard_plans, unpack_shard_plans
from wlb.errors import ConfigError, PlannerProcessError, WlbError

_ROOT = str(Path(__file__).resolve().parents[2])


class ProcessSource:
    """Plans in a process beside this one, at most `steps_ahead` steps ahead.

    rank: named in errors.
    timeout_s: longest wait for a step or a state.

    Raises what building the planner raises; PlannerProcessError where the process dies or takes too long.
    """

    def __init__(self, spec: PlannerSpec, *, steps_ahead: int, rank: int, timeout_s: float = 300.0) -> None:
        if steps_ahead < 1:
            raise ConfigError(f"steps_ahead must be >= 1, got {steps_ahead}")
        self._spec = spec
        self._rank = rank
        self._timeout_s = timeout_s
        self._connection, theirs = Pipe()
        # Not through multiprocessing, which would run the training script again in the new process.
        code = (
            f"import sys; sys.path.insert(0, {_ROOT!r}); "
            f"from wlb.data.plan_process import serve; serve({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._send(replace(spec, kept_steps=steps_ahead + 2))
        self._ready: deque[PlannedStep] = deque()
        self._given = 0 if spec.restored is None else int(spec.restored["packer_state"]["step"])
        self._num_steps = spec.num_steps
        self._ordered = self._given
        try:
            self._receive()  # built, or the error that building raised
        except Exception:
            self.close()
            raise
        self._order(steps_ahead)

    def next_step(self) -> PlannedStep:
        while not self._ready:
            if self._ordered == self._given:
                raise ConfigError(f"step must be below num_steps {self._num_steps}, got {self._given}")
            self._ready.append(self._decode(self._receive()))
        self._order(1)
        self._given += 1
        return self._ready.popleft()

    def state(self) -> dict[str, Any]:
        self._send(("state", self._given))
        while True:
            kind, value = self._receive()
            if kind == "state":
                state: dict[str, Any] = value
                return state
            self._ready.append(self._decode((kind, value)))

    def close(self) -> None:
        self._connection.close()
        self._end_process()

    def _decode(self, message: tuple[str, Any]) -> PlannedStep:
        kind, content = message
        assert kind == "step", f"expected a step, got {kind}"
        step, table, counts, shards, fingerprint, documents, *statistics, counters, plan_s, line = content
        spans, span_counts, indexes = shards
        micro_batches = unpack_micro_batches(table, counts)
        return PlannedStep(
            step=step,
            micro_batches=micro_batches,
            shard_plans=unpack_shard_plans(
                spans,
                span_counts,
                indexes,
                micro_batches,
                cp_size=self._spec.sharding.cp_size,
                pad_to_multiple=self._spec.pad_to_multiple,
            ),
            fingerprint=fingerprint,
            document_table=documents,
            statistics=statistics[0],
            shard_statistics=statistics[1],
            counters=counters,
            plan_s=plan_s,
            ledger_line=line,
        )

    def _order(self, count: int) -> None:
        """Ask for `count` further steps, not beyond the last one."""
        for _ in range(count):
            if self._num_steps is None or self._ordered < self._num_steps:
                self._send(("plan", self._ordered))
                self._ordered += 1

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except (BrokenPipeError, OSError) as error:
            raise self._died() from error

    def _receive(self) -> Any:
        if not self._connection.poll(self._timeout_s):
            raise PlannerProcessError(
                f"rank {self._rank}: planning must answer within {self._timeout_s:.0f} s, got nothing for step "
                f"{self._given}"
            )
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._died() from error
        if kind == "error":
            assert isinstance(value, Exception)
            raise value
        return kind, value

    def _died(self) -> PlannerProcessError:
        return PlannerProcessError(
            f"rank {self._rank}: the planning process ended before step {self._given}, exit code {self._end_process()}"
        )

    def _end_process(self) -> int:
        """It ends by itself when the connection closes."""
        try:
            return self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def serve(descriptor: int) -> None:
    """The planning process: answers requests in order, ends when the other side closes or dies.

    descriptor: of its end of the connection, over which the `PlannerSpec` comes first.
    """
    connection = Connection(descriptor)
    # Ctrl-C goes to the whole process group, and Slurm may send its warnings to every process of a job; the training
    # process decides when this one ends, and still asks it for the state that goes into the last checkpoint.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        spec: PlannerSpec = connection.recv()
        planner = spec.build()
        connection.send(("built", None))
        while True:
            request, step = connection.recv()
            if request == "state":
                connection.send(("state", planner.state_before(step)))
            else:
                connection.send(("step", _encode(spec.plan(planner))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except WlbError as error:
        _say_last(connection, error)
    except Exception as error:
        _say_last(connection, PlannerProcessError(f"planning failed: {type(error).__name__}: {error}"))


def _say_last(connection: Connection, error: Exception) -> None:
    """Leave the error for when it is asked for: the other side may still hold steps and go on ordering."""
    with suppress(EOFError, OSError):
        connection.send(("error", error))
        while True:
            connection.recv()


def _encode(step: PlannedStep) -> tuple[Any, ...]:
    return (
        step.step,
        *pack_micro_batches(step.micro_batches),
        pack_shard_plans(step.shard_plans),
        step.fingerprint,
        step.document_table,
        step.statistics,
        step.shard_statistics,
        step.counters,
        step.plan_s,
        step.ledger_line,
    )
