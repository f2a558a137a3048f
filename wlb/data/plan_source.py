"""Where planned steps come from: what a planner is built from, and one that plans in this process.

The one that plans in a process beside this one is `plan_process.ProcessSource`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from wlb.cost.model import CostModel
from wlb.data.planned_step import PlannedStep, document_table, statistics_of
from wlb.data.planner import StepPlanner, ledger_line
from wlb.data.sharded_step import shard_statistics, shard_step
from wlb.data.source import DocumentRows
from wlb.data.stream import DocumentCut, DocumentStream
from wlb.packing.options import PackerOptions
from wlb.packing.registry import build_packer
from wlb.sharding import Sharding
from wlb.sharding.index import IndexKind, prepare


@dataclass(frozen=True, kw_only=True)
class PlannerSpec:
    """Everything from which a planner of one rank is built, in any process.

    rows: the sequences of the split, one entry a data set of the blend.
    packer, options: see `wlb.packing.build_packer`.
    ramp: (first step, micro-batches of a replica) while the batch size still grows; see `StepPlanner`.
    num_steps: see `StepPlanner`.
    replica: data-parallel rank whose micro-batches are wanted.
    sharding: how context-parallel ranks divide each micro-batch. cp_rank: the one whose indexes are made.
    index_uses: communication type and window of each kind of attention layer; see `wlb.sharding.index.prepare`.
    cost: for the statistics.
    pad_to_multiple: tokens to which the tail of a micro-batch is padded.
    keeps_ledger: make a ledger line of every step.
    restored: a state of `StepPlanner.state`, or None at the beginning.
    kept_steps: see `StepPlanner`; more than the steps planned ahead.
    """

    rows: tuple[DocumentRows, ...]
    window_tokens: int
    cut: DocumentCut
    seed: int
    packer: str
    options: PackerOptions
    num_steps: int | None
    replica: int
    cost: CostModel
    pad_to_multiple: int
    sharding: Sharding = field(default_factory=Sharding)
    cp_rank: int = 0
    index_uses: tuple[tuple[IndexKind, int | None], ...] = ()
    keeps_ledger: bool = False
    restored: dict[str, Any] | None = None
    ramp: tuple[tuple[int, int], ...] = ()
    kept_steps: int = 2

    def build(self, clock: Callable[[], float] = time.perf_counter) -> StepPlanner:
        """Raises StateError if `restored` is of other data or of another configuration."""
        planner = StepPlanner(
            stream=DocumentStream(
                [r.source() for r in self.rows], window_tokens=self.window_tokens, cut=self.cut, seed=self.seed
            ),
            packer=build_packer(self.packer, self.options),
            ramp=[(first, build_packer(self.packer, self._options_of(count))) for first, count in self.ramp],
            num_steps=self.num_steps,
            # Packers of a fixed count run more only in a last step, and do not know which counts virtual stages take.
            takes=lambda count: self.options.pipeline is None or self.options.pipeline.shape.takes(count),
            clock=clock,
            kept_steps=self.kept_steps,
        )
        if self.restored is not None:
            planner.restore(self.restored)
        return planner

    def _options_of(self, micro_batches_per_replica: int) -> PackerOptions:
        shape = replace(self.options.shape, micro_batches_per_replica=micro_batches_per_replica)
        return replace(self.options, shape=shape)

    def plan(self, planner: StepPlanner) -> PlannedStep:
        """The planner's next step, as this rank needs it."""
        plan = planner.next_step()
        micro_batches = plan.replicas[self.replica]
        begin_s = time.perf_counter()
        # What the packer has planned already to compare micro-batches is remembered there.
        sharding = self.options.division or self.sharding
        shard_plans = shard_step(micro_batches, sharding, pad_to_multiple=self.pad_to_multiple)
        for shard_plan in shard_plans:
            prepare(shard_plan, self.cp_rank, self.index_uses)
        shard_s = time.perf_counter() - begin_s
        return PlannedStep(
            step=plan.step,
            micro_batches=micro_batches,
            shard_plans=shard_plans,
            fingerprint=plan.fingerprint,
            document_table=document_table(plan),
            statistics=statistics_of(plan, self.cost, pad_to_multiple=self.pad_to_multiple),
            shard_statistics=shard_statistics(shard_plans, self.sharding.costs),
            counters=planner.counters,
            plan_s=planner.plan_s(plan.step) + shard_s,
            ledger_line=ledger_line(plan) if self.keeps_ledger else "",
        )


class PlanSource(Protocol):
    """Planned steps in order."""

    def next_step(self) -> PlannedStep:
        """The next step of the run."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able; from it the step after the last one that `next_step` gave is planned."""
        ...

    def close(self) -> None:
        """Give back what the source holds; it gives no further step."""
        ...


class InlineSource:
    """Plans when asked, in this process."""

    def __init__(self, spec: PlannerSpec) -> None:
        self._spec = spec
        self._planner = spec.build()

    def next_step(self) -> PlannedStep:
        return self._spec.plan(self._planner)

    def state(self) -> dict[str, Any]:
        return self._planner.state()

    def close(self) -> None:
        return None
