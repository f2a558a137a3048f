"""Plain packing, the baseline of every comparison: documents in arrival order, window after window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from wlb.documents import Document, StepPlan, total_tokens
from wlb.packing.dealing import replicas_round_robin
from wlb.packing.options import PackerOptions
from wlb.packing.packer import PackerState, StepShape
from wlb.packing.placement import require_fit


@dataclass(frozen=True, kw_only=True)
class PlainPacker:
    """Fills one window after the other and moves on when the next document does not fit (next fit).

    With the stream cut every window is full to the last token and nothing ever waits. With whole documents
    windows have gaps, documents beyond the step's last window wait for the next step, and that many tokens fewer
    are drawn for it.
    """

    shape: StepShape

    natural_cut: ClassVar[Literal["stream", "window"]] = "stream"
    state_fields: ClassVar[tuple[str, ...]] = ()
    free_counts: ClassVar[bool] = False

    @classmethod
    def build(cls, options: PackerOptions) -> PlainPacker:
        return cls(shape=options.shape)

    @property
    def cap_tokens(self) -> int:
        return self.shape.window_tokens

    @property
    def thresholds_tokens(self) -> tuple[int, ...]:
        return ()

    def initial_state(self) -> PackerState:
        return PackerState()

    def wanted_tokens(
        self, state: PackerState, arrivals: Sequence[Document] = (), *, steps_left: int | None = None
    ) -> int:
        return self.shape.budget_tokens - total_tokens(state.waiting) - total_tokens(arrivals)

    def plan_step(
        self, state: PackerState, arrivals: Sequence[Document], *, steps_left: int | None = None
    ) -> tuple[StepPlan, PackerState]:
        documents = (*state.carried, *arrivals)
        require_fit(documents, limit_tokens=self.cap_tokens)
        packs = next_fit(documents, window_tokens=self.shape.window_tokens)
        count = self.shape.num_micro_batches
        if steps_left == 1:
            extra = max(0, len(packs) - count)
            count += -(-extra // self.shape.num_replicas) * self.shape.num_replicas
        carried = tuple(d for pack in packs[count:] for d in pack)
        packs = split_to_count(packs[:count], count)
        plan = StepPlan(step=state.step, replicas=replicas_round_robin(packs, self.shape.num_replicas), waiting=carried)
        return plan, PackerState(
            step=state.step + 1,
            drawn_tokens=state.drawn_tokens + total_tokens(arrivals),
            budget_tokens=state.budget_tokens + self.shape.budget_tokens,
            carried=carried,
        )


def next_fit(documents: Sequence[Document], *, window_tokens: int) -> list[tuple[Document, ...]]:
    """Consecutive runs of documents of at most `window_tokens` each, every run as long as it can be."""
    packs: list[tuple[Document, ...]] = []
    begin = tokens = 0
    for i, document in enumerate(documents):
        if tokens + document.length > window_tokens:
            packs.append(tuple(documents[begin:i]))
            begin, tokens = i, 0
        tokens += document.length
    if begin < len(documents):
        packs.append(tuple(documents[begin:]))
    return packs


def split_to_count(packs: list[tuple[Document, ...]], count: int) -> list[tuple[Document, ...]]:
    """Split the packs with most documents until there are `count`, so that none is empty if documents suffice.

    Order is kept; what documents cannot fill is appended empty.
    """
    packs = list(packs)
    while len(packs) < count:
        i = max(range(len(packs)), key=lambda i: (len(packs[i]), -i), default=-1)
        if i < 0 or len(packs[i]) < 2:
            packs.extend([()] * (count - len(packs)))
        else:
            half = len(packs[i]) // 2
            packs[i : i + 1] = [packs[i][:half], packs[i][half:]]
    return packs
