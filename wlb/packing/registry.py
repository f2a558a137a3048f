"""Packers by the name that `--wlb-packing` takes."""

from __future__ import annotations

from typing import Literal

from wlb.errors import ConfigError
from wlb.packing.delay import HoldsBack
from wlb.packing.greedy import GreedyPacker
from wlb.packing.makespan.packer import MakespanPacker
from wlb.packing.options import PackerOptions
from wlb.packing.packer import Packer
from wlb.packing.plain import PlainPacker
from wlb.packing.solver.packer import SolverPacker
from wlb.packing.two_stage.packer import TwoStagePacker
from wlb.packing.wlb import WlbPacker

PACKERS: dict[
    str,
    type[PlainPacker]
    | type[GreedyPacker]
    | type[WlbPacker]
    | type[MakespanPacker]
    | type[TwoStagePacker]
    | type[SolverPacker],
] = {
    "plain": PlainPacker,
    "greedy": GreedyPacker,
    "wlb": WlbPacker,
    "makespan": MakespanPacker,
    "two_stage": TwoStagePacker,
    "solver": SolverPacker,
}


def natural_cut(name: str, *, max_delay_steps: int) -> Literal["stream", "window"]:
    """The document cut of a packer where none is chosen: its own, and whole documents where they may wait."""
    return "window" if max_delay_steps and issubclass(PACKERS[name], HoldsBack) else PACKERS[name].natural_cut


def build_packer(name: str, options: PackerOptions) -> Packer:
    """The packer of this name. Raises ConfigError if there is none, or if its options break a rule."""
    if name not in PACKERS:
        raise ConfigError(f"packer must be one of {', '.join(PACKERS)}, got {name!r}")
    return PACKERS[name].build(options)
