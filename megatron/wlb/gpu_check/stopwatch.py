"""Times of every context-parallel rank in one process, on the device's own clock.

The generators that training runs are advanced rank by rank; each kernel call and each segment between two exchanges is
timed. Rows that ranks send each other are copied on the device, which says nothing about a network: those copies are
counted apart.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.wlb.gpu_check.packs import Tensors, by_rank
from wlb.attention import CommType, KvExchange, Mailbox, Transfer
from wlb.attention.in_process import in_lockstep
from wlb.attention.kernels import Kernel
from wlb.attention.sharded import checked_call, path_of
from wlb.attention.transport import HostTransport
from wlb.sharding import ShardPlan

# About 20 ms on a GPU: launches queue up behind it, so that events measure the device and not the launching thread.
_WAIT_CYCLES = 40_000_000


class Stopwatch:
    """Seconds of named intervals on a device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._laps: list[tuple[str, Any, Any]] = []

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        begin = self._now()
        yield
        self._laps.append((name, begin, self._now()))

    def seconds(self) -> dict[str, float]:
        """By name, summed."""
        if self._cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = defaultdict(float)
        for name, begin, end in self._laps:
            total[name] += begin.elapsed_time(end) / 1000 if self._cuda else end - begin
        return total

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class TimedKernel:
    """A `Kernel` whose calls are laps called attention."""

    def __init__(self, kernel: Kernel, watch: Stopwatch) -> None:
        self._kernel, self._watch = kernel, watch
        self.cuts_by_window = kernel.cuts_by_window

    def check(self, query: torch.Tensor, value: torch.Tensor) -> None:
        self._kernel.check(query, value)

    def forward(self, *args: Any) -> None:
        with self._watch.lap("attention"):
            self._kernel.forward(*args)

    def backward(self, *args: Any) -> None:
        with self._watch.lap("attention"):
            self._kernel.backward(*args)


class TimedExchange:
    """A `KvExchange` in one process whose copies, made where a transfer is waited for, are laps called copies."""

    def __init__(self, exchange: KvExchange, watch: Stopwatch) -> None:
        self._exchange, self._watch = exchange, watch
        self.size, self.rank = exchange.size, exchange.rank

    def all_to_all(self, *args: Any) -> Transfer:
        return _TimedTransfer(self._exchange.all_to_all(*args), self._watch)

    def shift(self, *args: Any) -> Transfer:
        return _TimedTransfer(self._exchange.shift(*args), self._watch)


class _TimedTransfer:
    def __init__(self, transfer: Transfer, watch: Stopwatch) -> None:
        self._transfer, self._watch = transfer, watch

    def wait(self) -> None:
        with self._watch.lap("copies"):
            self._transfer.wait()


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Of the slowest rank, forward and backward: kernel calls, and those with gathering and adding up of rows."""

    attention_s: float
    all_s: float


def let_launches_queue_up(device: torch.device) -> None:
    """Before what is timed; on the CPU, where everything happens at once, nothing."""
    if device.type == "cuda":
        torch.cuda._sleep(_WAIT_CYCLES)


def time_plan(pack: Tensors, plan: ShardPlan, comm_type: CommType) -> tuple[RankTimes, list[torch.Tensor]]:
    """One forward and backward pass of all ranks; the outputs by rank."""
    device = pack[0].device
    path, mailbox = path_of(comm_type), Mailbox(plan.cp_size)
    shards = list(zip(*(by_rank(t, plan) for t in pack), strict=True))
    watches = [Stopwatch(device) for _ in shards]
    calls = []
    for rank, ((query, key, value, _), watch) in enumerate(zip(shards, watches, strict=True)):
        call = checked_call(
            *(query, key, value, plan, rank, TimedExchange(mailbox.exchange(rank), watch)),
            comm_type=comm_type,
            scale=None,
            window_tokens=None,
            keep_gathered=False,
            # In turn: on a stream of their own, copies would run beside what is timed.
            transport=HostTransport(),
        )
        calls.append(replace(call, kernel=TimedKernel(call.kernel, watch)))
    let_launches_queue_up(device)
    saved = in_lockstep([_timed(path.forward(c, *s[:3]), w) for c, s, w in zip(calls, shards, watches, strict=True)])
    in_lockstep([_timed(path.backward(c, v, *s), w) for c, v, s, w in zip(calls, saved, shards, watches, strict=True)])
    ranks = [watch.seconds() for watch in watches]
    times = RankTimes(
        attention_s=max(r["attention"] for r in ranks), all_s=max(r["segment"] - r["copies"] for r in ranks)
    )
    return times, [s.out for s in saved]


def _timed[R](generator: Generator[None, None, R], watch: Stopwatch) -> Generator[None, None, R]:
    """The same, its segments laps."""
    while True:
        with watch.lap("segment"):
            try:
                next(generator)
            except StopIteration as end:
                return end.value
        yield
