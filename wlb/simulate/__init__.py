"""Replays a trace of document lengths through stream, packer and schedule, without a model or a device."""

from wlb.simulate.replay import Cluster, ReplayResult, replay
from wlb.simulate.trace import load_lengths

__all__ = ["Cluster", "ReplayResult", "load_lengths", "replay"]
