"""When every forward and backward pass of a step runs, for micro-batches of unequal length."""

from wlb.schedule.order import Pass, one_forward_one_backward
from wlb.schedule.step_time import plan_timeline
from wlb.schedule.timeline import ReplicaTimeline, StepTimeline, TimedPass, replica_timeline

__all__ = [
    "Pass",
    "ReplicaTimeline",
    "StepTimeline",
    "TimedPass",
    "one_forward_one_backward",
    "plan_timeline",
    "replica_timeline",
]
