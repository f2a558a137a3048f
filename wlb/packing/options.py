"""What a person may choose about packing, whatever the algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from wlb.cost.model import CostModel
from wlb.packing.packer import StepShape


@dataclass(frozen=True, kw_only=True)
class PackerOptions:
    """Everything from which any registered packer can be built; each takes what it needs.

    cost: predicts the work that balancing packers compare.
    cap_windows: most tokens of a micro-batch over the window, for packers of variable length.
    thresholds_tokens: shortest document of each outlier queue; see `wlb.packing.thresholds` to derive them.
    greedy_window_batches: global batches over which the fixed-length greedy packer balances.
    """

    shape: StepShape
    cost: CostModel
    cap_windows: float = 1.5
    thresholds_tokens: tuple[int, ...] = ()
    greedy_window_batches: int = 1
