"""What a person may choose about packing, whatever the algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wlb.cost.model import CostModel
from wlb.packing.packer import StepShape
from wlb.schedule.model import PipelineModel
from wlb.sharding.division import Division
from wlb.sharding.micro_batch_cost import EvenCost

DEFAULT_SOLVER_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class PackerOptions:
    """Everything from which any registered packer can be built; each takes what it needs.

    cost: predicts the work that balancing packers compare.
    cap_windows: most tokens of a micro-batch over the window, for packers of variable length; None is the packer's
        own default (wlb 1.5, makespan and two_stage 1, solver 1.5).
    thresholds_tokens: shortest document of each outlier queue; see `wlb.packing.thresholds` to derive them for wlb,
        `wlb.packing.delay_thresholds` for packers that take max_delay_steps.
    max_delay_steps: longest wait of a document under makespan, two_stage, and wlb with its intake "budget"; 0 trains
        every document in the step in which it arrives.
    wlb_intake: how packer wlb draws and releases: "algorithm1", as published, or "budget", see `Delay`.
    greedy_window_batches: global batches over which the fixed-length greedy packer balances.
    pipeline: predicts the step that makespan and two_stage shorten; None is one stage of `cost`, no pipeline.
    in_flight_windows: most tokens over the window that makespan and two_stage let the first stage hold; None is what
        plain holds.
    search_evaluations: candidate plans that makespan times in a step; None is about 20 ms worth.
    equal_counts: whether replicas must run equally many micro-batches.
    count_multiple: of which a replica's number of micro-batches must be a multiple.
    division: how context-parallel ranks divide a micro-batch, of which `cost` and `pipeline` are the undivided cost;
        None is one rank that takes it whole.
    shard_plans: shard plans that makespan makes in a step to find out what divided micro-batches take; None is about
        120 ms worth for 4 micro-batches.
    solver_lengths: which of its two formulations packer solver solves, "variable" or "fixed" length.
    solver_seconds: that packer solver may search in a step, counted in its operations.
    """

    shape: StepShape
    cost: CostModel
    cap_windows: float | None = None
    thresholds_tokens: tuple[int, ...] = ()
    max_delay_steps: int = 0
    wlb_intake: Literal["algorithm1", "budget"] = "algorithm1"
    greedy_window_batches: int = 1
    pipeline: PipelineModel | None = None
    in_flight_windows: float | None = None
    search_evaluations: int | None = None
    equal_counts: bool = False
    count_multiple: int = 1
    division: Division | None = None
    shard_plans: int | None = None
    solver_lengths: Literal["variable", "fixed"] = "variable"
    solver_seconds: float = DEFAULT_SOLVER_SECONDS

    @property
    def rank_cost(self) -> CostModel:
        """Of a context-parallel rank's part, all ranks being equally busy: additive, for packers that compare work."""
        if self.division is None:
            return self.cost
        return EvenCost(whole=self.cost, division=self.division)
