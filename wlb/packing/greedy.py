"""Greedy fixed-length packing: WLB-LLM's baseline (arXiv 2503.17924, section 4.1, "Fixed-Len Greedy")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from wlb.cost.model import CostModel, micro_batch_work_ns
from wlb.documents import Document, StepPlan, total_tokens
from wlb.errors import ConfigError
from wlb.packing.dealing import replicas_by_work
from wlb.packing.options import PackerOptions
from wlb.packing.packer import PackerState, StepShape
from wlb.packing.placement import longest_first, place, place_all, require_fit

_Filled = tuple[tuple[Document, ...], ...]


@dataclass(frozen=True, kw_only=True)
class GreedyPacker:
    """Small max of sum d^2 over the micro-batches of `window_batches` global batches, none over one window.

    The documents of that many global batches are drawn at once and placed longest first, each in the micro-batch
    with least sum d^2 among those it fits. Micro-batches of similar work then form a step, because only those
    wait for each other. What fits nowhere is carried, comes first in the next window, and that many tokens fewer
    are drawn for it: never more than a window's worth waits.

    cost: deals micro-batches to replicas; placing compares sum d^2 only.
    window_batches: >= 1. Balance improves with it and the order of the data suffers (published: 8 batches
        raise the loss by 1.6 %).
    """

    shape: StepShape
    cost: CostModel
    window_batches: int = 1

    natural_cut: ClassVar[Literal["stream", "window"]] = "window"
    state_fields: ClassVar[tuple[str, ...]] = ("window_batches",)
    free_counts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.window_batches < 1:
            raise ConfigError(f"window_batches must be >= 1, got {self.window_batches}")

    @classmethod
    def build(cls, options: PackerOptions) -> GreedyPacker:
        return cls(shape=options.shape, cost=options.rank_cost, window_batches=options.greedy_window_batches)

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
        if state.planned:
            return 0
        drawn_tokens = total_tokens(state.carried) + total_tokens(arrivals)
        return self._batches(steps_left) * self.shape.budget_tokens - drawn_tokens

    def plan_step(
        self, state: PackerState, arrivals: Sequence[Document], *, steps_left: int | None = None
    ) -> tuple[StepPlan, PackerState]:
        require_fit(arrivals, limit_tokens=self.cap_tokens)
        planned = state.planned
        carried = (*state.carried, *arrivals)
        if steps_left == 1 and (carried or len(planned) != 1):
            planned, carried = (self._fill_last((*state.waiting, *arrivals)),), ()
        elif not planned:
            planned, carried = self._fill(state.carried, arrivals, num_batches=self._batches(steps_left))
        filled, later = planned[0], planned[1:]
        work = [micro_batch_work_ns(self.cost, (d.length for d in documents)) for documents in filled]
        after = PackerState(
            step=state.step + 1,
            drawn_tokens=state.drawn_tokens + total_tokens(arrivals),
            budget_tokens=state.budget_tokens + self.shape.budget_tokens,
            carried=carried,
            planned=later,
        )
        plan = StepPlan(
            step=state.step,
            replicas=replicas_by_work(filled, work, self.shape.num_replicas),
            waiting=after.waiting,
        )
        return plan, after

    def _batches(self, steps_left: int | None) -> int:
        return self.window_batches if steps_left is None else min(self.window_batches, steps_left)

    def _fill(
        self, carried: Sequence[Document], arrivals: Sequence[Document], *, num_batches: int
    ) -> tuple[tuple[_Filled, ...], tuple[Document, ...]]:
        per_step = self.shape.num_micro_batches
        placement = place(
            [*carried, *longest_first(arrivals)],
            num_micro_batches=num_batches * per_step,
            limit_tokens=self.cap_tokens,
            work=_square,
            fallback="any",
        )
        by_work = sorted(range(len(placement.filled)), key=lambda i: (-placement.work[i], i))
        steps = [
            tuple(placement.filled[i] for i in by_work[b : b + per_step]) for b in range(0, len(by_work), per_step)
        ]
        # By oldest document, or every window would run from its longest documents to its shortest.
        steps.sort(key=lambda step: min((d.doc_id for filled in step for d in filled), default=-1))
        return tuple(steps), placement.left

    def _fill_last(self, documents: Sequence[Document]) -> _Filled:
        return place_all(
            documents,
            num_micro_batches=self.shape.num_micro_batches,
            num_replicas=self.shape.num_replicas,
            limit_tokens=self.cap_tokens,
            work=_square,
            fallback="any",
        ).filled


def _square(length: int) -> int:
    return length * length
