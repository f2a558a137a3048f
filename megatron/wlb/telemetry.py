"""What a packed run reports: fields of the log line, TensorBoard and W&B scalars, and a time line.

The time line comes from Megatron's own timers, which start and stop round every forward and backward pass and
every message: a wrapper round them notes the moments. Nothing in the schedules is touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.wlb.parallel import ParallelDims
from megatron.wlb.step_clock import StepClock
from wlb.data.planned_step import PlannedStep, StepStatistics
from wlb.metrics import imbalance_degree

_COMPUTE = ("forward-compute", "backward-compute")


class RecordingTimers:
    """Megatron's timers, noting every start and stop: `events` holds (name, mark of the start, mark of the stop)."""

    def __init__(self, timers: Any, mark: Callable[[], Any]) -> None:
        self._timers = timers
        self._mark = mark
        self._open: dict[str, Any] = {}
        self.events: list[tuple[str, Any, Any]] = []

    def __call__(self, name: str, log_level: int | None = None) -> _RecordingTimer:
        return _RecordingTimer(self, name, self._timers(name, log_level=log_level))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timers, name)

    def started(self, name: str) -> None:
        self._open[name] = self._mark()

    def stopped(self, name: str) -> None:
        self.events.append((name, self._open.pop(name), self._mark()))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepRecord:
    """A step that is over on the host. begin: as `StepClock.begin` gave it; end: a mark, as those of `events`."""

    planned: PlannedStep
    dims: ParallelDims
    begin: Any
    end: Any
    events: list[tuple[str, Any, Any]]
    iteration: int
    samples: int


@dataclass(kw_only=True)
class Telemetry:
    """Collects what a training step did and reports it where Megatron reports.

    clock: says when the device worked. Where it lags behind the host, a step is reported when its log line is printed
        or the next step begins: by then the device has been waited for, to log the loss or to compare plans.
    log_interval: iterations between two scalars.
    iteration: () -> (iteration that is being trained, samples consumed after it).
    writers: () -> (TensorBoard writer or None, W&B writer or None).
    timeline: folder for one file of time stamps a rank, or None.
    """

    clock: StepClock
    log_interval: int
    iteration: Callable[[], tuple[int, int]]
    writers: Callable[[], tuple[Any, Any]]
    timeline: Path | None
    _fields: dict[str, float] = field(default_factory=dict)
    _record: _StepRecord | None = None

    @contextmanager
    def step(
        self, step: PlannedStep, plan_wait_s: float, config: Any, dims: ParallelDims, *, forward_only: bool
    ) -> Iterator[None]:
        """Round the schedule of one step. All ranks come here, and to `log_suffix`, at the same steps."""
        if forward_only or config.timers is None:
            yield
            return
        self._report()
        recorder = RecordingTimers(config.timers, self.clock.mark)
        config.timers = recorder
        begin, first = self.clock.begin(), self.clock.mark()
        try:
            yield
        finally:
            config.timers = recorder._timers
        end = self.clock.mark()
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
        iteration, samples = self.iteration()
        events = [("", first, end), *recorder.events]
        self._record = _StepRecord(
            planned=step, dims=dims, begin=begin, end=end, events=events, iteration=iteration, samples=samples
        )
        if not self.clock.lags:
            self._report()

    def log_suffix(self) -> str:
        """`name: value |` for every field of the last step."""
        self._report()
        return "".join(f" {name}: {value:{_FORMATS[name]}} |" for name, value in self._fields.items())

    def close(self) -> None:
        """Write what is known of the last step; other ranks may be gone, and the device may never come to its end."""
        if self._record is not None and self.clock.is_over(self._record.end):
            self._report(with_others=False)

    def _report(self, *, with_others: bool = True) -> None:
        """Of the step that was recorded, once. A collective unless `with_others` is false."""
        record, self._record = self._record, None
        if record is None:
            return
        marks = [mark for _, *both in record.events for mark in both]
        times_s = self.clock.seconds(record.begin, marks)
        (begin_s, end_s), *pairs = zip(times_s[::2], times_s[1::2], strict=True)
        events = [(name, *pair) for (name, _, _), pair in zip(record.events[1:], pairs, strict=True)]
        if with_others:
            busy_s = sum(stop - start for name, start, stop in events if name in _COMPUTE)
            self._fields["imbalance ranks measured"] = _imbalance_over_ranks(busy_s, record.dims.world_size)
        self._write_scalars(record)
        if self.timeline is not None:
            self._write_timeline(record, events, begin_s, end_s)

    def _write_scalars(self, record: _StepRecord) -> None:
        tensorboard, wandb = self.writers()
        if record.iteration % self.log_interval:
            return
        for name, value in self._fields.items():
            scalar = f"wlb/{name}"
            if tensorboard:
                tensorboard.add_scalar(scalar, value, record.iteration)
                tensorboard.add_scalar(f"{scalar} vs samples", value, record.samples)
            if wandb:
                wandb.log({scalar: value}, record.iteration)

    def _write_timeline(
        self, record: _StepRecord, events: list[tuple[str, float, float]], begin_s: float, end_s: float
    ) -> None:
        assert self.timeline is not None
        dims = record.dims
        row = {
            "step": record.planned.step,
            "rank": dims.rank,
            "pp_rank": dims.pp_rank,
            "dp_rank": dims.dp_rank,
            "cp_rank": dims.cp_rank,
            "begin_s": begin_s,
            "end_s": end_s,
            "lengths": [m.lengths for m in record.planned.micro_batches],
            "events": events,
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


def _imbalance_over_ranks(busy_s: float, world_size: int) -> float:
    """Imbalance degree of the seconds that ranks spent computing in a step."""
    if world_size == 1:
        return 1.0
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    everyone = [torch.zeros(1, dtype=torch.float64, device=device) for _ in range(world_size)]
    dist.all_gather(everyone, torch.tensor([busy_s], dtype=torch.float64, device=device))
    return imbalance_degree(torch.cat(everyone).tolist())
