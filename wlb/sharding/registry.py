"""Sharders by the name that `--wlb-cp-sharding` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wlb.errors import ConfigError
from wlb.sharding import adaptive, hybrid, per_document, per_sequence
from wlb.sharding.cost import ShardCosts
from wlb.sharding.plan import ShardPlan, unsharded


class Sharder(Protocol):
    """One algorithm: the same lengths and costs give the same plan on every rank."""

    def __call__(self, lengths: Sequence[int], cp_size: int, costs: ShardCosts, /) -> ShardPlan:
        """Divide documents of these lengths.

        Raises:
            ShardingError: the tokens are no multiple of cp_size.
        """
        ...


SHARDERS: dict[str, Sharder] = {
    "per_sequence": per_sequence.shard,
    "per_document": per_document.shard,
    "adaptive": adaptive.shard,
    "hybrid": hybrid.shard,
}


def sharder_named(name: str) -> Sharder:
    """Raises ConfigError if there is none of this name."""
    if name not in SHARDERS:
        raise ConfigError(f"sharder must be one of {', '.join(SHARDERS)}, got {name!r}")
    return SHARDERS[name]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How every micro-batch of a run is divided.

    name: of the sharder. cp_size: context-parallel ranks. costs: with which sharders compare.

    Raises:
        ConfigError: there is no such sharder, or cp_size is below 1.
    """

    name: str = "per_sequence"
    cp_size: int = 1
    costs: ShardCosts = field(default_factory=ShardCosts)

    def __post_init__(self) -> None:
        sharder_named(self.name)
        if self.cp_size < 1:
            raise ConfigError(f"cp_size must be >= 1, got {self.cp_size}")

    def plan(self, lengths: Sequence[int]) -> ShardPlan:
        """Divide documents of these lengths, padding included. Raises ShardingError if the tokens do not divide."""
        if self.cp_size == 1:
            return unsharded(lengths)
        return SHARDERS[self.name](lengths, self.cp_size, self.costs)
