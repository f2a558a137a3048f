"""From a step plan and the cost of each stage to a timeline."""

from __future__ import annotations

from collections.abc import Sequence

from wlb.cost.model import CostModel
from wlb.documents import StepPlan
from wlb.errors import ConfigError
from wlb.schedule.model import PipelineModel
from wlb.schedule.program import PipelineShape
from wlb.schedule.timeline import StepTimeline, replica_timeline


def plan_timeline(
    plan: StepPlan, stage_costs: Sequence[CostModel], *, bytes_per_token: int = 0, sync_s: float = 0.0
) -> StepTimeline:
    """Predict the step that trains `plan` under 1F1B without virtual stages.

    stage_costs: cost model of each pipeline stage, first stage first. Equal stages of a whole model are
        `[ScaledCost(whole=model, share=1 / pp)] * pp`.
    bytes_per_token: what a stage sends to the next for each token, usually hidden size times bytes per number.
    sync_s: seconds of the gradients' synchronisation.
    """
    if not stage_costs:
        raise ConfigError("stage_costs must hold at least one cost model, got none")
    return model_timeline(
        plan,
        PipelineModel(
            shape=PipelineShape(num_stages=len(stage_costs)),
            stretch_costs=tuple(stage_costs),
            bytes_per_token=bytes_per_token,
            sync_s=sync_s,
        ),
    )


def model_timeline(plan: StepPlan, model: PipelineModel) -> StepTimeline:
    """Predict the step that trains `plan` on any pipeline."""
    return StepTimeline(
        replicas=tuple(
            replica_timeline(
                [model.forward_s(m.lengths) for m in replica],
                [model.backward_s(m.lengths) for m in replica],
                send_s=None if model.instant_messages else [model.message_s(m.num_tokens) for m in replica],
                shape=model.shape,
            )
            for replica in plan.replicas
        ),
        sync_s=model.sync_s,
    )
