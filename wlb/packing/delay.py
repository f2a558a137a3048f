"""Outlier documents wait in queues until several of a length are there, and every step still trains its budget.

A step pays for its longest document by the length of the pipeline, once, however many are as long; so long documents
are best trained together. Algorithm 1 of WLB-LLM (arXiv 2503.17924) releases queues on top of a full batch of
arrivals; here released documents displace arrivals, no more is released than fits, and no document waits longer than
a bound. Window 8, 4 micro-batches (budget 32), threshold 6, documents by length::

    step 0   arrive 7 2 6 3 1 ..     7 and 6 wait; documents are drawn until 32 tokens of shorter ones are there
    step 1   arrive 6 5 7 ..         6 and 7 wait as well
    step 2   arrive 4 2              the queue holds four: 7 6 6 7 are trained, and of new documents only 6 tokens

What is drawn, released and carried over is decided document by document in arrival order, so a decision never depends
on how many documents were drawn at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from wlb.documents import Document, total_tokens
from wlb.errors import ConfigError, StateError
from wlb.packing.options import PackerOptions
from wlb.packing.packer import PackerState, StepShape

TOLERANCE = 0.02
"""Share of its budget by which the tokens of a step may differ from it."""

_MOST_UNFIT = 4  # documents too long for the rest of a step, after which no more are drawn for it
_MOST_FILLS = 2  # times over that a queue may be full before no more are drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What a step does with the documents drawn for it so far.

    trained: documents to train in it, as they were chosen. queues, carried: as in `PackerState`, after it.
    wanted_tokens: of whole documents still to draw for it; 0 if none.
    cut_tokens: still to draw after that, the last document cut to measure; 0 if none.
    """

    trained: tuple[Document, ...]
    queues: tuple[tuple[Document, ...], ...]
    carried: tuple[Document, ...]
    wanted_tokens: int
    cut_tokens: int


@dataclass(frozen=True, kw_only=True)
class Delay:
    """Which documents a step trains, where long ones may wait.

    thresholds_tokens: shortest document of each queue, strictly increasing, each in [1, window].
    max_delay_steps: >= 1; no document is trained later than so many steps after its arrival, unless steps become
        smaller than the one that drew it or the bound is lowered while it waits.

    1. Documents that must be trained now: those that could not all be within the bound if the rest waited, were the
       steps to come filled with waiting documents alone, oldest first. Their queues release.
    2. Documents carried over, which did not fit the step before.
    3. Queues that hold N documents (N: micro-batches of a plain step), that with the oldest first: the N oldest, if
       all fit, or as many as a whole step holds. Their release costs a step its pace, so the queues of shorter
       documents release too, as far as the budget goes, and let arrivals pass.
    4. Arrivals, in order: an outlier waits, unless its queue has released and is empty; others are trained, or carried
       over where they exceed the budget by more than the tolerance.
    5. Where no more is drawn (what waits could miss the bound, a queue could be released twice, or what comes is too
       long for the rest), waiting documents fill the step, oldest first, and a document cut to measure its rest.

    The tokens of all steps so far stay near the sum of their budgets, those of each within TOLERANCE of its own. With a
    known end, no document waits beyond it, so what waits is trained within the budgets of the last steps.
    """

    shape: StepShape
    thresholds_tokens: tuple[int, ...]
    max_delay_steps: int

    def __post_init__(self) -> None:
        if self.max_delay_steps < 1:
            raise ConfigError(f"max_delay_steps must be >= 1 where documents wait, got {self.max_delay_steps}")
        edges = (0, *self.thresholds_tokens, self.shape.window_tokens + 1)
        if any(lower >= upper for lower, upper in pairwise(edges)):
            raise ConfigError(
                f"thresholds_tokens must increase strictly from 1 to at most the window of {self.shape.window_tokens} "
                f"tokens, got {list(self.thresholds_tokens)}"
            )

    @classmethod
    def build(cls, options: PackerOptions) -> Delay | None:
        """None where no document may wait."""
        if options.max_delay_steps == 0:
            return None
        return cls(
            shape=options.shape,
            thresholds_tokens=options.thresholds_tokens,
            max_delay_steps=options.max_delay_steps,
        )

    def initial_state(self) -> PackerState:
        return PackerState(queues=((),) * len(self.thresholds_tokens))

    def intake(self, state: PackerState, arrivals: Iterable[Document], *, steps_left: int | None) -> Intake:
        """What step `state.step` does with the documents that have arrived for it so far.

        steps_left: as in `Packer.plan_step`.
        """
        if len(state.queues) != len(self.thresholds_tokens):
            if any(state.queues):
                raise StateError(
                    f"queues of the state must be as many as thresholds_tokens {list(self.thresholds_tokens)}, "
                    f"got {len(state.queues)}"
                )
            state = replace(state, queues=self.initial_state().queues)
        if steps_left == 1:
            return self._last(state, arrivals)
        filling = _Filling(self, state, steps_left)
        for document in arrivals:
            filling.add(document)
        return filling.result()

    def _last(self, state: PackerState, arrivals: Iterable[Document]) -> Intake:
        trained = (*state.waiting, *arrivals)
        before = state.drawn_tokens - total_tokens(state.waiting)
        missing = state.budget_tokens + self.shape.budget_tokens - before - total_tokens(trained)
        return Intake(
            trained=trained,
            queues=self.initial_state().queues,
            carried=(),
            wanted_tokens=0,
            cut_tokens=max(0, missing),
        )


