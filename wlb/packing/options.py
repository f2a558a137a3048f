"""What a person may choose about packing, whatever the algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from wlb.cost.model import CostModel
from wlb.packing.packer import StepShape
from wlb.schedule.model import PipelineModel


@dataclass(frozen=True, kw_only=True)
class PackerOptions:
    """Everything from which any registered packer can be built; each takes what it needs.

    cost: predicts the work that balancing packers compare.
    cap_windows: most tokens of a micro-batch over the window, for packers of variable length; None is the packer's
        own default (wlb 1.5, makespan 1).
    thresholds_tokens: shortest document of each outlier queue; see `wlb.packing.thresholds` to derive them.
    greedy_window_batches: global batches over which the fixed-length greedy packer balances.
    pipeline: predicts the step that makespan shortens; None is one stage of `cost`, no pipeline.
    in_flight_windows: most tokens over the window that makespan lets the first stage hold; None is what plain holds.
    search_evaluations: candidate plans that makespan times in a step; None is about 20 ms worth.
    equal_counts: whether replicas must run equally many micro-batches.
    count_multiple: of which a replica's number of micro-batches must be a multiple.
    """

    shape: StepShape
    cost: CostModel
    cap_windows: float | None = None
    thresholds_tokens: tuple[int, ...] = ()
    greedy_window_batches: int = 1
    pipeline: PipelineModel | None = None
    in_flight_windows: float | None = None
    search_evaluations: int | None = None
    equal_counts: bool = False
    count_multiple: int = 1
