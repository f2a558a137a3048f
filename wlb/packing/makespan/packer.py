"""Packing for the step: the plan whose predicted step is shortest, with the very documents that plain would train.

A step does not take as long as its largest micro-batch. More and smaller micro-batches shrink the pipeline's bubble, a
long document is hidden behind others or is not, replicas wait for the slowest: all of it is in the timing model of
`wlb.schedule`, and this packer asks that model. (Hydraulis, arXiv 2412.07894, chooses the number of micro-batches by
a closed form; DynaPipe, arXiv 2311.10418, orders micro-batches of unequal length.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from wlb.documents import Document, MicroBatch, StepPlan
from wlb.errors import ConfigError
from wlb.packing.caps import caps_of, require_caps
from wlb.packing.delay import Delay, HoldsBack
from wlb.packing.makespan.replica import Replica
from wlb.packing.makespan.search import BATCH, Search
from wlb.packing.makespan.sharded import ShardedChoice
from wlb.packing.makespan.start import HUGE, Starter
from wlb.packing.makespan.timer import NEVER, ReplicaTimer
from wlb.packing.makespan.work import StepWork, WorkTable
from wlb.packing.options import PackerOptions
from wlb.packing.packer import PackerState, StepShape
from wlb.packing.placement import require_fit
from wlb.packing.plain import next_fit
from wlb.schedule.model import PipelineModel
from wlb.sharding.division import Division
from wlb.sharding.micro_batch_cost import evenly_shared, sharded

_CLOSE = 1000  # stop within one in so many of a time that no plan can beat


@dataclass(frozen=True, kw_only=True)
class MakespanPacker(HoldsBack):
    """Chooses contents, number, replica and order of a step's micro-batches for the shortest predicted step.

    Without `delay` every document is trained in the step in which it arrives; with the stream cut those are the very
    pieces that plain trains in that step. Two caps are never exceeded:

    cap_tokens: of a micro-batch; None is one window.
    in_flight_tokens: whose activations the first stage holds at once; None is what the schedule holds for plain.

    pipeline: what the step's time is predicted with.
    search_evaluations: candidates that are timed after the start; None is about 20 ms worth. The search is
        deterministic, and more evaluations never give a slower plan. Up to 20,000 documents no plan is slower than
        plain's.
    equal_counts: every replica runs equally many micro-batches (expert parallelism hangs otherwise).
    count_multiple: a replica's micro-batches are a multiple of it, beyond what virtual stages ask.
    division: how context-parallel ranks divide a micro-batch; None is one rank. The step's time is then that of the
        slowest ranks, and no plan is slower than the one found without knowing the division, or than plain's, as far
        as shard_plans go.
    shard_plans: shard plans that may be made to find that time; see `ShardedChoice`.
    delay: which documents a step trains where long ones may wait; None where none may.
    """

    shape: StepShape
    pipeline: PipelineModel
    cap_tokens: int
    in_flight_tokens: int
    search_evaluations: int
    equal_counts: bool = False
    count_multiple: int = 1
    division: Division | None = None
    delay: Delay | None = None
    shard_plans: int = 0
    _tables: tuple[WorkTable, ...] = field(init=False, repr=False, compare=False)
    _timer: ReplicaTimer = field(init=False, repr=False, compare=False)

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
        if self.search_evaluations < 0:
            raise ConfigError(f"search_evaluations must be >= 0, got {self.search_evaluations}")
        if self.shard_plans < 0:
            raise ConfigError(f"shard_plans must be >= 0, got {self.shard_plans}")
        # With a division the search is made twice, with the estimate of divided work and with undivided work.
        pipelines = [self.pipeline, *([] if self.division is None else [evenly_shared(self.pipeline, self.division)])]
        object.__setattr__(self, "_tables", tuple(WorkTable(p) for p in reversed(pipelines)))
        timer = ReplicaTimer(self.pipeline, cap_tokens=self.cap_tokens, in_flight_tokens=self.in_flight_tokens)
        object.__setattr__(self, "_timer", timer)

    @classmethod
    def build(cls, options: PackerOptions) -> MakespanPacker:
        shape = options.shape
        pipeline = options.pipeline or PipelineModel(stretch_costs=(options.cost,))
        cap_tokens, in_flight_tokens = caps_of(options, pipeline)
        return cls(
            shape=shape,
            pipeline=pipeline,
            cap_tokens=cap_tokens,
            in_flight_tokens=in_flight_tokens,
            search_evaluations=(
                default_evaluations(shape, pipeline)
                if options.search_evaluations is None
                else options.search_evaluations
            ),
            equal_counts=options.equal_counts,
            count_multiple=options.count_multiple,
            division=options.division,
            delay=Delay.build(options),
            shard_plans=(
                default_shard_plans(shape, options.division) if options.shard_plans is None else options.shard_plans
            ),
        )

    def plan_step(
        self, state: PackerState, arrivals: Sequence[Document], *, steps_left: int | None = None
    ) -> tuple[StepPlan, PackerState]:
        require_fit(arrivals, limit_tokens=self.cap_tokens)
        documents, after = self.taken_in(state, arrivals, steps_left=steps_left)
        plan = StepPlan(
            step=state.step,
            replicas=tuple(tuple(MicroBatch(documents=m) for m in replica) for replica in self._place(documents)),
            waiting=after.waiting,
        )
        return plan, after

    def _place(self, documents: Sequence[Document]) -> list[list[tuple[Document, ...]]]:
        """Documents of each micro-batch of each replica."""
        work = self._tables[0].step_work(documents)
        chosen = [[sorted(m) for m in r.micro_batches] for r in self._replicas(work, documents)]
        if self.division is not None:
            undivided = self._tables[1].step_work(documents)
            choice = ShardedChoice(
                work,
                undivided,
                self._timer,
                sharded(self.pipeline, self.division),
                self.division,
                plans=self.shard_plans,
                takes=self._takes,
                free_counts=not self.equal_counts,
            )
            if choice.consider(chosen):
                if work.num_documents <= HUGE:
                    choice.consider([r.micro_batches for r in self._plain(work, documents)], keep_order=True)
                if choice.plans_left >= sum(map(len, chosen)):
                    choice.consider([r.micro_batches for r in self._replicas(undivided, documents)])
                choice.consider_alike(self.shape.micro_batches_per_replica)
                chosen = choice.run()
        return [[tuple(work.documents[d] for d in m) for m in replica] for replica in chosen]

    def _replicas(self, work: StepWork, documents: Sequence[Document]) -> list[Replica]:
        starter = Starter(
            work,
            self._timer,
            num_replicas=self.shape.num_replicas,
            num_stages=self.pipeline.shape.num_stages,
            per_replica=self.shape.micro_batches_per_replica,
            takes=self._takes,
            equal_counts=self.equal_counts,
        )
        members = starter.members()
        if members is None or work.num_documents <= HUGE:
            plain = self._plain(work, documents)
            if members is None or _slowest(plain) < _slowest([m[0] for m in members]):
                members = [[r] for r in plain]
        bound = self.lower_bound_ns(work)
        search = Search(
            members,
            self._timer,
            evaluations=self.search_evaluations,
            takes=(lambda _: False) if self.equal_counts else self._takes,
            close_to=bound + bound // _CLOSE,
        )
        return search.run()

    def lower_bound_ns(self, work: StepWork) -> int:
        """Nanoseconds that no plan can beat: the longest document's own path, and all work spread evenly."""
        if not work.num_documents:
            return 0
        stages = self.pipeline.shape.num_stages * self.shape.num_replicas
        return max(int(work.total.max()), int(work.total.sum()) // stages)

    def predicted_ns(self, documents: Sequence[Document]) -> tuple[int, int]:
        """Nanoseconds of the step in which these documents are placed, before shard plans, and of their work alone
        spread evenly over stages and replicas."""
        work = self._tables[0].step_work(documents)
        stages = self.pipeline.shape.num_stages * self.shape.num_replicas
        return _slowest(self._replicas(work, documents)), int(work.total.sum()) // stages

    def _plain(self, work: StepWork, documents: Sequence[Document]) -> list[Replica]:
        """What plain would do, in as many micro-batches as it takes to keep both caps."""
        column = {d.doc_id: i for i, d in enumerate(work.documents)}
        packs = [[column[d.doc_id] for d in p] for p in next_fit(documents, window_tokens=self.cap_tokens)]
        num_replicas = self.shape.num_replicas
        gap = 0
        while True:
            # Documents that were not cut for this can need more in flight than plain would. Micro-batches without
            # documents between theirs then keep the first stage within its cap.
            groups = [[*([[]] * gap * (i >= num_replicas)), p] for i, p in enumerate(packs)]
            dealt = [[m for group in groups[r::num_replicas] for m in group] for r in range(num_replicas)]
            count = max(1, *(len(d) for d in dealt))
            while not self._takes(count):
                count += 1
            replicas = [Replica.timed(work, [*d, *([[]] * (count - len(d)))], self._timer) for d in dealt]
            if _slowest(replicas) < NEVER:
                return replicas
            gap += 1

    def _takes(self, count: int) -> bool:
        return count % self.count_multiple == 0 and self.pipeline.shape.takes(count)


def default_evaluations(shape: StepShape, pipeline: PipelineModel) -> int:
    """Candidates that about 20 ms of one core time: a batch costs 0.25 ms and more the larger the pipeline is."""
    passes = pipeline.shape.num_virtual_stages * shape.micro_batches_per_replica
    return BATCH * max(4, round(20 / (0.25 + 0.0025 * passes)))


def default_shard_plans(shape: StepShape, division: Division | None) -> int:
    """Shard plans that about 120 ms of one core make for a step of 4 micro-batches: more for a step of more."""
    if division is None:
        return 0
    return round(division.quick_plans * min(max(1.0, shape.num_micro_batches / 4), 8))


def _slowest(replicas: Sequence[Replica]) -> int:
    return max(r.time for r in replicas)
