"""A pipeline with its costs: what turns a replica's micro-batches into seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from wlb.cost.model import CostModel, ScaledCost
from wlb.errors import ConfigError
from wlb.schedule.program import PipelineShape, Sends


@dataclass(frozen=True, kw_only=True)
class PipelineModel:
    """A pipeline's shape and the cost of each stretch of the model.

    stretch_costs: (V,) cost of each stretch of layers in the order in which a micro-batch goes forward through them,
        V = num_stages x num_chunks. The first may hold the embedding and the last the loss head: stretches need not
        be equal.
    bytes_per_token: what a stretch sends to the next for each token; 0 means that messages take no time.
    sync_s: seconds of the gradients' synchronisation at the end of a step.
    """

    shape: PipelineShape = field(default_factory=PipelineShape)
    stretch_costs: tuple[CostModel, ...]
    bytes_per_token: int = 0
    sync_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.stretch_costs) != self.shape.num_virtual_stages:
            raise ConfigError(
                f"stretch_costs must have num_stages x num_chunks = {self.shape.num_virtual_stages} entries, "
                f"got {len(self.stretch_costs)}"
            )
        if self.bytes_per_token < 0:
            raise ConfigError(f"bytes_per_token must be >= 0, got {self.bytes_per_token}")
        if not 0 <= self.sync_s < float("inf"):
            raise ConfigError(f"sync_s must be finite and >= 0, got {self.sync_s}")

    @classmethod
    def equal_stages(
        cls,
        whole: CostModel,
        num_stages: int,
        *,
        num_chunks: int = 1,
        sends: Sends = "blocking",
        bytes_per_token: int = 0,
        sync_s: float = 0.0,
    ) -> PipelineModel:
        """A model cut in equal stretches. whole: cost of all of it."""
        shape = PipelineShape(num_stages=num_stages, num_chunks=num_chunks, sends=sends)
        stretch: CostModel = whole
        if shape.num_virtual_stages > 1:
            stretch = ScaledCost(whole=whole, share=1 / shape.num_virtual_stages)
        return cls(
            shape=shape,
            stretch_costs=(stretch,) * shape.num_virtual_stages,
            bytes_per_token=bytes_per_token,
            sync_s=sync_s,
        )

    @property
    def instant_messages(self) -> bool:
        """Whether no message takes any time."""
        return self.bytes_per_token == 0 or self.stretch_costs[0].communication_s(self.bytes_per_token) == 0

    def classes(self) -> tuple[tuple[CostModel, ...], tuple[int, ...]]:
        """The different costs among the stretches, and for each stretch which of them it has."""
        different: list[CostModel] = []
        of_stretch = []
        for cost in self.stretch_costs:
            if cost not in different:
                different.append(cost)
            of_stretch.append(different.index(cost))
        return tuple(different), tuple(of_stretch)

    def message_s(self, num_tokens: int) -> float:
        """Seconds for a micro-batch's activations, or their gradients, to reach the next stretch."""
        return self.stretch_costs[0].communication_s(self.bytes_per_token * num_tokens)

    def forward_s(self, lengths: Sequence[int]) -> list[float]:
        """(V,) forward seconds of one micro-batch."""
        costs, of_stretch = self.classes()
        seconds = [cost.forward_s(lengths) for cost in costs]
        return [seconds[k] for k in of_stretch]

    def backward_s(self, lengths: Sequence[int]) -> list[float]:
        """(V,) backward seconds of one micro-batch."""
        costs, of_stretch = self.classes()
        seconds = [cost.backward_s(lengths) for cost in costs]
        return [seconds[k] for k in of_stretch]
