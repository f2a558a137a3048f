"""Packing: documents that arrive in a step in, micro-batches of that step out. One algorithm a file."""

from wlb.packing.options import DEFAULT_SOLVER_SECONDS, PackerOptions
from wlb.packing.packer import Packer, PackerState, StepShape
from wlb.packing.registry import PACKERS, build_packer, natural_cut
from wlb.packing.thresholds import DEFAULT_NUM_QUEUES, derive_thresholds

__all__ = [
    "DEFAULT_NUM_QUEUES",
    "DEFAULT_SOLVER_SECONDS",
    "PACKERS",
    "Packer",
    "PackerOptions",
    "PackerState",
    "StepShape",
    "build_packer",
    "derive_thresholds",
    "natural_cut",
]
