"""One replica's micro-batches while they are being improved.

R rows of `work`, N micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wlb.packing.makespan.timer import ReplicaTimer
from wlb.packing.makespan.work import Int64, StepWork


class Replica:
    """Documents (columns of `StepWork`) of each micro-batch in pipeline order, with what they take.

    micro_batches: N lists. durations: (R, N). tokens: (N,). time: nanoseconds of the replica's step.
    share: (N,) of `ReplicaTimer.critical_share`; None where it has to be found anew.
    """

    def __init__(self, work: StepWork, micro_batches: Sequence[Sequence[int]], time: int) -> None:
        self.work = work
        self.micro_batches = [list(m) for m in micro_batches]
        self.durations, self.tokens = sums(work, self.micro_batches)
        self.time = time
        self.share: Int64 | None = None

    @classmethod
    def timed(cls, work: StepWork, micro_batches: Sequence[Sequence[int]], timer: ReplicaTimer) -> Replica:
        replica = cls(work, micro_batches, 0)
        replica.time = int(timer.times(replica.durations[:, :, None], replica.tokens[:, None])[0])
        return replica

    def copy(self) -> Replica:
        """Its micro-batches may be changed and this one's stay."""
        copy = Replica(self.work, self.micro_batches, self.time)
        copy.durations, copy.tokens = self.durations.copy(), self.tokens.copy()
        return copy

    @property
    def count(self) -> int:
        return len(self.micro_batches)

    def critical_share(self, timer: ReplicaTimer) -> Int64:
        if self.share is None:
            self.share = timer.critical_share(self.durations)
        return self.share

    def documents(self) -> list[int]:
        """Longest first."""
        return sorted(d for m in self.micro_batches for d in m)

    def reorder(self, order: Sequence[int]) -> None:
        """Micro-batch order[i] becomes micro-batch i."""
        self.micro_batches = [self.micro_batches[i] for i in order]
        self.durations, self.tokens = self.durations[:, order], self.tokens[list(order)]
        self.share = None


def sums(work: StepWork, micro_batches: Sequence[Sequence[int]]) -> tuple[Int64, Int64]:
    """(R, N) durations and (N,) tokens of micro-batches."""
    flat = np.array([d for m in micro_batches for d in m], dtype=np.intp)
    owner = np.repeat(np.arange(len(micro_batches)), [len(m) for m in micro_batches])
    durations = np.repeat(work.fixed[:, None], len(micro_batches), axis=1)
    tokens = np.zeros(len(micro_batches), dtype=np.int64)
    np.add.at(tokens, owner, work.tokens[flat])
    for row, add in zip(durations, work.rows[:, flat], strict=True):
        np.add.at(row, owner, add)
    return durations, tokens
