"""Packers by the name that `--wlb-packing` takes."""

from __future__ import annotations

from wlb.errors import ConfigError
from wlb.packing.greedy import GreedyPacker
from wlb.packing.makespan.packer import MakespanPacker
from wlb.packing.options import PackerOptions
from wlb.packing.packer import Packer
from wlb.packing.plain import PlainPacker
from wlb.packing.wlb import WlbPacker

PACKERS: dict[str, type[PlainPacker] | type[GreedyPacker] | type[WlbPacker] | type[MakespanPacker]] = {
    "plain": PlainPacker,
    "greedy": GreedyPacker,
    "wlb": WlbPacker,
    "makespan": MakespanPacker,
}


def build_packer(name: str, options: PackerOptions) -> Packer:
    """The packer of this name. Raises ConfigError if there is none, or if its options break a rule."""
    if name not in PACKERS:
        raise ConfigError(f"packer must be one of {', '.join(PACKERS)}, got {name!r}")
    return PACKERS[name].build(options)
