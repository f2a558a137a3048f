"""The scale of logged auxiliary losses."""

from __future__ import annotations

from typing import Any

from megatron.wlb.patches import moe_metrics


class _Tracker:
    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.name = "tracker"

    def report(self, **kwargs: Any) -> str:
        self.calls.append(kwargs)
        return "line"


def test_the_scale_is_that_of_the_micro_batches_run() -> None:
    """Nominal 4, really 16: upstream's 1 / 4 becomes 1 / 16; everything else passes through."""
    tracker = _Tracker()
    rescaled = moe_metrics.make_patch(lambda: 4 / 16).make(lambda: tracker)()
    assert rescaled.report(loss_scale=1 / 4, iteration=3) == "line"
    assert tracker.calls == [{"loss_scale": 1 / 16, "iteration": 3}]
    assert rescaled.name == "tracker"
