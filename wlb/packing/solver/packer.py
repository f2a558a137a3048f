"""The solver as a packer: what WLB-LLM (arXiv 2503.17924, section 4.1) measures its fast packers against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from wlb.cost.model import CostModel, document_work_ns
from wlb.documents import Document, StepPlan, total_tokens
from wlb.errors import ConfigError
from wlb.packing.dealing import replicas_by_work
from wlb.packing.options import DEFAULT_SOLVER_SECONDS, PackerOptions
from wlb.packing.packer import PackerState, StepShape
from wlb.packing.placement import longest_first, place_all, require_fit
from wlb.packing.solver.model import Filled, require_solver
from wlb.packing.solver.optimal import optimal, place_most, quick_placing

_TOLERANCE = 1e-3  # of work, and of a step's tokens


@dataclass(frozen=True, kw_only=True)
class SolverPacker:
    """The least largest micro-batch of each step, within 0.1 %, or the best that was found in the time given.

    lengths: "variable" compares predicted work under a cap of `cap_windows`; "fixed" compares sum d^2 under a cap of
        one window.
    cap_windows: most tokens of a micro-batch over the window, >= 1; 1 with "fixed".
    seconds: to search in a step, counted in the solver's operations, so that every rank finds the same plan.

    Nothing is delayed. What does not fit a step is carried, as few tokens as the solver can leave: documents carried
    already before new ones. A step draws its token budget less what was carried, or drawn beyond it
    before. The last step places everything, in more micro-batches where the cap demands it.
    """

    shape: StepShape
    cost: CostModel
    lengths: Literal["variable", "fixed"] = "variable"
    cap_windows: float = 1.5
    seconds: float = DEFAULT_SOLVER_SECONDS

    natural_cut: ClassVar[Literal["stream", "window"]] = "window"
    state_fields: ClassVar[tuple[str, ...]] = ()
    free_counts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.lengths not in ("variable", "fixed"):
            raise ConfigError(f"lengths must be variable or fixed, got {self.lengths!r}")
        if not 1 <= self.cap_windows < float("inf"):
            raise ConfigError(f"cap_windows must be >= 1, got {self.cap_windows}")
        if self.lengths == "fixed" and self.cap_windows != 1:
            raise ConfigError(f"cap_windows must be 1 where lengths are fixed, got {self.cap_windows}")
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"seconds must be finite and > 0, got {self.seconds}")
        require_solver()

    @classmethod
    def build(cls, options: PackerOptions) -> SolverPacker:
        own_cap = cls.cap_windows if options.solver_lengths == "variable" else 1.0
        return cls(
            shape=options.shape,
            cost=options.rank_cost,
            lengths=options.solver_lengths,
            cap_windows=own_cap if options.cap_windows is None else options.cap_windows,
            seconds=options.solver_seconds,
        )

    @property
    def cap_tokens(self) -> int:
        return int(self.cap_windows * self.shape.window_tokens)

    @property
    def thresholds_tokens(self) -> tuple[int, ...]:
        return ()

    def initial_state(self) -> PackerState:
        return PackerState()

    def wanted_tokens(
        self, state: PackerState, arrivals: Sequence[Document] = (), *, steps_left: int | None = None
    ) -> int:
        # Documents come whole: what was drawn beyond the budget is drawn less now. Nor more than what is carried
        # leaves room for, or at a cap of one window that would grow from step to step.
        ahead_tokens = max(total_tokens(state.carried), state.drawn_tokens - state.budget_tokens)
        return self.shape.budget_tokens - ahead_tokens - total_tokens(arrivals)

    def plan_step(
        self, state: PackerState, arrivals: Sequence[Document], *, steps_left: int | None = None
    ) -> tuple[StepPlan, PackerState]:
        require_fit(arrivals, limit_tokens=self.cap_tokens)
        start, seconds = self._start(state.carried, arrivals, last=steps_left == 1)
        placed = {d.doc_id for held in start for d in held}
        carried = tuple(d for d in (*state.carried, *longest_first(arrivals)) if d.doc_id not in placed)
        solution = optimal(
            [d for held in start for d in held],
            num_micro_batches=len(start),
            limit_tokens=self.cap_tokens,
            work=self._work,
            seconds=seconds,
            tolerance=_TOLERANCE,
            start=start,
        )
        work = [sum(self._work(d.length) for d in held) for held in solution.filled]
        plan = StepPlan(
            step=state.step,
            replicas=replicas_by_work(solution.filled, work, self.shape.num_replicas),
            waiting=carried,
        )
        return plan, PackerState(
            step=state.step + 1,
            drawn_tokens=state.drawn_tokens + total_tokens(arrivals),
            budget_tokens=state.budget_tokens + self.shape.budget_tokens,
            carried=carried,
        )

    def _start(self, carried: Sequence[Document], arrivals: Sequence[Document], *, last: bool) -> tuple[Filled, float]:
        """A placing of the documents that this step trains, and the seconds left to improve it."""
        start, left = quick_placing(
            carried, arrivals, self.shape.num_micro_batches, limit_tokens=self.cap_tokens, work=self._work
        )
        if not left:
            return start, self.seconds
        if last:
            placement = place_all(
                (*carried, *arrivals),
                num_micro_batches=self.shape.num_micro_batches,
                num_replicas=self.shape.num_replicas,
                limit_tokens=self.cap_tokens,
                work=self._work,
                fallback="any",
            )
            return placement.filled, self.seconds
        waited = {d.doc_id for d in carried}
        most = place_most(
            start,
            left,
            required=frozenset(d.doc_id for held in start for d in held if d.doc_id in waited),
            limit_tokens=self.cap_tokens,
            seconds=self.seconds / 2,
            tolerance_tokens=int(_TOLERANCE * self.shape.budget_tokens),
        )
        return most, self.seconds / 2

    def _work(self, length: int) -> int:
        return length * length if self.lengths == "fixed" else document_work_ns(self.cost, length)
