"""A step as lanes of passes, one lane a rank: what was measured, and what the model says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wlb.report.measured import MeasuredStep
from wlb.report.prediction import StepModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One rank's row: its name, and (kind, micro-batch, start, stop) of each pass, seconds from the step's start."""

    name: str
    passes: tuple[tuple[str, int, float, float], ...]

    @property
    def busy_s(self) -> float:
        return sum(stop - start for _, _, start, stop in self.passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLanes:
    """Lanes of all ranks and the seconds at which the last pass ends."""

    lanes: tuple[Lane, ...]

    @property
    def end_s(self) -> float:
        return max(stop for lane in self.lanes for _, _, _, stop in lane.passes)

    @property
    def waiting_share(self) -> float:
        """Share of all lanes' seconds up to `end_s` that no pass fills."""
        return 1 - sum(lane.busy_s for lane in self.lanes) / (self.end_s * len(self.lanes))


def measured_lanes(step: MeasuredStep) -> StepLanes:
    """What the ranks did, from the first rank's start."""
    return StepLanes(
        lanes=tuple(
            Lane(
                name=_rank_name(step, i),
                passes=tuple(
                    (kind, k, start - step.begin_s, stop - step.begin_s)
                    for kind, passes in (("forward", rank.forward), ("backward", rank.backward))
                    for k, (start, stop) in enumerate(passes)
                ),
            )
            for i, rank in enumerate(step.ranks)
        )
    )


def predicted_lanes(step: MeasuredStep, model: StepModel) -> StepLanes:
    """What the model says that the same ranks do."""
    timeline = model.timeline(step)
    replica_of = {dp_rank: i for i, dp_rank in enumerate(sorted({r.dp_rank for r in step.ranks}))}
    return StepLanes(
        lanes=tuple(
            Lane(
                name=_rank_name(step, i),
                passes=tuple(
                    (p.kind, p.micro_batch, p.start_s, p.end_s)
                    for p in timeline.replicas[replica_of[rank.dp_rank]].stages[rank.pp_rank]
                ),
            )
            for i, rank in enumerate(step.ranks)
        )
    )


def _rank_name(step: MeasuredStep, i: int) -> str:
    rank = step.ranks[i]
    return f"rank {rank.rank}\n{''.join(_places(step, i))}"


def _places(step: MeasuredStep, i: int) -> Iterator[str]:
    """In what the rank differs from others."""
    rank = step.ranks[i]
    if step.num_stages > 1:
        yield f"stage {rank.pp_rank + 1}"
    if len({r.dp_rank for r in step.ranks}) > 1:
        yield f"{', ' if step.num_stages > 1 else ''}replica {rank.dp_rank + 1}"
