"""Reads the time line that `--wlb-timeline` writes: when each rank ran each micro-batch.

One file a rank, one JSON line a step, all ranks of a machine on one clock. The k-th forward and the k-th backward of a
rank's step are of micro-batch k, because without virtual stages 1F1B runs both in the plan's order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wlb.documents import MicroBatch, StepPlan, documents_from_lengths
from wlb.errors import DataError

_FORWARD, _BACKWARD = "forward-compute", "backward-compute"

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """What one rank did in one step; times in seconds on the machine's clock.

    lengths: documents of each micro-batch of its replica. forward, backward: (start, stop) of each of them.
    """

    rank: int
    pp_rank: int
    dp_rank: int
    begin_s: float
    end_s: float
    lengths: tuple[tuple[int, ...], ...]
    forward: tuple[Interval, ...]
    backward: tuple[Interval, ...]

    @property
    def busy_s(self) -> float:
        """Seconds in passes."""
        return sum(stop - start for start, stop in (*self.forward, *self.backward))


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One step on all ranks, in rank order."""

    step: int
    ranks: tuple[RankStep, ...]

    @cached_property
    def plan(self) -> StepPlan:
        """What was trained, as far as lengths say it."""
        lengths = {r.dp_rank: r.lengths for r in self.ranks}
        return StepPlan(
            step=self.step,
            replicas=tuple(
                tuple(MicroBatch(documents=documents_from_lengths(m)) for m in lengths[dp_rank])
                for dp_rank in sorted(lengths)
            ),
            waiting=(),
        )

    @property
    def begin_s(self) -> float:
        return min(r.begin_s for r in self.ranks)

    @property
    def end_s(self) -> float:
        return max(r.end_s for r in self.ranks)

    @property
    def num_stages(self) -> int:
        return 1 + max(r.pp_rank for r in self.ranks)

    def passes_s(self, pp_rank: int) -> list[tuple[tuple[int, ...], float, float]]:
        """(lengths, forward seconds, backward seconds) of every micro-batch of all replicas on one stage.

        Ranks that share a micro-batch (tensor and context parallelism) wait for each other: seconds count from the
        last one's start to the last one's end, so that those of passes in a row add up to what they took together.
        """
        ranks: dict[int, list[RankStep]] = {}
        for r in self.ranks:
            if r.pp_rank == pp_rank:
                ranks.setdefault(r.dp_rank, []).append(r)
        return [
            (lengths, _together_s(r.forward[k] for r in sharing), _together_s(r.backward[k] for r in sharing))
            for dp_rank, sharing in sorted(ranks.items())
            for k, lengths in enumerate(sharing[0].lengths)
        ]


def _together_s(passes: Iterable[Interval]) -> float:
    starts, stops = zip(*passes, strict=True)
    return float(max(stops) - max(starts))


def load_timeline(folder: Path) -> tuple[MeasuredStep, ...]:
    """Every step that all ranks finished.

    Raises DataError naming the file and the line if one cannot be read, or if ranks report different steps.
    """
    files = sorted(folder.glob("rank*.jsonl"))
    if not files:
        raise DataError(f"time line {folder}: must hold a file rank000.jsonl or more, got none")
    ranks = [_load_rank(path) for path in files]
    steps = sorted(ranks[0])
    for path, rank in zip(files, ranks, strict=True):
        if sorted(rank) != steps:
            raise DataError(
                f"time line {path}: must hold the same steps as {files[0].name} ({len(steps)}), got {len(rank)}"
            )
    return tuple(MeasuredStep(step=step, ranks=tuple(rank[step] for rank in ranks)) for step in steps)


def _load_rank(path: Path) -> dict[int, RankStep]:
    steps: dict[int, RankStep] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"time line {path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            step, rank_step = row["step"], _rank_step(row)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"time line {path}: line {number} must be a step's record, got {error!r}") from error
        if step in steps:
            raise DataError(f"time line {path}: line {number} repeats step {step}; was the folder used by two runs?")
        steps[step] = rank_step
    return steps


def _rank_step(row: dict[str, Any]) -> RankStep:
    events: dict[str, list[Interval]] = {_FORWARD: [], _BACKWARD: []}
    for name, start_s, stop_s in row["events"]:
        if name in events:
            events[name].append((start_s, stop_s))
    lengths = tuple(tuple(m) for m in row["lengths"])
    for name, passes in events.items():
        if len(passes) != len(lengths):
            raise ValueError(f"{len(passes)} events {name} for {len(lengths)} micro-batches")
    return RankStep(
        rank=row["rank"],
        pp_rank=row["pp_rank"],
        dp_rank=row["dp_rank"],
        begin_s=row["begin_s"],
        end_s=row["end_s"],
        lengths=lengths,
        forward=tuple(events[_FORWARD]),
        backward=tuple(events[_BACKWARD]),
    )
