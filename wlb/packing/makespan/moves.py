"""Many small changes of a plan at once: runs of documents that change places between two micro-batches.

A micro-batch's documents are a list, and a move takes a run of neighbours from it, in exchange for a shorter or
no run of another micro-batch. Prefix sums over the lists give what any run weighs, so a whole batch of moves is
a few numpy operations. C moves of a batch, N micro-batches, R rows of `work`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb.packing.makespan.replica import Replica
from wlb.packing.makespan.work import Int64

_Runs = tuple[Int64, Int64]  # (C,) first document in the flat list, and number of documents


class Draws:
    """Random whole numbers that are the same on every machine and with every numpy: the raw bits of PCG64."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def below(self, limits: Int64 | int, count: int) -> Int64:
        """(count,) numbers, each in [0, its limit); limits > 0."""
        raw = (self._bits.random_raw(count) >> np.uint64(1)).astype(np.int64)
        numbers: Int64 = raw % np.asarray(limits, dtype=np.int64)
        return numbers

    def weighted(self, weights: Int64, count: int) -> Int64:
        """(count,) indices, each drawn in proportion to its weight; some weight > 0."""
        edges = np.cumsum(weights)
        return np.searchsorted(edges, self.below(int(edges[-1]), count), side="right").astype(np.int64)


class _FlatReplica:
    """A replica's documents in one list, with prefix sums of their columns."""

    def __init__(self, replica: Replica) -> None:
        self.sizes = np.array([len(m) for m in replica.micro_batches], dtype=np.int64)
        self.begins = np.cumsum(self.sizes) - self.sizes
        flat = np.array([d for m in replica.micro_batches for d in m], dtype=np.intp)
        work = replica.work
        columns = np.vstack([work.rows, work.tokens, work.total])[:, flat]
        self._prefix = np.zeros((len(columns), len(flat) + 1), dtype=np.int64)
        np.cumsum(columns, axis=1, out=self._prefix[:, 1:])

    def runs(self, micro_batch: Int64, widths: Int64, draws: Draws) -> _Runs:
        widths = np.minimum(widths, self.sizes[micro_batch])
        return self.begins[micro_batch] + draws.below(self.sizes[micro_batch] - widths + 1, len(widths)), widths

    def weigh(self, runs: _Runs) -> Int64:
        """(R + 2, C) what the runs add to a micro-batch: rows, tokens, total work."""
        first, widths = runs
        weight: Int64 = self._prefix[:, first + widths] - self._prefix[:, first]
        return weight


@dataclass(frozen=True, kw_only=True)
class Moves:
    """C moves from micro-batches of one replica to micro-batches of another, or of the same one.

    source, target: (C,) micro-batches. there, back: first and number of the documents that go and come, from the
    micro-batch's beginning. delta: (R + 2, C) what target gains and source loses: rows, tokens, total work.
    legal: (C,) whether the move takes work along and leaves no micro-batch without documents.
    """

    source: Int64
    target: Int64
    there: _Runs
    back: _Runs
    delta: Int64
    legal: NDArray[np.bool_]

    @classmethod
    def draw(
        cls, giving: Replica, taking: Replica, weights: tuple[Int64, Int64], draws: Draws, *, widths: Int64, count: int
    ) -> Moves:
        """`count` random moves.

        weights: (N,) of both replicas, how often a micro-batch is to give or to take. widths: lengths of runs to
        choose from.
        """
        from_flat = _FlatReplica(giving)
        to_flat = from_flat if taking is giving else _FlatReplica(taking)
        source = draws.weighted(weights[0], count)
        target = draws.weighted(weights[1], count)
        there = from_flat.runs(source, widths[draws.below(len(widths), count)], draws)
        swaps = np.arange(count) % 2  # every other move brings something back
        back = to_flat.runs(target, swaps * widths[draws.below(len(widths), count)], draws)
        delta = from_flat.weigh(there) - to_flat.weigh(back)
        legal = (delta[-1] > 0) & (from_flat.sizes[source] + back[1] > there[1])
        if taking is giving:
            legal &= source != target
        return cls(
            source=source,
            target=target,
            there=(there[0] - from_flat.begins[source], there[1]),
            back=(back[0] - to_flat.begins[target], back[1]),
            delta=delta,
            legal=legal,
        )

    def candidates(self, replica: Replica, num: int, *, gives: bool, takes: bool) -> tuple[Int64, Int64]:
        """(R, N, num) durations and (N, num) tokens of `replica` after each of the first moves alone."""
        durations = np.repeat(replica.durations[:, :, None], num, axis=2)
        tokens = np.repeat(replica.tokens[:, None], num, axis=1)
        each, delta = np.arange(num), self.delta[:, :num]
        for micro_batch, sign, applies in ((self.source, -1, gives), (self.target, 1, takes)):
            if applies:
                durations[:, micro_batch[:num], each] += sign * delta[:-2]
                tokens[micro_batch[:num], each] += sign * delta[-2]
        return durations, tokens

    def together(self, replica: Replica, chosen: list[int]) -> tuple[Int64, Int64]:
        """Durations and tokens after the first two of `chosen`, after the first three, and so on; moves within
        `replica` that share no micro-batch."""
        num = len(chosen) - 1
        durations = np.repeat(replica.durations[:, :, None], num, axis=2)
        tokens = np.repeat(replica.tokens[:, None], num, axis=1)
        for i, k in enumerate(chosen):
            begin = max(0, i - 1)
            for micro_batch, sign in ((self.source[k], -1), (self.target[k], 1)):
                durations[:, micro_batch, begin:] += sign * self.delta[:-2, k, None]
                tokens[micro_batch, begin:] += sign * self.delta[-2, k]
        return durations, tokens

    def apply(self, k: int, giving: Replica, taking: Replica) -> None:
        """Make move k; both replicas' times are then out of date."""
        i, j = int(self.source[k]), int(self.target[k])
        first, last = int(self.there[0][k]), int(self.there[0][k] + self.there[1][k])
        back_first, back_last = int(self.back[0][k]), int(self.back[0][k] + self.back[1][k])
        source, target = giving.micro_batches[i], taking.micro_batches[j]
        goes, comes = source[first:last], target[back_first:back_last]
        source[first:last] = comes
        target[back_first:back_last] = goes
        giving.durations[:, i] -= self.delta[:-2, k]
        giving.tokens[i] -= self.delta[-2, k]
        taking.durations[:, j] += self.delta[:-2, k]
        taking.tokens[j] += self.delta[-2, k]
        giving.share = taking.share = None