class HoldsBack:
    """What packers that may delay documents have in common. With `delay` None every document is trained at once."""

    shape: StepShape
    delay: Delay | None

    @property
    def thresholds_tokens(self) -> tuple[int, ...]:
        return () if self.delay is None else self.delay.thresholds_tokens

    def initial_state(self) -> PackerState:
        return PackerState() if self.delay is None else self.delay.initial_state()

    def wanted_tokens(
        self, state: PackerState, arrivals: Sequence[Document] = (), *, steps_left: int | None = None
    ) -> int:
        if self.delay is None:
            return state.budget_tokens + self.shape.budget_tokens - state.drawn_tokens - total_tokens(arrivals)
        return self.delay.intake(state, arrivals, steps_left=steps_left).wanted_tokens

    def cut_tokens(self, state: PackerState, arrivals: Sequence[Document], *, steps_left: int | None = None) -> int:
        if self.delay is None:
            return 0
        return self.delay.intake(state, arrivals, steps_left=steps_left).cut_tokens

    def taken_in(
        self, state: PackerState, arrivals: Sequence[Document], *, steps_left: int | None
    ) -> tuple[tuple[Document, ...], PackerState]:
        """The documents to train in step `state.step`, and the state after it."""
        after = PackerState(
            step=state.step + 1,
            drawn_tokens=state.drawn_tokens + total_tokens(arrivals),
            budget_tokens=state.budget_tokens + self.shape.budget_tokens,
        )
        if self.delay is None:
            return (*state.carried, *arrivals), after
        intake = self.delay.intake(state, arrivals, steps_left=steps_left)
        return intake.trained, replace(after, queues=intake.queues, carried=intake.carried)


