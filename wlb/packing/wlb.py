"""WLB-LLM's variable-length packing with outlier document delay: Algorithm 1 of arXiv 2503.17924.

Four micro-batches a step, thresholds (6,), window 8, cap 12, documents by length::

    step 0   arrive 7 2 6 3 1 ..     7 and 6 wait in the queue; 3, 2, 1, .. are placed longest first
    step 1   arrive 6 7 2 2 ..       the queue holds 4: 7 6 6 7 are released, one for each micro-batch
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from wlb.cost.model import CostModel, document_work_ns
from wlb.documents import Document, StepPlan, total_tokens
from wlb.errors import ConfigError, PackingError, StateError
from wlb.packing.dealing import replicas_by_work
from wlb.packing.delay import Delay
from wlb.packing.options import PackerOptions
from wlb.packing.packer import PackerState, StepShape
from wlb.packing.placement import Placement, longest_first, place, place_all


@dataclass(frozen=True, kw_only=True)
class WlbPacker:
    """Algorithm 1: delay outlier documents in queues, then place by work, under a cap in tokens.

    1. An arriving document of at least thresholds_tokens[0] tokens goes to the queue of its band, others are New.
    2. Every queue that holds at least N documents (N: micro-batches of a step) releases its N oldest into New.
    3. New is sorted, longest first, and comes after the documents carried over from the step before.
    4. Each document goes to the micro-batch with least work if it fits there, else to the shortest one if it
       fits there, else it is carried over. It fits if the tokens then stay strictly below the cap.

    cap_windows: cap over the window. Must be above 1: micro-batches hold a window on average, so at 1 there is no
        room for a released queue and more is carried over every step.
    thresholds_tokens: strictly increasing, each in [1, cap). () delays nothing.

    delay: draws and releases instead of steps 1 and 2, so that a step holds its budget and no document waits beyond
        a bound; its thresholds are thresholds_tokens. A step opens more micro-batches where the cap would make
        it leave documents. None is the published algorithm:

    A step draws its token budget whatever the queues hold, so the tokens of a step vary. Towards a known end
    (`steps_left`) queues are emptied over as many steps as the room under the cap asks for, as evenly as
    multiples of N allow; the last step places everything and opens more micro-batches if the cap demands it.
    """

    shape: StepShape
    cost: CostModel
    cap_windows: float = 1.5
    thresholds_tokens: tuple[int, ...] = ()
    delay: Delay | None = None

    natural_cut: ClassVar[Literal["stream", "window"]] = "window"
    state_fields: ClassVar[tuple[str, ...]] = ("cap_windows", "thresholds_tokens")
    free_counts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 < self.cap_windows < float("inf") or self.cap_tokens <= self.shape.window_tokens:
            raise ConfigError(
                f"cap_windows must be > 1 (by at least one token of the window of {self.shape.window_tokens}), got "
                f"{self.cap_windows}: with no room above the window the documents carried over grow without end"
            )
        for lower, upper in zip((0, *self.thresholds_tokens), (*self.thresholds_tokens, self.cap_tokens), strict=True):
            if lower >= upper:
                raise ConfigError(
                    f"thresholds_tokens must increase strictly between 0 and the cap of {self.cap_tokens}, "
                    f"got {list(self.thresholds_tokens)}"
                )

        if self.delay is not None and self.delay.thresholds_tokens != self.thresholds_tokens:
            raise ConfigError(
                f"thresholds_tokens must be those of delay, {list(self.delay.thresholds_tokens)}, "
                f"got {list(self.thresholds_tokens)}"
            )

    @classmethod
    def build(cls, options: PackerOptions) -> WlbPacker:
        if options.wlb_intake not in ("algorithm1", "budget"):
            raise ConfigError(f"wlb_intake must be algorithm1 or budget, got {options.wlb_intake!r}")
        if options.wlb_intake == "budget" and options.max_delay_steps < 1:
            raise ConfigError(f"max_delay_steps must be >= 1 with wlb_intake budget, got {options.max_delay_steps}")
        return cls(
            shape=options.shape,
            cost=options.rank_cost,
            cap_windows=cls.cap_windows if options.cap_windows is None else options.cap_windows,
            thresholds_tokens=options.thresholds_tokens,
            delay=Delay.build(options) if options.wlb_intake == "budget" else None,
        )

    @property
    def cap_tokens(self) -> int:
        return int(self.cap_windows * self.shape.window_tokens)

    def initial_state(self) -> PackerState:
        return PackerState(queues=((),) * len(self.thresholds_tokens))

    def wanted_tokens(
        self, state: PackerState, arrivals: Sequence[Document] = (), *, steps_left: int | None = None
    ) -> int:
        if self.delay is not None:
            return self.delay.intake(state, arrivals, steps_left=steps_left).wanted_tokens
        return state.budget_tokens + self.shape.budget_tokens - state.drawn_tokens - total_tokens(arrivals)

    def cut_tokens(self, state: PackerState, arrivals: Sequence[Document], *, steps_left: int | None = None) -> int:
        if self.delay is None:
            return 0
        return self.delay.intake(state, arrivals, steps_left=steps_left).cut_tokens

    def plan_step(
        self, state: PackerState, arrivals: Sequence[Document], *, steps_left: int | None = None
    ) -> tuple[StepPlan, PackerState]:
        if len(state.queues) != len(self.thresholds_tokens):
            raise StateError(
                f"queues of the state must be as many as thresholds_tokens {list(self.thresholds_tokens)}, "
                f"got {len(state.queues)}"
            )
        for d in arrivals:
            if d.length >= self.cap_tokens:
                raise PackingError(
                    f"length must be below the cap of {self.cap_tokens} tokens, got {d.length} (document {d.doc_id})"
                )
        if self.delay is not None:
            intake = self.delay.intake(state, arrivals, steps_left=steps_left)
            placement = self._place((), intake.trained, last=steps_left == 1)
            if placement.left:
                placement = self._place((), intake.trained, last=True)
            return self._planned(state, arrivals, placement, intake.queues, intake.carried)
        waiting_tokens = total_tokens(state.waiting)
        new: list[Document] = []
        queues = [list(q) for q in state.queues]
        for d in arrivals:
            band = bisect_right(self.thresholds_tokens, d.length) - 1
            (queues[band] if band >= 0 else new).append(d)
        for queue in queues:
            count = self._release_count(len(queue), waiting_tokens=waiting_tokens, steps_left=steps_left)
            new.extend(queue[:count])
            del queue[:count]
        placement = self._place(state.carried, new, last=steps_left == 1)
        return self._planned(state, arrivals, placement, tuple(tuple(q) for q in queues), placement.left)

    def _planned(
        self,
        state: PackerState,
        arrivals: Sequence[Document],
        placement: Placement,
        queues: tuple[tuple[Document, ...], ...],
        carried: tuple[Document, ...],
    ) -> tuple[StepPlan, PackerState]:
        after = PackerState(
            step=state.step + 1,
            drawn_tokens=state.drawn_tokens + total_tokens(arrivals),
            budget_tokens=state.budget_tokens + self.shape.budget_tokens,
            queues=queues,
            carried=carried,
        )
        plan = StepPlan(
            step=state.step,
            replicas=replicas_by_work(placement.filled, placement.work, self.shape.num_replicas),
            waiting=after.waiting,
        )
        return plan, after

    def _release_count(self, held: int, *, waiting_tokens: int, steps_left: int | None) -> int:
        per_step = self.shape.num_micro_batches
        if steps_left is not None and steps_left <= self._drain_steps(waiting_tokens):
            share = -(-held // steps_left)
            return min(held, -(-share // per_step) * per_step)
        return per_step if held >= per_step else 0

    def _drain_steps(self, waiting_tokens: int) -> int:
        """Steps over which what waits can be trained on top of each step's arrivals, using half of the spare room.

        The other half is left because documents do not pack without gaps.
        """
        spare_tokens = self.shape.num_micro_batches * (self.cap_tokens - self.shape.window_tokens)
        return max(1, -(-2 * waiting_tokens // spare_tokens))

    def _place(self, carried: Sequence[Document], new: Sequence[Document], *, last: bool) -> Placement:
        if last:
            return place_all(
                (*carried, *new),
                num_micro_batches=self.shape.num_micro_batches,
                num_replicas=self.shape.num_replicas,
                limit_tokens=self.cap_tokens - 1,
                work=self._work,
                fallback="shortest",
            )
        return place(
            [*carried, *longest_first(new)],
            num_micro_batches=self.shape.num_micro_batches,
            limit_tokens=self.cap_tokens - 1,
            work=self._work,
            fallback="shortest",
        )

    def _work(self, length: int) -> int:
        return document_work_ns(self.cost, length)
