"""When every forward and backward pass of a step runs, for micro-batches of unequal length."""

from wlb.schedule.graph import PassGraph, pass_graph
from wlb.schedule.model import PipelineModel
from wlb.schedule.order import Pass, interleaved_one_forward_one_backward, one_forward_one_backward
from wlb.schedule.program import PipelineShape
from wlb.schedule.step_time import model_timeline, plan_timeline
from wlb.schedule.timeline import ReplicaTimeline, StepTimeline, TimedPass, replica_timeline

__all__ = [
    "Pass",
    "PassGraph",
    "PipelineModel",
    "PipelineShape",
    "ReplicaTimeline",
    "StepTimeline",
    "TimedPass",
    "interleaved_one_forward_one_backward",
    "model_timeline",
    "one_forward_one_backward",
    "pass_graph",
    "plan_timeline",
    "replica_timeline",
]
