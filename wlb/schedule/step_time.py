"""From a step plan and the cost of each stage to a timeline."""

from __future__ import annotations

from collections.abc import Sequence

from wlb.cost.model import CostModel
from wlb.documents import StepPlan
from wlb.errors import ConfigError
from wlb.schedule.timeline import StepTimeline, replica_timeline


def plan_timeline(
    plan: StepPlan, stage_costs: Sequence[CostModel], *, bytes_per_token: int = 0, sync_s: float = 0.0
) -> StepTimeline:
    """Predict the step that trains `plan`.

    stage_costs: cost model of each pipeline stage, first stage first. Equal stages of a whole model are
        `[ScaledCost(whole=model, share=1 / pp)] * pp`.
    bytes_per_token: what a stage sends to the next for each token, usually hidden size times bytes per number.
    sync_s: seconds of the gradients' synchronisation.
    """
    if not stage_costs:
        raise ConfigError("stage_costs must hold at least one cost model, got none")
    return StepTimeline(
        replicas=tuple(
            replica_timeline(
                [[cost.forward_s(m.lengths) for cost in stage_costs] for m in replica],
                [[cost.backward_s(m.lengths) for cost in stage_costs] for m in replica],
                send_s=[stage_costs[0].communication_s(bytes_per_token * m.num_tokens) for m in replica],
                num_stages=len(stage_costs),
            )
            for replica in plan.replicas
        ),
        sync_s=sync_s,
    )
