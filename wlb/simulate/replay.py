"""Runs a packer over a stream of documents and measures what the cluster would do.

Counted steps. The first steps are a warm-up: it ends with the step in which the last outlier queue has released for
the first time, because until then queues only fill. After it, `num_steps` steps are counted, and the run stops
there without draining: what waits then is counted as waiting, at its age. Conservation is of the whole run,
warm-up included: documents_in == documents_out + documents_waiting.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any

from wlb.cost.model import CostModel
from wlb.data.planner import draw_arrivals
from wlb.data.stream import DocumentStream
from wlb.documents import StepPlan
from wlb.errors import ConfigError, PackingError
from wlb.metrics import coefficient_of_variation, imbalance_degree
from wlb.packing.packer import Packer
from wlb.schedule.model import PipelineModel
from wlb.schedule.program import Sends
from wlb.schedule.step_time import model_timeline
from wlb.sharding.division import Division
from wlb.sharding.micro_batch_cost import ShardedCost, sharded


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a plan runs on.

    cost: of the whole model, of undivided micro-batches; each of `num_stages` equal pipeline stages has its share.
    division: how context-parallel ranks divide each micro-batch, whose time is then that of its slowest rank; None is
        one rank.
    bytes_per_token: sent from stage to stage. sync_s: gradients' synchronisation of a step.
    in_flight_tokens: most tokens that the first stage may hold; a step beyond it is a PackingError.
    sends: whether ranks wait for their messages; see `wlb.schedule.program`.
    """

    cost: CostModel
    num_stages: int
    bytes_per_token: int = 0
    sync_s: float = 0.0
    in_flight_tokens: int | None = None
    sends: Sends = "blocking"
    division: Division | None = None

    @property
    def cp_size(self) -> int:
        return 1 if self.division is None else self.division.cp_size

    @cached_property
    def model(self) -> PipelineModel:
        """Of divided micro-batches."""
        return sharded(self.undivided, self.division)

    @cached_property
    def undivided(self) -> PipelineModel:
        """What packers are given. Raises ConfigError if num_stages, bytes_per_token or sync_s breaks a rule."""
        return PipelineModel.equal_stages(
            self.cost, self.num_stages, sends=self.sends, bytes_per_token=self.bytes_per_token, sync_s=self.sync_s
        )


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """Measures of the counted steps; the three `documents_` counts are of the whole run.

    imbalance_degree: mean over steps of max * n / sum of the micro-batches' forward seconds without fixed_s, each that
        of its slowest context-parallel rank.
    step_time_over_ideal: total predicted time over the time in which the same documents, without any fixed time,
        would run if all stages of all replicas, and all their context-parallel ranks, always worked, and no kernel
        tile and no message were wasted.
    lower_bound_over_ideal: no placing of the same documents in the same steps is faster: the larger, per step, of the
        longest document's way through all stages and back, and the ideal time.
    time_per_token: predicted seconds per trained token.
    mean_delay_steps: steps from arrival to training, averaged over tokens; documents that still wait at the end
        count at their age.
    max_delay_steps: the longest of them.
    step_tokens_cv: coefficient of variation of the tokens of a step.
    max_in_flight_tokens: most tokens that a first stage held.
    micro_batches_mean: micro-batches of a step, over all replicas.
    plan_ms_median: milliseconds to plan a step, without drawing its documents.
    """

    imbalance_degree: float
    step_time_over_ideal: float
    lower_bound_over_ideal: float
    time_per_token: float
    mean_delay_steps: float
    max_delay_steps: int
    step_tokens_cv: float
    max_micro_batch_tokens: int
    max_in_flight_tokens: int
    micro_batches_mean: float
    plan_ms_median: float
    documents_in: int
    documents_out: int
    documents_waiting: int
    steps: int
    warm_up_steps: int
    tokens_per_step: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def replay(
    packer: Packer,
    stream: DocumentStream,
    cluster: Cluster,
    *,
    num_steps: int,
    max_warm_up_steps: int = 1000,
    on_step: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> ReplayResult:
    """Warm up, then count `num_steps` steps.

    max_warm_up_steps: ConfigError if a queue has not released by then.
    on_step: called after each counted step, for a progress bar.
    clock: seconds, for plan_ms_median.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps must be >= 1, got {num_steps}")
    tally = _Tally(cluster)
    unreleased = set(range(len(packer.thresholds_tokens)))
    state = packer.initial_state()
    documents_in = documents_out = warm_up_steps = 0
    while len(tally.step_tokens) < num_steps:
        arrivals = draw_arrivals(packer, state, stream)
        begin_s = clock()
        plan, state = packer.plan_step(state, arrivals)
        plan_s = clock() - begin_s
        documents_in += len(arrivals)
        documents_out += sum(len(m.documents) for m in plan.micro_batches)
        if not unreleased:
            tally.add(plan, plan_s=plan_s)
            on_step()
            continue
        warm_up_steps += 1
        trained = (d.length for m in plan.micro_batches for d in m.documents)
        unreleased -= {bisect_right(packer.thresholds_tokens, n) - 1 for n in trained}
        if unreleased and warm_up_steps >= max_warm_up_steps:
            waiting = packer.thresholds_tokens[min(unreleased)]
            raise ConfigError(
                f"thresholds_tokens must let every queue release within max_warm_up_steps = {max_warm_up_steps} steps, "
                f"got {waiting}: its queue has not"
            )
    return tally.result(
        waiting=plan,
        end_step=state.step,
        documents_in=documents_in,
        documents_out=documents_out,
        warm_up_steps=warm_up_steps,
    )


class _Tally:
    """Sums over the counted steps."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._model = cluster.model
        self.step_tokens: list[int] = []
        self._imbalance: list[float] = []
        self._micro_batches: list[int] = []
        self._plan_ms: list[float] = []
        self._total_s = self._ideal_s = self._bound_s = 0.0
        self._delay_token_steps = self._max_delay = self._max_tokens = self._max_in_flight = 0

    def add(self, plan: StepPlan, *, plan_s: float) -> None:
        cost, cp = self._cluster.cost, self._cluster.cp_size
        rank_cost = cost if self._cluster.division is None else ShardedCost(whole=cost, division=self._cluster.division)
        self.step_tokens.append(plan.num_tokens)
        self._plan_ms.append(plan_s * 1e3)
        batches = plan.micro_batches
        self._micro_batches.append(len(batches))
        self._imbalance.append(imbalance_degree([rank_cost.forward_s(m.lengths) - cost.fixed_s for m in batches]))
        forward_s = [cost.forward_s(m.lengths) - cost.fixed_s for m in batches]
        idle_backward_s = cost.backward_s(())
        backward_s = [cost.backward_s(m.lengths) - idle_backward_s for m in batches]
        ideal_s = (sum(forward_s) + sum(backward_s)) / (self._cluster.num_stages * cp * len(plan.replicas))
        longest = [max(m.max_seqlen for m in batches)]
        self._ideal_s += ideal_s + self._model.sync_s
        longest_s = cost.forward_s(longest) + cost.backward_s(longest)
        longest_s -= (longest_s - cost.fixed_s - idle_backward_s) * (1 - 1 / cp)
        self._bound_s += max(ideal_s, longest_s) + self._model.sync_s
        self._total_s += model_timeline(plan, self._model).makespan_s
        self._max_tokens = max(self._max_tokens, *(m.num_tokens for m in batches))
        self._add_in_flight(plan)
        for m in batches:
            for d in m.documents:
                self._add_delay(plan.step - d.arrival, d.length)

    def result(
        self, *, waiting: StepPlan, end_step: int, documents_in: int, documents_out: int, warm_up_steps: int
    ) -> ReplayResult:
        trained_tokens = sum(self.step_tokens)
        for d in waiting.waiting:
            self._add_delay(end_step - d.arrival, d.length)
        waiting_tokens = sum(d.length for d in waiting.waiting)
        return ReplayResult(
            imbalance_degree=fmean(self._imbalance),
            step_time_over_ideal=self._total_s / self._ideal_s,
            lower_bound_over_ideal=self._bound_s / self._ideal_s,
            time_per_token=self._total_s / trained_tokens,
            mean_delay_steps=self._delay_token_steps / (trained_tokens + waiting_tokens),
            max_delay_steps=self._max_delay,
            step_tokens_cv=coefficient_of_variation(self.step_tokens),
            max_micro_batch_tokens=self._max_tokens,
            max_in_flight_tokens=self._max_in_flight,
            micro_batches_mean=fmean(self._micro_batches),
            plan_ms_median=median(self._plan_ms),
            documents_in=documents_in,
            documents_out=documents_out,
            documents_waiting=len(waiting.waiting),
            steps=len(self.step_tokens),
            warm_up_steps=warm_up_steps,
            tokens_per_step=trained_tokens / len(self.step_tokens),
        )

    def _add_delay(self, steps: int, tokens: int) -> None:
        self._delay_token_steps += steps * tokens
        self._max_delay = max(self._max_delay, steps)

    def _add_in_flight(self, plan: StepPlan) -> None:
        limit = self._cluster.in_flight_tokens
        for replica in plan.replicas:
            held = self._model.shape.first_stage_peak_tokens([m.num_tokens for m in replica])
            if limit is not None and held > limit:
                raise PackingError(
                    f"tokens in flight on the first stage must be <= {limit}, got {held} (step {plan.step})"
                )
            self._max_in_flight = max(self._max_in_flight, held)
