"""Makes a plan better by many small changes, each judged by the time of the step it leads to.

The search is deterministic, and what it tries does not depend on how much it may still try: a larger budget goes
on where a smaller one has stopped, and the plan never gets worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from wlb.packing.makespan.moves import Draws, Moves
from wlb.packing.makespan.replica import Replica
from wlb.packing.makespan.timer import NEVER, ReplicaTimer
from wlb.packing.makespan.work import Int64

BATCH = 64
_WITHIN = np.array((1, 1, 1, 2, 2, 4, 8))  # lengths of the runs of documents that move inside a replica
_BETWEEN = np.array((1, 1, 2, 4, 8, 16))
_AT_ONCE = 8
_SHAKES = 3
_MEMBERS = 3  # numbers of micro-batches of which a replica tries more than a start
_ROUNDS = 6
_PATIENCE = 2  # turns without a gain before a replica is shaken


class Search:
    """Improves the slowest replica, time and again.

    members: per replica, plans of the same documents with different numbers of micro-batches, best first. The
        worst is dropped after every turn until one is left; from then on the replica also gives documents to the
        fastest one, and where that does not help either, a changed copy of the plan gets a turn beside it.
    takes: whether a replica's number of micro-batches may change to this one.
    close_to: stop at a step no longer than this.
    """

    def __init__(
        self,
        members: Sequence[Sequence[Replica]],
        timer: ReplicaTimer,
        *,
        evaluations: int,
        takes: Callable[[int], bool],
        close_to: int,
    ) -> None:
        self._members = [sorted(m, key=lambda r: r.time)[:_MEMBERS] for m in members]
        self._timer = timer
        self._left = evaluations
        self._takes = takes
        self._close_to = close_to
        self._draws = Draws(0)
        self._turns_without_gain = [0] * len(self._members)

    def run(self) -> list[Replica]:
        """The best plan found: one `Replica` each."""
        while self._left > 0:
            slowest = self._slowest()
            before = self._members[slowest][0].time
            if before <= self._close_to:
                break
            if self._turns_without_gain[slowest] >= _PATIENCE:
                self._members[slowest] += self._shaken(self._members[slowest][0])
            self._turn(slowest)
            if len(self._members) > 1 and len(self._members[slowest]) == 1:
                self._exchange_turn()
            gained = self._members[slowest][0].time < before
            self._turns_without_gain[slowest] = 0 if gained else self._turns_without_gain[slowest] + 1
        return [m[0] for m in self._members]

    def _slowest(self) -> int:
        return max(range(len(self._members)), key=lambda r: (self._members[r][0].time, -r))

    def _fastest(self) -> int:
        return min(range(len(self._members)), key=lambda r: (self._members[r][0].time, r))

    def _turn(self, index: int) -> None:
        members = self._members[index]
        for replica in members:
            for number in range(_ROUNDS):
                if number % 3 == 2 and self._timer.order_matters:
                    try_orders(replica, self._timer, self._draws, self._take(BATCH))
                else:
                    self._try_moves(replica)
        members.sort(key=lambda r: r.time)
        del members[max(1, len(members) - 1) :]

    def _shaken(self, replica: Replica) -> list[Replica]:
        """A copy with two micro-batches joined, one halved, or some documents elsewhere; none if that breaks a cap."""
        micro_batches = [list(m) for m in replica.micro_batches]
        kind, i, j, *more = self._draws.below(1 << 30, 3 + 2 * _SHAKES).tolist()
        i, j = i % replica.count, j % replica.count
        if kind % 4 == 0 and i != j and self._takes(replica.count - 1):
            micro_batches[i] += micro_batches.pop(j) if j > i else micro_batches[j]
            if j < i:
                del micro_batches[j]
        elif kind % 4 == 1 and len(micro_batches[i]) > 1 and self._takes(replica.count + 1):
            micro_batches.insert(j, micro_batches[i][1::2])
            del micro_batches[i + (j <= i)][1::2]
        else:
            for a, b in zip(more[::2], more[1::2], strict=True):
                giving = micro_batches[a % replica.count]
                if len(giving) > 1:
                    micro_batches[b % replica.count].append(giving.pop(a % len(giving)))
        self._take(1)
        shaken = Replica.timed(replica.work, micro_batches, self._timer)
        return [shaken] if shaken.time < NEVER else []

    def _take(self, wanted: int) -> int:
        taken = min(wanted, self._left)
        self._left -= taken
        return taken

    def _try_moves(self, replica: Replica) -> None:
        """The best of a batch of moves, or as many good ones as go well together, unless all make it slower."""
        num = self._take(BATCH)
        if num == 0 or replica.count < 2 or not any(replica.micro_batches):
            return
        share = replica.critical_share(self._timer)
        sizes = np.array([len(m) for m in replica.micro_batches], dtype=np.int64)
        weights = (share + 1) * (sizes > 0), int(share.max()) + 1 - share
        moves = Moves.draw(replica, replica, weights, self._draws, widths=_WITHIN, count=BATCH)
        times = self._timer.times(*moves.candidates(replica, num, gives=True, takes=True))
        times[~moves.legal[:num]] = NEVER
        chosen = _apart(moves, times, replica.time)
        if not chosen:
            return
        time = int(times[chosen[0]])
        more = self._take(len(chosen) - 1)
        if more:
            together = self._timer.times(*moves.together(replica, chosen[: more + 1]))
            best = int(together.argmin())
            if together[best] < time:
                time, more = int(together[best]), best + 1
            else:
                more = 0
        for k in chosen[: more + 1]:
            moves.apply(k, replica, replica)
        replica.time = time

    def _exchange_turn(self) -> None:
        for _ in range(_ROUNDS):
            slow, fast = self._slowest(), self._fastest()
            if slow == fast or len(self._members[slow]) > 1:
                return
            del self._members[fast][1:]
            self._exchange(self._members[slow][0], self._members[fast][0])

    def _exchange(self, slow: Replica, fast: Replica) -> None:
        """The best of a batch of moves from the slowest replica to the fastest, if the slower of both gets faster."""
        num = self._take(2 * BATCH) // 2  # both replicas are timed
        if num == 0 or not any(slow.micro_batches):
            return
        share = slow.critical_share(self._timer)
        slack = fast.critical_share(self._timer)
        sizes = np.array([len(m) for m in slow.micro_batches], dtype=np.int64)
        weights = (share + 1) * (sizes > 0), int(slack.max()) + 1 - slack
        moves = Moves.draw(slow, fast, weights, self._draws, widths=_BETWEEN, count=BATCH)
        slow_times = self._timer.times(*moves.candidates(slow, num, gives=True, takes=False))
        fast_times = self._timer.times(*moves.candidates(fast, num, gives=False, takes=True))
        times = np.maximum(slow_times, fast_times)
        times[~moves.legal[:num]] = NEVER
        best = int(times.argmin())
        if times[best] < slow.time:
            moves.apply(best, slow, fast)
            slow.time, fast.time = int(slow_times[best]), int(fast_times[best])


def try_orders(replica: Replica, timer: ReplicaTimer, draws: Draws, num: int) -> None:
    """The best of `num`, up to BATCH, orders in which two micro-batches change places, or one goes elsewhere."""
    count = replica.count
    if num == 0 or count < 2:
        return
    i, j = draws.below(count, BATCH), draws.below(count, BATCH)
    place, each = np.arange(count)[:, None], np.arange(BATCH)
    order = np.repeat(place, BATCH, axis=1)  # (N, C)
    moves = each % 2 == 1  # the others swap
    order += moves & (place >= i) & (place < j)
    order -= moves & (place > j) & (place <= i)
    order[j, each] = i
    order[i, each] = np.where(moves, order[i, each], j)
    order = order[:, :num]
    times = timer.times(replica.durations[:, order], replica.tokens[order])
    times[(i == j)[:num]] = NEVER
    best = int(times.argmin())
    if times[best] <= replica.time and times[best] != NEVER:
        replica.reorder(order[:, best].tolist())
        replica.time = int(times[best])


def _apart(moves: Moves, times: Int64, now: int) -> list[int]:
    """The best move if it is no slower than now, and after it good ones that share no micro-batch with another."""
    order = np.argsort(times, kind="stable").tolist()
    if times[order[0]] > now or times[order[0]] == NEVER:
        return []
    chosen, used = [order[0]], {int(moves.source[order[0]]), int(moves.target[order[0]])}
    for k in order[1:]:
        if times[k] >= now or len(chosen) == _AT_ONCE:
            break
        touched = {int(moves.source[k]), int(moves.target[k])}
        if not touched & used:
            chosen.append(k)
            used |= touched
    return chosen
