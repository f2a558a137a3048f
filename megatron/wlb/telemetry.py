"""What a packed run reports: fields of the log line, TensorBoard and W&B scalars, and a time line.

The time line comes from Megatron's own timers, which start and stop round every forward and backward pass and
every message: a wrapper round them notes the moments. Nothing in the schedules is touched.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.wlb.parallel import ParallelDims
from wlb.data.planned_step import PlannedStep, StepStatistics
from wlb.metrics import imbalance_degree

_COMPUTE = ("forward-compute", "backward-compute")


class RecordingTimers:
    """Megatron's timers, noting every start and stop: `events` holds (name, start_s, stop_s)."""

    def __init__(self, timers: Any, clock: Callable[[], float]) -> None:
        self._timers = timers
        self._clock = clock
        self._open: dict[str, float] = {}
        self.events: list[tuple[str, float, float]] = []

    def __call__(self, name: str, log_level: int | None = None) -> _RecordingTimer:
        return _RecordingTimer(self, name, self._timers(name, log_level=log_level))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timers, name)

    def started(self, name: str) -> None:
        self._open[name] = self._clock()

    def stopped(self, name: str) -> None:
        self.events.append((name, self._open.pop(name), self._clock()))


class _RecordingTimer:
    def __init__(self, recorder: RecordingTimers, name: str, timer: Any) -> None:
        self._recorder, self._name, self._timer = recorder, name, timer

    def start(self, *args: Any, **kwargs: Any) -> None:
        self._timer.start(*args, **kwargs)
        self._recorder.started(self._name)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.stopped(self._name)
        self._timer.stop(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)


@dataclass(kw_only=True)
class Telemetry:
    """Collects what a training step did and reports it where Megatron reports.

    measures: whether host time stamps say when the device worked (not on CUDA, which runs behind them).
    log_interval: iterations between two scalars.
    iteration: () -> (iteration that is being trained, samples consumed after it).
    writers: () -> (TensorBoard writer or None, W&B writer or None).
    timeline: folder for one file of time stamps a rank, or None.
    """

    measures: bool
    log_interval: int
    iteration: Callable[[], tuple[int, int]]
    writers: Callable[[], tuple[Any, Any]]
    timeline: Path | None
    clock: Callable[[], float] = time.perf_counter
    _fields: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(
        self, step: PlannedStep, plan_wait_s: float, config: Any, dims: ParallelDims, *, forward_only: bool
    ) -> Iterator[None]:
        """Round the schedule of one step."""
        if forward_only or config.timers is None:
            yield
            return
        recorder = RecordingTimers(config.timers, self.clock)
        config.timers = recorder
        begin_s = self.clock()
        try:
            yield
        finally:
            config.timers = recorder._timers
        end_s = self.clock()
        self._fields = statistics_fields(step.statistics)
        if dims.cp_size > 1:
            self._fields["imbalance CP ranks"] = step.shard_statistics.imbalance_ranks
            self._fields["CP received tokens"] = step.shard_statistics.received_tokens
        self._fields |= {
            "epoch": max(step.counters.epochs),
            "cut documents": step.counters.cut_documents,
            "empty documents": step.counters.skipped_empty,
        }
        self._fields |= {"planning (ms)": step.plan_s * 1e3, "plan wait (ms)": plan_wait_s * 1e3}
        if self.measures:
            self._fields["imbalance ranks measured"] = _measured_imbalance(recorder, dims.world_size)
        self._write_scalars()
        if self.timeline is not None:
            self._write_timeline(step, recorder, dims, begin_s, end_s)

    def log_suffix(self) -> str:
        """`name: value |` for every field of the last step."""
        return "".join(f" {name}: {value:{_FORMATS[name]}} |" for name, value in self._fields.items())

    def _write_scalars(self) -> None:
        tensorboard, wandb = self.writers()
        iteration, samples = self.iteration()
        if iteration % self.log_interval:
            return
        for name, value in self._fields.items():
            scalar = f"wlb/{name}"
            if tensorboard:
                tensorboard.add_scalar(scalar, value, iteration)
                tensorboard.add_scalar(f"{scalar} vs samples", value, samples)
            if wandb:
                wandb.log({scalar: value}, iteration)

    def _write_timeline(
        self, step: PlannedStep, recorder: RecordingTimers, dims: ParallelDims, begin_s: float, end_s: float
    ) -> None:
        assert self.timeline is not None
        row = {
            "step": step.step,
            "rank": dims.rank,
            "pp_rank": dims.pp_rank,
            "dp_rank": dims.dp_rank,
            "cp_rank": dims.cp_rank,
            "begin_s": begin_s,
            "end_s": end_s,
            "lengths": [m.lengths for m in step.micro_batches],
            "events": recorder.events,
        }
        self.timeline.mkdir(parents=True, exist_ok=True)
        with (self.timeline / f"rank{dims.rank:03d}.jsonl").open("a") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


_FORMATS = {
    "imbalance micro-batches": ".3f",
    "imbalance replicas": ".3f",
    "imbalance ranks measured": ".3f",
    "imbalance CP ranks": ".3f",
    "CP received tokens": ".0f",
    "tokens": ".0f",
    "padding tokens": ".0f",
    "micro-batches": ".0f",
    "max micro-batch tokens": ".0f",
    "waiting documents": ".0f",
    "waiting tokens": ".0f",
    "mean delay (steps)": ".2f",
    "max delay (steps)": ".0f",
    "epoch": ".0f",
    "cut documents": ".0f",
    "empty documents": ".0f",
    "planning (ms)": ".1f",
    "plan wait (ms)": ".1f",
}


def statistics_fields(statistics: StepStatistics) -> dict[str, float]:
    """The fields that follow from a plan alone, in the order of the log line."""
    return {
        "imbalance micro-batches": statistics.imbalance_micro_batches,
        "imbalance replicas": statistics.imbalance_replicas,
        "tokens": statistics.trained_tokens,
        "padding tokens": statistics.padding_tokens,
        "micro-batches": statistics.num_micro_batches,
        "max micro-batch tokens": statistics.max_micro_batch_tokens,
        "waiting documents": statistics.waiting_documents,
        "waiting tokens": statistics.waiting_tokens,
        "mean delay (steps)": statistics.mean_delay_steps,
        "max delay (steps)": statistics.max_delay_steps,
    }


def _measured_imbalance(recorder: RecordingTimers, world_size: int) -> float:
    """Imbalance degree of the seconds that ranks spent computing in this step."""
    busy_s = sum(stop - start for name, start, stop in recorder.events if name in _COMPUTE)
    if world_size == 1:
        return 1.0
    everyone = [torch.zeros(1, dtype=torch.float64) for _ in range(world_size)]
    dist.all_gather(everyone, torch.tensor([busy_s], dtype=torch.float64))
    return imbalance_degree([float(t) for t in everyone])
