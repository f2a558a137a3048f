"""megatron.training.training:get_forward_backward_func

The name by which the training loop gets its pipeline schedule, for training and for evaluation. The schedule takes
its number of micro-batches from one global count, and a receiving stage takes their length from --seq-length or
asks the sender. A planned step knows both, per step and per replica.
Seams that failed: `pretrain(p2p_communicator=...)` breaks evaluation, which calls the schedule without process
groups; the micro-batch calculator asserts one count for all steps and replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.wlb.patches.registry import Patch


def make_patch(run: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> Patch:
    """run: (the schedule that Megatron chose, the keyword arguments of its call) -> what the schedule returns."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            schedule = original(*args, **kwargs)

            def planned(**call: Any) -> Any:
                return run(schedule, call)

            return planned

        return get_forward_backward_func

    return Patch(
        target="megatron.training.training:get_forward_backward_func",
        distribution="megatron-core",
        versions=">=0.19.2,<0.20",
        source_digest="9d8e0a75be40fcce",
        reason="the schedule takes one global count of micro-batches, and their length from --seq-length or the sender",
        make=make,
        rebind_aliases=False,
    )
