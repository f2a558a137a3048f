"""What each rank still lacks while a plan is being made, and cutting documents so that it gets just that.

A rank that takes some tokens from the front of what is left of a document and some from its end chooses how many tokens
it gets by their sum and how many pairs by their ratio: a token at the end attends to more keys. So one cut document
levels tokens and work at once, whatever whole documents left uneven. Tails start at whole tiles, where a cut adds
nothing to what the kernel computes; only heads are ragged.
"""

from __future__ import annotations

from collections.abc import Sequence

from wlb.sharding.cost import ShardCosts

Piece = tuple[int, int, int, int]


class Gaps:
    """Tokens and pairs that ranks lack, and what they hold already.

    lengths: (D,) tokens of the documents; their sum is a multiple of cp_size.
    works: (D,) pairs of each document if it stays whole.
    room: (cp,) tokens that each rank still takes.
    need: (cp,) pairs up to an equal share; below 0 where a rank has more than its share.
    received: (cp,) tokens of cut documents whose keys a rank must receive.
    holder: (D,) rank of each whole document, -1 of others.
    """

    __slots__ = ("_costs", "_cuts", "_share_pairs", "holder", "lengths", "need", "received", "room", "works")

    def __init__(self, lengths: Sequence[int], works: Sequence[int], cp_size: int, costs: ShardCosts) -> None:
        self._costs = costs
        self._share_pairs = sum(works) // cp_size
        self.lengths, self.works = lengths, works
        self.room = [sum(lengths) // cp_size] * cp_size
        self.need = [self._share_pairs] * cp_size
        self.received = [0] * cp_size
        self.holder = [-1] * len(lengths)
        self._cuts: list[Piece] = []

    def copy(self) -> Gaps:
        """One that can be changed by itself."""
        new = object.__new__(Gaps)
        new._costs, new._share_pairs, new.lengths, new.works = self._costs, self._share_pairs, self.lengths, self.works
        new.room, new.need, new.received = self.room[:], self.need[:], self.received[:]
        new.holder, new._cuts = self.holder[:], self._cuts[:]
        return new

    @property
    def pieces(self) -> list[Piece]:
        """(rank, document, start, stop) of all that is placed, in no order; pieces of a rank may touch."""
        whole = [(rank, d, 0, self.lengths[d]) for d, rank in enumerate(self.holder) if rank >= 0]
        return whole + self._cuts

    def slowest_pairs(self) -> int:
        """Price of what is placed. More pieces never lower it."""
        return self._share_pairs - min(self.need) + self._costs.exchange(max(self.received))

    def hold_whole(self, rank: int, document: int) -> None:
        """Give a document to one rank, which must have room for it."""
        self.room[rank] -= self.lengths[document]
        self.need[rank] -= self.works[document]
        self.holder[document] = rank

    def let_go(self, document: int) -> None:
        """Take a whole document back from its rank."""
        rank = self.holder[document]
        self.room[rank] += self.lengths[document]
        self.need[rank] += self.works[document]
        self.holder[document] = -1

    def level_tiles(self, document: int) -> None:
        """Cut a short document so that afterwards most ranks lack whole tiles of tokens.

        The ragged tokens of every rank but the most ragged are taken from its front, the rest goes where most room is.
        """
        length, tile = self.lengths[document], self._costs.tile_tokens
        first = len(self._cuts)
        start = 0
        for rank in sorted(range(len(self.room)), key=lambda r: (self.room[r] % tile, r))[:-1]:
            start = self._take(rank, document, start, min(length, start + self.room[rank] % tile))
        while start < length:
            rank = max(range(len(self.room)), key=lambda r: (self.room[r], -r))
            start = self._take(rank, document, start, min(length, start + self.room[rank]))
        self._receive(first)

    def fill(self, documents: Sequence[int], limit_pairs: int | None) -> bool:
        """Cut documents, shortest first, so that no rank lacks a token; the longest levels the pairs.

        documents: all that are not placed yet: the room there is, is for them.
        limit_pairs: give up and return False once the price is as high.
        """
        ordered = sorted(documents, key=lambda d: (self.lengths[d], d))
        for i, document in enumerate(ordered):
            if limit_pairs is not None and self.slowest_pairs() >= limit_pairs:
                return False
            if i + 1 < len(ordered):
                self._share_out(document, ordered[i + 1 :])
            else:
                self._level(document)
        return limit_pairs is None or self.slowest_pairs() < limit_pairs

    def _share_out(self, document: int, longer: Sequence[int]) -> None:
        """Cut a document head-tail over as few ranks as want it.

        What a rank lacks afterwards should be like the longer documents, which are dealt later: as many pairs a token.
        A rank wants a lighter document's tokens in so far as it lacks too few pairs for its room.
        """
        length = self.lengths[document]
        tokens = sum(self.lengths[d] for d in longer)
        work = sum(self.works[d] for d in longer)
        lighter = work * length - self.works[document] * tokens
        wants = []
        for rank, room in enumerate(self.room):
            if room and lighter > 0:
                wants.append((min(room, (work * room - self.need[rank] * tokens) * length // lighter), rank))
            elif room:
                wants.append((room, rank))
        wants.sort(key=lambda want: (-want[0], want[1]))
        wanted = 0
        for count, (want, _) in enumerate(wants, start=1):
            wanted += max(0, want)
            if wanted >= length:
                del wants[count:]
                break
        ranks = [rank for _, rank in wants]
        shares = share_tokens(
            length, [want for want, _ in wants], [self.room[r] for r in ranks], self._costs.tile_tokens
        )
        first = len(self._cuts)
        lo, hi = 0, length
        for rank, share in zip(ranks, shares, strict=True):
            if lo < hi:
                lo, hi = self._cut(rank, document, lo, hi, share, share // 2)
        self._receive(first)

    def _level(self, document: int) -> None:
        """Cut the last document: every rank takes all its room, those of the most unusual density from the outside."""
        length = self.lengths[document]
        ranks = [r for r, room in enumerate(self.room) if room]
        lacking = sum(self.need[r] for r in ranks)
        ranks.sort(key=lambda r: (-(abs(self.need[r] * length - lacking * self.room[r]) // self.room[r]), r))
        first = len(self._cuts)
        lo, hi = 0, length
        for rank in ranks:
            room = self.room[rank]
            # All from the tail is room * hi - room^2 / 2 pairs, and half a tile a token where tiles are whole. Each
            # token moved to the head saves hi - room - lo.
            surplus = 2 * room * hi - room * room + room * self._costs.tile_tokens - 2 * self.need[rank]
            saving = hi - room - lo
            head = (surplus + saving) // (2 * saving) if saving > 0 else 0
            lo, hi = self._cut(rank, document, lo, hi, room, min(room, max(0, head)))
        self._receive(first)

    def _cut(self, rank: int, document: int, lo: int, hi: int, tokens: int, head: int) -> tuple[int, int]:
        """Take about `head` tokens from lo on, the rest up to hi from a tile's border; return what is left."""
        if tokens == hi - lo:
            self._take(rank, document, lo, hi)
            return hi, hi
        tile = self._costs.tile_tokens
        border = (hi - tokens + head + tile // 2) // tile * tile
        if hi - border > tokens:
            border += tile
        border = min(border, hi)
        stop = self._take(rank, document, lo, lo + tokens - (hi - border))
        self._take(rank, document, border, hi)
        return stop, border

    def _take(self, rank: int, document: int, start: int, stop: int) -> int:
        if start < stop:
            self.room[rank] -= stop - start
            self.need[rank] -= self._costs.tile_pairs(start, stop) + self._costs.span_pairs
            self._cuts.append((rank, document, start, stop))
        return stop

    def _receive(self, first: int) -> None:
        """Count the keys that the pieces of one document, those from index `first` on, need from other ranks."""
        last: dict[int, int] = {}
        for rank, _, start, stop in self._cuts[first:]:
            self.received[rank] -= stop - start
            last[rank] = max(last.get(rank, 0), stop)
        for rank, stop in last.items():
            self.received[rank] += stop


def share_tokens(length: int, wants: Sequence[int], rooms: Sequence[int], tile: int) -> list[int]:
    """Divide `length` tokens: to each what it wants, all more or all less by the same number, in tiles if possible.

    rooms: most that each can take; their sum is at least `length`.

    >>> share_tokens(10, [4, 8], [8, 8], 1), share_tokens(10, [4, 8], [8, 8], 4)
    ([3, 7], [4, 6])
    """
    shares = [max(0, want) for want in wants]
    excess = sum(shares) - length
    margins = list(shares) if excess > 0 else [room - share for share, room in zip(shares, rooms, strict=True)]
    left, sign = abs(excess), -1 if excess > 0 else 1
    for behind, i in enumerate(sorted(range(len(shares)), key=lambda i: (margins[i], i))):
        step = min(margins[i], -(-left // (len(shares) - behind)))
        shares[i] += sign * step
        left -= step
    shares = [share // tile * tile for share in shares]
    left = length - sum(shares)
    while left:
        for i, room in enumerate(rooms):
            more = min(tile, left, room - shares[i])
            shares[i] += more
            left -= more
    return shares
