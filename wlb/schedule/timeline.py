"""Start and end of every pass of a step.

A pass starts when its stage has finished the pass before it and when what it needs has arrived: the activations of
the stage before (forward), the gradients of the stage after (backward). Sending overlaps with computing; a message
arrives `send_s` after the pass that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from wlb.errors import ConfigError
from wlb.schedule.order import one_forward_one_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPass:
    """A pass with its place in time, seconds from the start of the step."""

    stage: int
    micro_batch: int
    kind: Literal["forward", "backward"]
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class ReplicaTimeline:
    """One data-parallel replica's step: per stage its passes in the order in which they run."""

    stages: tuple[tuple[TimedPass, ...], ...]

    @cached_property
    def makespan_s(self) -> float:
        """End of the last pass."""
        return max((passes[-1].end_s for passes in self.stages if passes), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Per stage, seconds in passes."""
        return tuple(sum(p.end_s - p.start_s for p in passes) for passes in self.stages)

    @property
    def bubble(self) -> float:
        """Share of stage-seconds up to the makespan that no pass fills."""
        if self.makespan_s == 0:
            return 0.0
        return 1 - sum(self.busy_s) / (len(self.stages) * self.makespan_s)


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """A whole step: replicas side by side, then the gradients' synchronisation, which waits for the slowest.

    sync_s: seconds of that synchronisation (and of the optimizer, if it is counted).
    """

    replicas: tuple[ReplicaTimeline, ...]
    sync_s: float

    @property
    def makespan_s(self) -> float:
        """Seconds of the step."""
        return max(r.makespan_s for r in self.replicas) + self.sync_s

    @property
    def busy_s(self) -> tuple[tuple[float, ...], ...]:
        """Per replica and stage, seconds in passes."""
        return tuple(r.busy_s for r in self.replicas)

    @property
    def wait_s(self) -> tuple[tuple[float, ...], ...]:
        """Per replica and stage, seconds before the synchronisation in which it has nothing to run."""
        end_s = self.makespan_s - self.sync_s
        return tuple(tuple(end_s - busy_s for busy_s in r.busy_s) for r in self.replicas)

    @property
    def bubble(self) -> float:
        """Share of all stages' seconds before the synchronisation in which nothing runs."""
        end_s = self.makespan_s - self.sync_s
        if end_s == 0:
            return 0.0
        waits = [w for replica in self.wait_s for w in replica]
        return sum(waits) / (len(waits) * end_s)


def replica_timeline(
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    *,
    send_s: Sequence[float] | None = None,
    num_stages: int | None = None,
) -> ReplicaTimeline:
    """Time one replica's 1F1B step.

    forward_s, backward_s: (micro-batches, stages), micro-batches in the order in which the pipeline runs them.
    send_s: (micro-batches,) seconds for its activations, or its gradients, to reach the next stage; None is 0.
    num_stages: needed only when there are no micro-batches.

    Two stages, two micro-batches, forward 1, backward 2 seconds::

        stage 0   F0 F1 .  .  B0 B0 .  B1 B1
        stage 1   .  F0 B0 B0 F1 B1 B1 .  .      makespan 9
    """
    num_micro_batches = len(forward_s)
    stages = len(forward_s[0]) if forward_s else (num_stages or 1)
    _require_shape("forward_s", forward_s, num_micro_batches, stages)
    _require_shape("backward_s", backward_s, num_micro_batches, stages)
    if send_s is not None and len(send_s) != num_micro_batches:
        raise ConfigError(f"send_s must have {num_micro_batches} entries, one a micro-batch, got {len(send_s)}")
    delay_s = [0.0] * num_micro_batches if send_s is None else send_s
    orders = [
        one_forward_one_backward(num_stages=stages, stage=s, num_micro_batches=num_micro_batches) for s in range(stages)
    ]
    timed: list[list[TimedPass]] = [[] for _ in range(stages)]
    arrived_s: dict[tuple[str, int, int], float] = {}  # (kind, micro-batch, stage that waits for it)
    left = sum(len(order) for order in orders)
    while left:
        before = left
        for s, order in enumerate(orders):
            while len(timed[s]) < len(order):
                p = order[len(timed[s])]
                is_forward = p.kind == "forward"
                starts_chain = s == 0 if is_forward else s == stages - 1
                ready_s = 0.0 if starts_chain else arrived_s.get((p.kind, p.micro_batch, s))
                if ready_s is None:
                    break
                start_s = max(ready_s, timed[s][-1].end_s if timed[s] else 0.0)
                end_s = start_s + (forward_s if is_forward else backward_s)[p.micro_batch][s]
                timed[s].append(
                    TimedPass(stage=s, micro_batch=p.micro_batch, kind=p.kind, start_s=start_s, end_s=end_s)
                )
                arrived_s[p.kind, p.micro_batch, s + 1 if is_forward else s - 1] = end_s + delay_s[p.micro_batch]
                left -= 1
        assert left < before, "the order of passes cannot be executed"
    return ReplicaTimeline(stages=tuple(tuple(passes) for passes in timed))


def _require_shape(name: str, seconds: Sequence[Sequence[float]], num_micro_batches: int, num_stages: int) -> None:
    shapes = {len(row) for row in seconds}
    if len(seconds) != num_micro_batches or shapes - {num_stages}:
        raise ConfigError(
            f"{name} must be ({num_micro_batches} micro-batches, {num_stages} stages), "
            f"got {len(seconds)} rows of lengths {sorted(shapes)}"
        )
