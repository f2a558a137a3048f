"""One finished training run: its log beside its time line, and the numbers that follow from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from wlb.cost import TransformerShape
from wlb.errors import DataError
from wlb.metrics import imbalance_degree
from wlb.report.measured import MeasuredStep, load_timeline
from wlb.report.prediction import StepModel
from wlb.report.training_log import TrainingLog, load_log
from wlb.sharding import DEFAULT_OPERATIONS_PER_BYTE, Division, ShardCosts, Sharding

WARM_UP_STEPS = 2
"""Steps whose seconds say nothing: memory is touched for the first time and libraries are loaded."""

_MANY_OPERATIONS = 1e9  # per byte, so that rounding to whole pairs does not show
_TRAINING_FLOPS = 3  # forward, and backward with two products for each of the forward's


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """Steps of the log and of the time line, one for one."""

    log: TrainingLog
    steps: tuple[MeasuredStep, ...]

    def __post_init__(self) -> None:
        logged, timed = [s.step for s in self.log.steps], [s.step for s in self.steps]
        if logged != timed:
            raise DataError(f"log and time line must hold the same steps, got {logged} and {timed}")
        if len(timed) <= WARM_UP_STEPS:
            raise DataError(f"a run must hold more than {WARM_UP_STEPS} steps to be timed, got {len(timed)}")

    @cached_property
    def shape(self) -> TransformerShape:
        return self.log.shape

    @property
    def window_tokens(self) -> int:
        return self.log.integer("seq_length")

    @cached_property
    def tokens(self) -> int:
        """Trained in the whole run."""
        return sum(s.plan.num_tokens for s in self.steps)

    @cached_property
    def step_flops(self) -> tuple[float, ...]:
        """Operations of each step, forward and backward, attention only inside documents."""
        return tuple(
            _TRAINING_FLOPS * sum(self.shape.forward_flops(m.lengths) for m in s.plan.micro_batches) for s in self.steps
        )

    @cached_property
    def division(self) -> Division | None:
        """How context-parallel ranks divided micro-batches, as the options say; None for one rank."""
        text = self.log.arguments
        cp_size = self.log.integer("context_parallel_size") if "context_parallel_size" in text else 1
        tp_size = self.log.integer("tensor_model_parallel_size") if text.get("sequence_parallel") == "True" else 1
        name = text.get("wlb_cp_sharding", "None")
        return Division.of(
            Sharding(
                name="per_sequence" if name == "None" else name, cp_size=cp_size, costs=self._shard_costs(cp_size)
            ),
            pad_to_multiple=cp_size * tp_size,
            typical_tokens=self.window_tokens,
        )

    def operations_per_byte(self, prices: ShardCosts) -> float:
        """What makes sharders weigh a received token as `prices` does."""
        per_byte = self._costs_at(_MANY_OPERATIONS).received_token_pairs / _MANY_OPERATIONS
        return prices.received_token_pairs / per_byte

    def _shard_costs(self, cp_size: int) -> ShardCosts:
        """With which sharders compared plans."""
        given = self.log.arguments.get("wlb_operations_per_byte", "None")
        if cp_size == 1:
            return ShardCosts()
        return self._costs_at(DEFAULT_OPERATIONS_PER_BYTE if given == "None" else float(given))

    def _costs_at(self, operations_per_byte: float) -> ShardCosts:
        text = self.log.arguments
        heads = self.log.integer("num_attention_heads")
        grouped = text.get("group_query_attention") == "True" and text.get("multi_latent_attention") != "True"
        return ShardCosts.for_model(
            num_heads=heads,
            num_kv_heads=self.log.integer("num_query_groups") if grouped else heads,
            bytes_per_number=2 if "True" in (text.get("bf16"), text.get("fp16")) else 4,
            operations_per_byte=operations_per_byte,
        )

    def modelled(self, model: StepModel) -> StepModel:
        """`model` for this run: its micro-batches are divided as the run divides them."""
        return model if model.division == self.division else model.divided(self.division)

    def total_s(self, model: StepModel) -> float:
        """Seconds of all steps, with those of the warm-up as in `total_of`."""
        return self.total_of([s.elapsed_s for s in self.log.steps], model)

    def total_of(self, step_s: Sequence[float], model: StepModel) -> float:
        """Sum of the steps' seconds, with each warm-up step at what `model` predicts, at the pace of the other steps.

        Leaving the warm-up out of work and time would favour the run that trains cheap documents first, and so would
        charging it by operations: short documents take more seconds for each.
        """
        model = self.modelled(model)
        predicted_s = [model.step_s(s) for s in self.steps]
        return sum(step_s[WARM_UP_STEPS:]) * sum(predicted_s) / sum(predicted_s[WARM_UP_STEPS:])

    @property
    def step_s_median(self) -> float:
        return median(s.elapsed_s for s in self.log.steps[WARM_UP_STEPS:])

    def typical_step(self) -> MeasuredStep:
        """The counted step nearest to the run's medians of work and of seconds per operation."""
        counted = range(WARM_UP_STEPS, len(self.steps))
        seconds = {i: self.log.steps[i].elapsed_s / self.step_flops[i] for i in counted}
        median_flops, median_seconds = median(self.step_flops[i] for i in counted), median(seconds.values())

        def distance(i: int) -> float:
            return abs(log(self.step_flops[i] / median_flops)) + abs(log(seconds[i] / median_seconds))

        return self.steps[min(counted, key=distance)]

    def losses(self) -> list[tuple[int, float]]:
        """(tokens trained so far, loss) of each step that printed a loss."""
        points, tokens = [], 0
        for logged, measured in zip(self.log.steps, self.steps, strict=True):
            tokens += measured.plan.num_tokens
            if logged.loss is not None:
                points.append((tokens, logged.loss))
        return points

    def imbalance(self, model: StepModel) -> list[float]:
        """Imbalance degree of each step's micro-batches, by the forward seconds that `model` predicts."""
        model = self.modelled(model)
        return [imbalance_degree(model.forward_s(s)) for s in self.steps]

    def measured_imbalance(self) -> list[float]:
        """The same by the measured forward seconds; noise makes every value larger."""
        values = []
        for step in self.steps:
            stages = [[forward_s for _, forward_s, _ in step.passes_s(p)] for p in range(step.num_stages)]
            values.append(imbalance_degree([sum(micro_batch) for micro_batch in zip(*stages, strict=True)]))
        return values

    def summary(self, model: StepModel) -> dict[str, Any]:
        """The run's entry in the report."""
        model = self.modelled(model)
        losses = self.losses()
        total_s = self.total_s(model)
        if not losses:
            raise DataError("the log must hold at least one loss, got none")
        last = self.log.steps[-1].fields
        return {
            "steps": len(self.steps),
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / total_s,
            "packed_flops_per_s": sum(self.step_flops) / total_s,
            "step_s_median": self.step_s_median,
            "imbalance_degree": fmean(self.imbalance(model)),
            "first_loss": losses[0][1],
            "final_loss": losses[-1][1],
            "mean_delay_steps": self._mean_delay_steps(),
            "waiting_tokens": int(last.get("waiting tokens", 0)),
            "max_micro_batch_tokens": max(m.num_tokens for s in self.steps for m in s.plan.micro_batches),
            "documents": sum(len(m.documents) for s in self.steps for m in s.plan.micro_batches),
            "micro_batches": sum(len(s.plan.micro_batches) for s in self.steps),
            "imbalance_degree_measured": fmean(self.measured_imbalance()[WARM_UP_STEPS:]),
            "waiting_share_of_ranks": self._waiting_share(),
            "total_s": total_s,
            "predicted_s": sum(model.step_s(s) for s in self.steps),
            "pass_deviation": self._pass_deviation(model),
        }

    def _mean_delay_steps(self) -> float:
        """Token-weighted."""
        delays = [s.fields.get("mean delay (steps)", 0.0) for s in self.log.steps]
        return sum(d * s.plan.num_tokens for d, s in zip(delays, self.steps, strict=True)) / self.tokens

    def _waiting_share(self) -> float:
        """Share of all ranks' seconds, begin to end of the schedule, in which they ran no pass."""
        counted = self.steps[WARM_UP_STEPS:]
        busy_s = sum(r.busy_s for s in counted for r in s.ranks)
        return 1 - busy_s / sum((s.end_s - s.begin_s) * len(s.ranks) for s in counted)

    def _pass_deviation(self, model: StepModel) -> float:
        """Mean over counted passes of |measured / predicted - 1|: how steadily the machine worked."""
        return fmean(
            abs(measured_s / predicted_s - 1)
            for step in self.steps[WARM_UP_STEPS:]
            for stage, cost in enumerate(model.costs)
            for lengths, forward_s, backward_s in step.passes_s(stage)
            for measured_s, predicted_s in (
                (forward_s, cost.forward_s(lengths)),
                (backward_s, cost.backward_s(lengths)),
            )
        )


def load_run(folder: Path) -> TrainedRun:
    """A run whose output is `log.txt` and whose time line is `timeline/`, both in `folder`.

    Raises DataError if either is missing, broken or of another length than the other.
    """
    try:
        return TrainedRun(log=load_log(folder / "log.txt"), steps=load_timeline(folder / "timeline"))
    except DataError as error:
        raise error if str(folder) in str(error) else DataError(f"run {folder}: {error}") from error
