"""Start and end of every pass of a step.

A pass starts when its stage has finished what its program (`wlb.schedule.program`) has before it: the pass before, and
the messages it waits for there. A message travels for `send_s` once sender and receiver are both there for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from wlb.errors import ConfigError
from wlb.schedule.graph import pass_graph
from wlb.schedule.program import PipelineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPass:
    """A pass with its place in time, seconds from the start of the step."""

    stage: int
    micro_batch: int
    kind: Literal["forward", "backward"]
    start_s: float
    end_s: float
    chunk: int = 0


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
    shape: PipelineShape | None = None,
) -> ReplicaTimeline:
    """Time one replica's step.

    forward_s, backward_s: (micro-batches, V), micro-batches in the order in which the pipeline runs them, V the
        stages, or with virtual stages the model's stretches.
    send_s: (micro-batches,) seconds for its activations, or its gradients, to reach the next stretch; None is 0.
    num_stages: needed only when there are no micro-batches and no shape.
    shape: of the pipeline; None is 1F1B without virtual stages, as Megatron runs it.

    Two stages, two micro-batches, forward 1, backward 2 seconds::

        stage 0   F0 F1 .  .  B0 B0 .  B1 B1
        stage 1   .  F0 B0 B0 F1 B1 B1 .  .      makespan 9
    """
    count = len(forward_s)
    stretches = len(forward_s[0]) if forward_s else (num_stages or 1)
    shape = shape or PipelineShape(num_stages=stretches)
    _require_shape("forward_s", forward_s, count, shape.num_virtual_stages)
    _require_shape("backward_s", backward_s, count, shape.num_virtual_stages)
    if send_s is not None and len(send_s) != count:
        raise ConfigError(f"send_s must have {count} entries, one a micro-batch, got {len(send_s)}")
    if not count:
        return ReplicaTimeline(stages=((),) * shape.num_stages)
    instant = send_s is None or not any(send_s)
    graph = pass_graph(shape, count, instant_messages=instant)
    durations_s = np.concatenate(
        [
            np.asarray(forward_s, dtype=np.float64).T.ravel(),
            np.asarray(backward_s, dtype=np.float64).T.ravel(),
            np.zeros(count) if send_s is None else np.asarray(send_s, dtype=np.float64),
        ]
    )
    rows = graph.rows(range(shape.num_virtual_stages))
    ends_s = graph.ends(durations_s[:, None], rows)[:, 0].tolist()
    own_s = durations_s[rows].tolist()
    return ReplicaTimeline(
        stages=tuple(
            tuple(
                TimedPass(
                    stage=stage,
                    micro_batch=p.micro_batch,
                    kind=p.kind,
                    start_s=ends_s[node] - own_s[node],
                    end_s=ends_s[node],
                    chunk=p.chunk,
                )
                for p, node in zip(passes, nodes, strict=True)
            )
            for stage, (passes, nodes) in enumerate(zip(graph.passes, graph.pass_nodes, strict=True))
        )
    )


def _require_shape(name: str, seconds: Sequence[Sequence[float]], num_micro_batches: int, num_stages: int) -> None:
    shapes = {len(row) for row in seconds}
    if len(seconds) != num_micro_batches or shapes - {num_stages}:
        raise ConfigError(
            f"{name} must be ({num_micro_batches} micro-batches, {num_stages} stages), "
            f"got {len(seconds)} rows of lengths {sorted(shapes)}"
        )
