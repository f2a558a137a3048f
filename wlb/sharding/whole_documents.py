"""Rules that place whole documents on ranks, each by another notion of what a rank lacks most.

All go through the documents one by one, give each to the rank that wants it most among those with room, and return
those for which no rank has room. No rule is best on every pack, so hybrid sharding tries all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wlb.sharding.gaps import Gaps

Rule = Callable[[Gaps, Sequence[int], Sequence[int]], list[int]]

# Shares of a rank are compared in this many parts, so that products stay short integers.
_PARTS = 4096


def by_work(gaps: Gaps, whole: Sequence[int], _cut: Sequence[int]) -> list[int]:
    """To the rank that lacks most pairs.

    whole: documents to place, longest first.
    _cut: documents that are cut afterwards.
    """
    left = []
    room, need = gaps.room, gaps.need
    for document in whole:
        length = gaps.lengths[document]
        best = -1
        for rank, free in enumerate(room):
            if free >= length and (best < 0 or need[rank] > need[best]):
                best = rank
        if best < 0:
            left.append(document)
        else:
            gaps.hold_whole(best, document)
    return left


def by_work_and_tokens(gaps: Gaps, whole: Sequence[int], _cut: Sequence[int]) -> list[int]:
    """To the rank whose lack of pairs and of tokens is most like the document: largest dot product of the two, both
    as parts of a rank's share. Arguments as in `by_work`.
    """
    left = []
    room, need = gaps.room, gaps.need
    share_tokens, share_pairs = room[0], need[0]
    for document in whole:
        length = gaps.lengths[document]
        per_pair = gaps.works[document] * _PARTS // share_pairs * share_tokens
        per_token = length * _PARTS // share_tokens * share_pairs
        best, most = -1, 0
        for rank, free in enumerate(room):
            if free >= length:
                product = per_pair * need[rank] + per_token * free
                if best < 0 or product > most:
                    best, most = rank, product
        if best < 0:
            left.append(document)
        else:
            gaps.hold_whole(best, document)
    return left


def by_density(gaps: Gaps, whole: Sequence[int], cut: Sequence[int]) -> list[int]:
    """So that what every rank lacks is like the documents that are cut afterwards: as many pairs a token.

    A rank's surplus is the pairs it lacks beyond those that cut documents bring with the tokens it lacks. Every
    document lowers or raises it, those that change it most are placed first, and all surpluses should end at 0.
    """
    if not cut:  # nothing to be like
        return by_work(gaps, whole, cut)
    tokens = sum(gaps.lengths[d] for d in cut)
    pairs = sum(gaps.works[d] for d in cut)
    surplus = [need - pairs * free // tokens for need, free in zip(gaps.need, gaps.room, strict=True)]
    changes = [(gaps.works[d] - pairs * gaps.lengths[d] // tokens, d) for d in whole]
    left = []
    room = gaps.room
    for change, document in sorted(changes, key=lambda c: (-abs(c[0]), c[1])):
        length = gaps.lengths[document]
        best, most = -1, 0
        for rank, free in enumerate(room):
            if free >= length:
                product = surplus[rank] * change
                if best < 0 or product > most:
                    best, most = rank, product
        if best < 0:
            left.append(document)
        else:
            gaps.hold_whole(best, document)
            surplus[best] -= change
    return left


RULES: tuple[Rule, ...] = (by_work, by_work_and_tokens, by_density)
