"""Where planned steps come from: this process, or one beside it that runs ahead.

Planning in Python takes the interpreter from the thread that launches kernels; a process of its own does not.
It reads lengths through its own memory map, imports neither torch nor Megatron, and stays a few steps ahead, so
that training waits only where planning takes longer than a step.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

from wlb.cost.model import CostModel
from wlb.data.planned_step import (
    PlannedStep,
    document_table,
    pack_micro_batches,
    statistics_of,
    unpack_micro_batches,
)
from wlb.data.planner import StepPlanner, ledger_line
from wlb.data.sharded_step import pack_shard_plans, shard_statistics, shard_step, unpack_shard_plans
from wlb.data.source import DocumentRows
from wlb.data.stream import DocumentCut, DocumentStream
from wlb.errors import ConfigError, PlannerProcessError, WlbError
from wlb.packing.options import PackerOptions
from wlb.packing.registry import build_packer
from wlb.sharding import Sharding
from wlb.sharding.index import IndexKind, prepare

_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, kw_only=True)
class PlannerSpec:
    """Everything from which a planner of one rank is built, in any process.

    rows: the sequences of the split, one entry a data set of the blend.
    packer, options: see `wlb.packing.build_packer`.
    ramp: (first step, micro-batches of a replica) while the batch size still grows; see `StepPlanner`.
    num_steps: see `StepPlanner`.
    replica: data-parallel rank whose micro-batches are wanted.
    sharding: how context-parallel ranks divide each micro-batch. cp_rank: the one whose indexes are made.
    index_uses: communication type and window of each kind of attention layer; see `wlb.sharding.index.prepare`.
    cost: for the statistics.
    pad_to_multiple: tokens to which the tail of a micro-batch is padded.
    keeps_ledger: make a ledger line of every step.
    restored: a state of `StepPlanner.state`, or None at the beginning.
    kept_steps: see `StepPlanner`; more than the steps planned ahead.
    """

    rows: tuple[DocumentRows, ...]
    window_tokens: int
    cut: DocumentCut
    seed: int
    packer: str
    options: PackerOptions
    num_steps: int | None
    replica: int
    cost: CostModel
    pad_to_multiple: int
    sharding: Sharding = field(default_factory=Sharding)
    cp_rank: int = 0
    index_uses: tuple[tuple[IndexKind, int | None], ...] = ()
    keeps_ledger: bool = False
    restored: dict[str, Any] | None = None
    ramp: tuple[tuple[int, int], ...] = ()
    kept_steps: int = 2

    def build(self, clock: Callable[[], float] = time.perf_counter) -> StepPlanner:
        """Raises StateError if `restored` is of other data or of another configuration."""
        planner = StepPlanner(
            stream=DocumentStream(
                [r.source() for r in self.rows], window_tokens=self.window_tokens, cut=self.cut, seed=self.seed
            ),
            packer=build_packer(self.packer, self.options),
            ramp=[(first, build_packer(self.packer, self._options_of(count))) for first, count in self.ramp],
            num_steps=self.num_steps,
            # Packers of a fixed count run more only in a last step, and do not know which counts virtual stages take.
            takes=lambda count: self.options.pipeline is None or self.options.pipeline.shape.takes(count),
            clock=clock,
            kept_steps=self.kept_steps,
        )
        if self.restored is not None:
            planner.restore(self.restored)
        return planner

    def _options_of(self, micro_batches_per_replica: int) -> PackerOptions:
        shape = replace(self.options.shape, micro_batches_per_replica=micro_batches_per_replica)
        return replace(self.options, shape=shape)

    def plan(self, planner: StepPlanner) -> PlannedStep:
        """The planner's next step, as this rank needs it."""
        plan = planner.next_step()
        micro_batches = plan.replicas[self.replica]
        begin_s = time.perf_counter()
        # What the packer has planned already to compare micro-batches is remembered there.
        sharding = self.options.division or self.sharding
        shard_plans = shard_step(micro_batches, sharding, pad_to_multiple=self.pad_to_multiple)
        for shard_plan in shard_plans:
            prepare(shard_plan, self.cp_rank, self.index_uses)
        shard_s = time.perf_counter() - begin_s
        return PlannedStep(
            step=plan.step,
            micro_batches=micro_batches,
            shard_plans=shard_plans,
            fingerprint=plan.fingerprint,
            document_table=document_table(plan),
            statistics=statistics_of(plan, self.cost, pad_to_multiple=self.pad_to_multiple),
            shard_statistics=shard_statistics(shard_plans, self.sharding.costs),
            counters=planner.counters,
            plan_s=planner.plan_s(plan.step) + shard_s,
            ledger_line=ledger_line(plan) if self.keeps_ledger else "",
        )


class PlanSource(Protocol):
    """Planned steps in order."""

    def next_step(self) -> PlannedStep:
        """The next step of the run."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able; from it the step after the last one that `next_step` gave is planned."""
        ...

    def close(self) -> None:
        """Give back what the source holds; it gives no further step."""
        ...


class InlineSource:
    """Plans when asked, in this process."""

    def __init__(self, spec: PlannerSpec) -> None:
        self._spec = spec
        self._planner = spec.build()

    def next_step(self) -> PlannedStep:
        return self._spec.plan(self._planner)

    def state(self) -> dict[str, Any]:
        return self._planner.state()

    def close(self) -> None:
        return None


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
            f"from wlb.data.plan_source import serve; serve({theirs.fileno()})"
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
