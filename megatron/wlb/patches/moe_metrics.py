"""megatron.training.training:get_moe_metrics_tracker

The log line divides the auxiliary losses of a mixture of experts, summed over micro-batches, by the nominal number of
micro-batches. A planned step may run another number of them.
Seam that failed: the tracker's own scale is an argument that the training loop computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.wlb.patches.registry import Patch


def make_patch(nominal_over_run: Callable[[], float]) -> Patch:
    """nominal_over_run: () -> nominal over really run micro-batches of the step that is being logged."""

    def make(original: Callable[[], Any]) -> Callable[[], Any]:
        def get_moe_metrics_tracker() -> _Rescaled:
            return _Rescaled(original(), nominal_over_run())

        return get_moe_metrics_tracker

    return Patch(
        target="megatron.training.training:get_moe_metrics_tracker",
        distribution="megatron-core",
        versions=">=0.19.2,<0.20",
        source_digest="5f3729b47164ed3f",
        reason="logged auxiliary losses are divided by the nominal number of micro-batches, not by the number run",
        make=make,
        rebind_aliases=False,
    )


class _Rescaled:
    """The tracker, reporting with a corrected scale."""

    def __init__(self, tracker: Any, factor: float) -> None:
        self._tracker = tracker
        self._factor = factor

    def report(self, *, loss_scale: float, **kwargs: Any) -> Any:
        return self._tracker.report(loss_scale=loss_scale * self._factor, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)
