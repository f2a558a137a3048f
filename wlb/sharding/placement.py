"""A placement: which documents stay whole and where, and which are cut; and the search among similar placements."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from wlb.sharding.gaps import Gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What is decided before documents are cut.

    gaps: with the whole documents in place, nothing cut. Not to be changed.
    cut: documents to cut.
    leveller: a document that is cut first, to level tiles; None for none.
    """

    gaps: Gaps
    cut: tuple[int, ...]
    leveller: int | None

    def finished(self, limit_pairs: int | None) -> Gaps | None:
        """All documents placed; None if the price reaches the limit."""
        if limit_pairs is not None and self.gaps.slowest_pairs() >= limit_pairs:
            return None
        gaps = self.gaps.copy()
        if self.leveller is not None:
            gaps.level_tiles(self.leveller)
        return gaps if gaps.fill(self.cut, limit_pairs) else None

    @property
    def whole(self) -> list[int]:
        """Documents that are not cut."""
        return [d for d, rank in enumerate(self.gaps.holder) if rank >= 0]


def improved(placement: Placement, finished: Gaps, num_trials: int) -> Gaps:
    """The best of `num_trials` small changes, each kept if the plan gets faster by it.

    A change moves a whole document, lets two change ranks, cuts one, or keeps a cut one whole. Which are tried is
    drawn from the raw bits of a generator with a fixed seed: the same on every rank.

    finished: `placement` with documents cut.
    """
    draw = random.Random(0).getrandbits
    pairs = finished.slowest_pairs()
    whole = placement.whole
    for _ in range(num_trials):
        trial = _changed(placement, whole, draw(4), draw(30), draw(30))
        better = trial.finished(pairs) if trial is not None else None
        if trial is not None and better is not None:
            placement, finished, pairs = trial, better, better.slowest_pairs()
            whole = placement.whole
    return finished


def _changed(placement: Placement, whole: Sequence[int], kind: int, one: int, other: int) -> Placement | None:
    """A copy with one change, of 16 kinds 7 moves, 7 exchanges, a cut and a cut undone; None if impossible."""
    gaps = placement.gaps.copy()
    num_ranks = len(gaps.room)
    cut = placement.cut
    if kind == 15:
        if not cut:
            return None
        document = cut[one % len(cut)]
        gaps.hold_whole(other % num_ranks, document)
        cut = tuple(d for d in cut if d != document)
    elif not whole:
        return None
    else:
        document = whole[one % len(whole)]
        rank = gaps.holder[document]
        gaps.let_go(document)
        if kind == 14:
            cut = (*cut, document)
        elif kind < 7:
            gaps.hold_whole(other % num_ranks, document)
        else:
            partner = whole[other % len(whole)]
            if gaps.holder[partner] in (rank, -1):
                return None
            gaps.hold_whole(gaps.holder[partner], document)
            gaps.let_go(partner)
            gaps.hold_whole(rank, partner)
    if min(gaps.room) < 0:
        return None
    return Placement(gaps=gaps, cut=cut, leveller=placement.leveller)
