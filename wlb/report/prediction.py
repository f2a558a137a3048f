"""Predicts a step's seconds from its lengths: fitted costs of micro-batches, put through the schedule's timing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from wlb.cost import CostModel, FittedCost, MeasuredMicroBatch, stages_to_json
from wlb.errors import DataError
from wlb.report.fits import HELD_UP, MeasuredPlan, fit_divided, fit_shard_time, fit_undivided
from wlb.report.measured import MeasuredStep
from wlb.schedule import PipelineModel, PipelineShape, StepTimeline, model_timeline, replica_timeline
from wlb.sharding import Division, ShardCosts
from wlb.sharding.micro_batch_cost import sharded


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """stages: cost of each pipeline stage, of undivided micro-batches.
    outside_s: seconds of a step that are in no pass (messages, optimizer).
    prices: what dividing a micro-batch costs, as measured; None where that is what its division says.
    division: how context-parallel ranks divide micro-batches; None for one rank.

    Stages run 1F1B as Megatron does: a rank that sends waits until the receiver is there for the message.
    """

    stages: tuple[FittedCost, ...]
    outside_s: float
    prices: ShardCosts | None = None
    division: Division | None = None

    def divided(self, division: Division | None) -> StepModel:
        """The same costs for a run whose micro-batches are divided so."""
        return replace(self, division=division)

    @cached_property
    def pipeline(self) -> PipelineModel:
        undivided = PipelineModel(
            shape=PipelineShape(num_stages=len(self.stages), sends="blocking"),
            stretch_costs=self.stages,
            sync_s=self.outside_s,
        )
        division = self.division
        if division is not None and self.prices is not None:
            division = division.priced(self.prices)
        return sharded(undivided, division)

    @property
    def costs(self) -> tuple[CostModel, ...]:
        """Of each stage, by its slowest context-parallel rank."""
        return self.pipeline.stretch_costs

    def timeline(self, step: MeasuredStep) -> StepTimeline:
        """The predicted step, `outside_s` at its end."""
        return model_timeline(step.plan, self.pipeline)

    def step_s(self, step: MeasuredStep) -> float:
        """Predicted seconds of a whole step."""
        return self.timeline(step).makespan_s

    def forward_s(self, step: MeasuredStep) -> list[float]:
        """Predicted forward seconds of each micro-batch, all stages together."""
        return [sum(cost.forward_s(m.lengths) for cost in self.costs) for m in step.plan.micro_batches]

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
        """A cost file: of undivided micro-batches, which packers divide again."""
        return {
            "crossover_tokens": self.crossover_tokens,
            "overhead_tokens": self.overhead_tokens,
            "outside_s": self.outside_s,
            "stages": stages_to_json(self.stages),
            **({} if self.prices is None else {"prices": asdict(self.prices)}),
        }


def fit_steps(
    steps: Sequence[MeasuredStep], step_s: Sequence[float], divisions: Sequence[Division | None] | None = None
) -> StepModel:
    """The model closest to the measured steps.

    steps: without warm-up. step_s: (steps,) measured seconds of each whole step.
    divisions: (steps,) how context-parallel ranks divided its micro-batches; None where there is one rank. Costs are
        then those of undivided micro-batches all the same, and `prices` say what dividing them costs.

    Raises DataError if there are too few micro-batches.
    """
    if not steps or len(steps) != len(step_s):
        raise DataError(f"steps must be as many as step_s and not none, got {len(steps)} and {len(step_s)}")
    prices = None
    given = [d for d in divisions or () if d is not None]
    if given:
        if len(given) != len(steps):
            raise DataError(f"divisions must be given for all {len(steps)} steps or for none, got {len(given)}")
        stages, prices = _fit_divided_stages(steps, given)
    else:
        stages = tuple(
            fit_undivided(
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
    return StepModel(stages=stages, outside_s=max(0.0, left_s), prices=prices)


def _fit_divided_stages(
    steps: Sequence[MeasuredStep], divisions: Sequence[Division]
) -> tuple[tuple[FittedCost, ...], ShardCosts]:
    """Cost of each stage undivided, and what dividing costs: the same everywhere, from all stages and both passes."""
    stages = range(steps[0].num_stages)
    passes = [[p for step in steps for p in step.passes_s(pp_rank)] for pp_rank in stages]
    plans = [
        division.plan(division.padded_lengths(lengths))
        for step, division in zip(steps, divisions, strict=True)
        for lengths, _, _ in step.passes_s(0)
    ]
    totals = [sum(forward_s + backward_s for _, forward_s, backward_s in row) for row in zip(*passes, strict=True)]
    whole = [MeasuredPlan(plan=p, seconds=s) for p, s in zip(plans, totals, strict=True)]
    time = fit_shard_time(whole)
    steady = [i for i, m in enumerate(whole) if m.seconds <= HELD_UP * time.seconds(m.plan)]
    return (
        tuple(
            fit_divided(
                [plans[i] for i in steady],
                time.costs,
                [of_stage[i][1] for i in steady],
                [of_stage[i][2] for i in steady],
            )
            for of_stage in passes
        ),
        time.costs,
    )


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