class _Filling:
    """A step of `Delay` while it is being filled.

    steps_left: > 1, or None.
    """

    def __init__(self, delay: Delay, state: PackerState, steps_left: int | None) -> None:
        self._thresholds = delay.thresholds_tokens
        self._budget = delay.shape.budget_tokens
        self._window = delay.shape.window_tokens
        self._together = delay.shape.num_micro_batches
        self._step = state.step
        self._last_step = None if steps_left is None else state.step + steps_left - 1
        self._max_delay = delay.max_delay_steps
        waiting = sorted(state.waiting, key=_age)
        half = int(self._budget * TOLERANCE / 2)
        behind = state.budget_tokens - (state.drawn_tokens - total_tokens(waiting))
        self._target = self._budget + max(-half, min(half, behind))
        self._most, self._least = self._target + half, self._target - half
        self._near = self._target - self._budget // 500
        self._tokens = 0
        self._trained: list[Document] = []
        self._queues = [deque(q) for q in state.queues]
        self._carried = list(state.carried)
        self._passes = [0] * len(self._queues)  # arrivals of a band that need not wait
        self._num_unfit = 0
        self._closed = False
        forced = waiting[: self._num_forced(waiting)]
        self._train_forced(forced)
        self._carried = [d for d in self._carried if not self._take(d)]
        for band in sorted({self._band(d) for d in forced} - {-1}, reverse=True):
            count = sum(self._band(d) == band for d in forced)
            self._release(band, self._fitting(band, max(0, self._together - count)), opens=self._together - count)
        self._release_full()
        self._backlog = self._drained()
        self._close_if_due()

    def add(self, document: Document) -> None:
        """The next arrival."""
        band = self._band(document)
        if self._closed and self._take(document):
            return
        if band < 0:
            if self._take(document):
                return
            self._num_unfit += 1
            self._carried.append(document)
        elif self._passes[band] > 0 and not self._queues[band] and self._take(document):
            self._passes[band] -= 1
            return
        else:
            self._queues[band].append(document)
        self._backlog = _next_fit(self._backlog, document.length, self._budget)
        self._close_if_due()

    def result(self) -> Intake:
        return Intake(
            trained=tuple(self._trained),
            queues=tuple(tuple(q) for q in self._queues),
            carried=tuple(self._carried),
            wanted_tokens=0 if self._closed or self._is_full else min(self._near - self._tokens, self._drawable()),
            cut_tokens=self._target - self._tokens if self._closed and self._tokens < self._least else 0,
        )

    @property
    def _is_full(self) -> bool:
        return self._tokens >= self._near

    def _band(self, document: Document) -> int:
        """-1 for a document that is no outlier."""
        return bisect_right(self._thresholds, document.length) - 1

    def _take(self, document: Document) -> bool:
        if self._tokens + document.length > self._most:
            return False
        self._trained.append(document)
        self._tokens += document.length
        return True

    def _num_forced(self, waiting: Sequence[Document]) -> int:
        """Least number of the oldest documents without which the others, from the next step on, keep the bound.

        Removing a document never delays another one under next fit, so the number can be found by halving.
        """
        if self._keeps_bound(waiting):
            return 0
        low, high = 0, len(waiting)
        while low < high:
            middle = (low + high) // 2
            if self._keeps_bound(waiting[middle:]):
                high = middle
            else:
                low = middle + 1
        return low

    def _keeps_bound(self, waiting: Iterable[Document]) -> bool:
        state = (0, 0)
        for d in waiting:
            state = _next_fit(state, d.length, self._budget)
            if self._step + 1 + state[0] > self._deadline(d.arrival):
                return False
        return True

    def _deadline(self, arrival: int) -> int:
        """Last step in which a document may be trained."""
        deadline = arrival + self._max_delay
        return deadline if self._last_step is None else min(deadline, self._last_step)

    def _drained(self) -> tuple[int, int]:
        """Steps after the next, and tokens of the last of them, if only what waits were trained, oldest first."""
        state = (0, 0)
        for d in sorted((*self._carried, *(d for q in self._queues for d in q)), key=_age):
            state = _next_fit(state, d.length, self._budget)
        return state

    def _drawable(self) -> int:
        """Most tokens of which a draw may ask, if all it gives could wait; it gives up to a window more.

        In a step of waiting documents less than a window stays free. A queue must not become overfull before the last
        document of a draw, which would make decisions depend on how documents are drawn.
        """
        steps, tokens = self._backlog
        spare_steps = self._deadline(self._step) - (self._step + 1) - steps
        if spare_steps < 0:
            return 0
        spare = self._budget - self._window
        drawable = max(int(spare_steps >= 1 or tokens <= spare), spare - tokens, (spare_steps - 2) * spare)
        if self._queues:
            room = _MOST_FILLS * self._together - max(map(len, self._queues))
            drawable = min(drawable, max(int(room > 0), (room - 1) * self._thresholds[0]))
        return drawable

    def _close_if_due(self) -> None:
        if self._closed or self._is_full:
            return
        if self._num_unfit < _MOST_UNFIT and self._drawable() > 0:
            return
        self._closed = True
        while not self._is_full:
            heads = [q[0] for q in self._queues if q and self._tokens + q[0].length <= self._most]
            if not heads:
                return
            self._release(self._band(min(heads, key=_age)), 1)

    def _train_forced(self, forced: Iterable[Document]) -> None:
        for d in forced:
            band = self._band(d)
            if band >= 0 and self._queues[band] and self._queues[band][0] is d:
                if self._take(d):
                    self._queues[band].popleft()
            elif d in self._carried and self._take(d):
                self._carried.remove(d)

    def _release_full(self) -> None:
        """Release every queue that holds N documents, as long as they fit."""
        while True:
            full = [b for b, q in enumerate(self._queues) if len(q) >= self._together]
            full.sort(key=lambda b: _age(self._queues[b][0]))
            if not any(self._release(b, self._releasable(b), opens=0) for b in full):
                return

    def _releasable(self, band: int) -> int:
        """N if the N oldest fit. If they exceed a whole step, as many as fit in one that has not begun, else 0."""
        oldest = [d.length for d in list(self._queues[band])[: self._together]]
        if self._tokens + sum(oldest) <= self._most:
            return len(oldest)
        if sum(oldest) > self._least and self._tokens <= self._budget // 10:
            return self._fitting(band, self._together)
        return 0

    def _fitting(self, band: int, at_most: int) -> int:
        tokens, count = self._tokens, 0
        for d in self._queues[band]:
            tokens += d.length
            if tokens > self._most or count == at_most:
                break
            count += 1
        return count

    def _release(self, band: int, count: int, *, opens: int | None = None) -> int:
        """Train the oldest of a queue; how many. opens: arrivals that may pass it; None leaves other queues shut."""
        queue = self._queues[band]
        for _ in range(count):
            self._take(queue.popleft())
        if opens is not None and (count or opens):
            self._passes[band] = max(self._passes[band], opens - count)
            for shorter in range(band - 1, -1, -1):
                self._passes[shorter] = self._budget
                while self._queues[shorter] and self._take(self._queues[shorter][0]):
                    self._queues[shorter].popleft()
        return count


def _age(document: Document) -> tuple[int, int]:
    return document.arrival, document.doc_id


def _next_fit(state: tuple[int, int], tokens: int, capacity: int) -> tuple[int, int]:
    """(step, tokens in it) after one more document."""
    step, used = state
    return (step, used + tokens) if used + tokens <= capacity else (step + 1, tokens)
