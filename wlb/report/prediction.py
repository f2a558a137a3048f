"""Predicts a step's seconds from its lengths: fitted costs of micro-batches, put through the schedule's timing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from wlb.cost import FittedCost, MeasuredMicroBatch, fit_cost, stages_to_json
from wlb.errors import DataError
from wlb.report.measured import MeasuredStep
from wlb.schedule import PipelineModel, PipelineShape, StepTimeline, model_timeline, replica_timeline

_HELD_UP = 1.15  # undisturbed micro-batches stay within a few percent of their cost
_TRIMMINGS = 2
_FEWEST = 3  # what a fit needs


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """stages: cost of each pipeline stage. outside_s: seconds of a step that are in no pass (messages, optimizer).

    Stages run 1F1B as Megatron does: a rank that sends waits until the receiver is there for the message.
    """

    stages: tuple[FittedCost, ...]
    outside_s: float

    @cached_property
    def pipeline(self) -> PipelineModel:
        return PipelineModel(
            shape=PipelineShape(num_stages=len(self.stages), sends="blocking"),
            stretch_costs=self.stages,
            sync_s=self.outside_s,
        )

    def timeline(self, step: MeasuredStep) -> StepTimeline:
        """The predicted step, `outside_s` at its end."""
        return model_timeline(step.plan, self.pipeline)

    def step_s(self, step: MeasuredStep) -> float:
        """Predicted seconds of a whole step."""
        return self.timeline(step).makespan_s

    def forward_s(self, step: MeasuredStep) -> list[float]:
        """Predicted forward seconds of each micro-batch, all stages together."""
        return [sum(stage.forward_s(m.lengths) for stage in self.stages) for m in step.plan.micro_batches]

    @property
    def crossover_tokens(self) -> float:
        """Length of the document whose attention takes as long as all else, both passes and all stages together.

        Raises DataError if the measured lengths did not show attention.
        """
        square_s = sum(s.forward.square_s + s.backward.square_s for s in self.stages)
        token_s = sum(s.forward.token_s + s.backward.token_s for s in self.stages)
        if square_s == 0 or token_s == 0:
            raise DataError(
                f"measured micro-batches must tell attention from the rest, got {square_s} s per squared token and "
                f"{token_s} s per token"
            )
        return token_s / square_s

    @property
    def overhead_tokens(self) -> float:
        """What a micro-batch costs however short it is, as the time of so many tokens without their attention."""
        fixed_s = sum(s.forward.micro_batch_s + s.backward.micro_batch_s for s in self.stages)
        token_s = sum(s.forward.token_s + s.backward.token_s for s in self.stages)
        if token_s == 0:
            raise DataError("measured micro-batches must show a time per token, got 0 s")
        return fixed_s / token_s

    def to_json(self) -> dict[str, Any]:
        return {
            "crossover_tokens": self.crossover_tokens,
            "overhead_tokens": self.overhead_tokens,
            "outside_s": self.outside_s,
            "stages": stages_to_json(self.stages),
        }


def fit_steps(steps: Sequence[MeasuredStep], step_s: Sequence[float]) -> StepModel:
    """The model closest to the measured steps.

    steps: without warm-up. step_s: (steps,) measured seconds of each whole step.

    Raises DataError if there are too few micro-batches.
    """
    if not steps or len(steps) != len(step_s):
        raise DataError(f"steps must be as many as step_s and not none, got {len(steps)} and {len(step_s)}")
    stages = tuple(
        _steady_fit(
            [
                MeasuredMicroBatch(lengths=lengths, forward_s=forward_s, backward_s=backward_s)
                for step in steps
                for lengths, forward_s, backward_s in step.passes_s(pp_rank)
            ]
        )
        for pp_rank in range(steps[0].num_stages)
    )
    # Measured passes, not fitted ones: what holds up a pass is no message and no optimizer.
    left_s = median(measured_s - _in_passes_s(step) for step, measured_s in zip(steps, step_s, strict=True))
    return StepModel(stages=stages, outside_s=max(0.0, left_s))


def _in_passes_s(step: MeasuredStep) -> float:
    """Seconds of the schedule if every pass takes what was measured and nothing else takes any time."""
    stages = [step.passes_s(pp_rank) for pp_rank in range(step.num_stages)]
    rows = zip(*stages, strict=True)  # one micro-batch in all stages after another, replica by replica
    passes = [([f for _, f, _ in row], [b for _, _, b in row]) for row in rows]
    seconds = []
    for replica in step.plan.replicas:
        own, passes = passes[: len(replica)], passes[len(replica) :]
        timeline = replica_timeline([f for f, _ in own], [b for _, b in own], num_stages=step.num_stages)
        seconds.append(timeline.makespan_s)
    return max(seconds)


def _steady_fit(measured: Sequence[MeasuredMicroBatch]) -> FittedCost:
    """The fit without micro-batches that another program held up: those well slower than most say they should be."""
    cost = fit_cost(measured)
    for _ in range(_TRIMMINGS):
        ratios = [
            (m.forward_s + m.backward_s) / (cost.forward_s(m.lengths) + cost.backward_s(m.lengths)) for m in measured
        ]
        limit = _HELD_UP * median(ratios)
        steady = [m for m, ratio in zip(measured, ratios, strict=True) if ratio <= limit]
        if len(steady) < _FEWEST:
            break
        cost = fit_cost(steady)
    return cost
