"""Predicts a step's seconds from its lengths: costs fitted to measured micro-batches, put through the 1F1B model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from wlb.cost import FittedCost, MeasuredMicroBatch, fit_cost, stages_to_json
from wlb.errors import DataError
from wlb.report.measured import MeasuredStep
from wlb.schedule import StepTimeline, plan_timeline

_HELD_UP = 1.15  # undisturbed micro-batches stay within a few percent of their cost
_TRIMMINGS = 2
_FEWEST = 3  # what a fit needs


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """stages: cost of each pipeline stage. outside_s: seconds of a step that are in no pass (messages, optimizer)."""

    stages: tuple[FittedCost, ...]
    outside_s: float

    def timeline(self, step: MeasuredStep) -> StepTimeline:
        """The predicted step, `outside_s` at its end."""
        return plan_timeline(step.plan, self.stages, sync_s=self.outside_s)

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

    def to_json(self) -> dict[str, Any]:
        return {
            "crossover_tokens": self.crossover_tokens,
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
    in_passes = StepModel(stages=stages, outside_s=0.0)
    left_s = median(measured_s - in_passes.step_s(step) for step, measured_s in zip(steps, step_s, strict=True))
    return StepModel(stages=stages, outside_s=max(0.0, left_s))


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
