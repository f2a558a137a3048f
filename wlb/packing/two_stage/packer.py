"""Two-stage assignment after Hydraulis (arXiv 2412.07894): replicas first, then micro-batches inside each.

Where `makespan` asks the timing model of `wlb.schedule`, this packer goes by the paper's closed forms: a replica takes
its total work and the warm-up behind its longest document, a pipeline of v micro-batches as long as if all were as
large as the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from wlb.documents import Document, MicroBatch, StepPlan
from wlb.errors import ConfigError
from wlb.packing.caps import caps_of, require_caps
from wlb.packing.delay import Delay, HoldsBack
from wlb.packing.makespan.timer import ReplicaTimer
from wlb.packing.makespan.work import WorkTable
from wlb.packing.options import PackerOptions
from wlb.packing.packer import PackerState, StepShape
from wlb.packing.placement import require_fit
from wlb.packing.two_stage.dispatch import dispatch
from wlb.packing.two_stage.fill import ClosedForm, Filler
from wlb.schedule.model import PipelineModel
from wlb.sharding.division import Division
from wlb.sharding.micro_batch_cost import evenly_shared

RESTARTS = 50
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class TwoStagePacker(HoldsBack):
    """Every document in the step in which it arrives, unless `delay` holds it back, by Hydraulis' two stages.

    The caps are those of `makespan`.

    1. Documents go to replicas for a small max of total work + (stages - 1) x longest document's work: greedily,
       longest first and in `restarts` random orders drawn from `seed`.
    2. Inside a replica they are placed in v micro-batches for up to 20 v; the v with the least (largest micro-batch +
       fixed cost)(stages - 1 + v) is taken.

    cap_tokens: of a micro-batch. in_flight_tokens: whose activations the first stage holds at once.
    pipeline: what documents and micro-batches take, and the number of stages.
    equal_counts: every replica runs equally many micro-batches (expert parallelism hangs otherwise).
    count_multiple: a replica's micro-batches are a multiple of it, beyond what virtual stages ask.
    division: how context-parallel ranks divide a micro-batch; work is then what it would be if all were equally
        busy. None is one rank.
    delay: which documents a step trains where long ones may wait; None where none may.
    """

    shape: StepShape
    pipeline: PipelineModel
    cap_tokens: int
    in_flight_tokens: int
    restarts: int = RESTARTS
    seed: int = 0
    equal_counts: bool = False
    count_multiple: int = 1
    division: Division | None = None
    delay: Delay | None = None
    _table: WorkTable = field(init=False, repr=False, compare=False)
    _timer: ReplicaTimer = field(init=False, repr=False, compare=False)
    _form: ClosedForm = field(init=False, repr=False, compare=False)

    natural_cut: ClassVar[Literal["stream", "window"]] = "stream"
    state_fields: ClassVar[tuple[str, ...]] = ("thresholds_tokens",)
    free_counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_caps(
            self.shape,
            self.pipeline,
            cap_tokens=self.cap_tokens,
            in_flight_tokens=self.in_flight_tokens,
            count_multiple=self.count_multiple,
            takes=self._takes,
        )
        if self.restarts < 0:
            raise ConfigError(f"restarts must be >= 0, got {self.restarts}")
        if self.seed < 0:
            raise ConfigError(f"seed must be >= 0, got {self.seed}")
        # Additive: what a divided micro-batch takes exactly is no sum over its documents (see docs/packing.md).
        rank = self.pipeline if self.division is None else evenly_shared(self.pipeline, self.division)
        timer = ReplicaTimer(rank, cap_tokens=self.cap_tokens, in_flight_tokens=self.in_flight_tokens)
        overhead_s = sum(rank.forward_s(())) + sum(rank.backward_s(()))
        form = ClosedForm(num_stages=rank.shape.num_stages, overhead=round(overhead_s * _NS_PER_S))
        object.__setattr__(self, "_table", WorkTable(rank))
        object.__setattr__(self, "_timer", timer)
        object.__setattr__(self, "_form", form)

    @classmethod
    def build(cls, options: PackerOptions) -> TwoStagePacker:
        shape = options.shape
        pipeline = options.pipeline or PipelineModel(stretch_costs=(options.cost,))
        cap_tokens, in_flight_tokens = caps_of(options, pipeline)
        return cls(
            shape=shape,
            pipeline=pipeline,
            cap_tokens=cap_tokens,
            in_flight_tokens=in_flight_tokens,
            equal_counts=options.equal_counts,
            count_multiple=options.count_multiple,
            division=options.division,
            delay=Delay.build(options),
        )

    def plan_step(
        self, state: PackerState, arrivals: Sequence[Document], *, steps_left: int | None = None
    ) -> tuple[StepPlan, PackerState]:
        require_fit(arrivals, limit_tokens=self.cap_tokens)
        documents, after = self.taken_in(state, arrivals, steps_left=steps_left)
        plan = StepPlan(step=state.step, replicas=self.replicas(documents), waiting=after.waiting)
        return plan, after

    def replicas(self, documents: Sequence[Document]) -> tuple[tuple[MicroBatch, ...], ...]:
        """All of the documents, none longer than cap_tokens, as micro-batches of each replica in pipeline order."""
        work = self._table.step_work(documents)
        parts = dispatch(
            work.total,
            self.shape.num_replicas,
            num_stages=self._form.num_stages,
            restarts=self.restarts,
            seed=self.seed,
        )
        filler = Filler(work, self._timer, self._form, takes=self._takes)
        filled = filler.fill(parts) if self.equal_counts else [filler.fill([part])[0] for part in parts]
        return tuple(
            tuple(MicroBatch(documents=tuple(work.documents[d] for d in sorted(m))) for m in micro_batches)
            for micro_batches in filled
        )

    def _takes(self, count: int) -> bool:
        return count % self.count_multiple == 0 and self.pipeline.shape.takes(count)
