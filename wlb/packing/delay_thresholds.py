"""Thresholds of delay queues, chosen by replaying a sample of the lengths.

What a threshold buys depends on the pipeline, the replicas and the lengths, and it costs delay. So candidates are
tried: each is run over the sample, and the one with the shortest predicted steps is taken among those that keep the
mean delay within a limit. Integers and divisions of integers decide, so every rank chooses alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.documents import Document, total_tokens
from wlb.errors import DataError
from wlb.packing.delay import Delay
from wlb.packing.makespan.packer import MakespanPacker
from wlb.packing.options import PackerOptions
from wlb.packing.packer import PackerState
from wlb.packing.thresholds import piece_counts

DEFAULT_MEAN_DELAY_STEPS = 0.6
_SIXTEENTHS = (  # of the window
    *((1,), (2,), (3,), (4,), (5,), (6,), (8,), (10,)),
    *((1, 4), (2, 6), (3, 7), (4, 8), (4, 10), (5, 9), (6, 11), (3, 10), (2, 9)),
)
_FINALISTS = 4
_FIRST_WINDOWS, _MORE_WINDOWS = 160, 320  # of tokens replayed, for each candidate and for each finalist
_FEW_STEPS, _MANY_STEPS = 10, 40
_ENOUGH_MICRO_BATCHES = 16  # of a step; a larger one is replayed with fewer replicas
_ALIKE = 0.005  # predicted times no further apart are alike, and less delay decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Tradeoff:
    """What thresholds come to in the replay.

    time_over_ideal: predicted step time over that of perfectly shared work without a bubble.
    mean_delay_steps: averaged over tokens, those that still wait at their age.
    num_steps: counted.
    """

    thresholds_tokens: tuple[int, ...]
    time_over_ideal: float
    mean_delay_steps: float
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenThresholds:
    """chosen: of `tried`, which is sorted by delay. front: those than which none is faster with less delay."""

    chosen: Tradeoff
    tried: tuple[Tradeoff, ...]

    @property
    def front(self) -> tuple[Tradeoff, ...]:
        front: list[Tradeoff] = []
        for t in self.tried:
            if not front or t.time_over_ideal < front[-1].time_over_ideal:
                front.append(t)
        return tuple(front)


def choose_thresholds(
    options: PackerOptions,
    lengths: Sequence[int] | NDArray[Any],
    *,
    max_mean_delay_steps: float = DEFAULT_MEAN_DELAY_STEPS,
) -> ChosenThresholds:
    """At most two thresholds for the packers that take `options.max_delay_steps`, which must be >= 1.

    lengths: training positions of stored documents, in any order; longer ones than the window are cut.
    max_mean_delay_steps: limit of the mean delay; no queue at all is always a candidate.

    The time that it takes is bounded by the tokens replayed, about 4,500 windows, placed as makespan does at its start.

    Raises DataError if no length is above 0.
    """
    shape = options.shape
    fewer = max(1, min(shape.num_replicas, _ENOUGH_MICRO_BATCHES // shape.micro_batches_per_replica))
    options = replace(options, shape=replace(shape, num_replicas=fewer))
    window_tokens = shape.window_tokens
    pieces = _pieces(lengths, window_tokens)
    candidates = dict.fromkeys(
        tuple(max(1, window_tokens * k // 16) for k in sixteenths)
        for sixteenths in _SIXTEENTHS
        if any(n >= window_tokens * sixteenths[-1] // 16 for n in pieces)
    )
    packer = MakespanPacker.build(replace(options, search_evaluations=0, shard_plans=0))
    trials = [_Trial(options, (), pieces, packer)]
    trials += [_Trial(options, c, pieces, packer) for c in candidates if all(a < b for a, b in pairwise(c))]
    per_step = options.shape.num_micro_batches
    for trial in trials:
        trial.run(min(_MANY_STEPS, max(_FEW_STEPS, _FIRST_WINDOWS // per_step)))
    allowed = [t for t in trials if t.result.mean_delay_steps <= max_mean_delay_steps] or trials[:1]
    finalists = sorted(allowed, key=lambda t: t.result.time_over_ideal)[:_FINALISTS]
    finalists += [t for t in trials[:1] if t not in finalists]
    for trial in finalists:
        trial.run(min(3 * _MANY_STEPS, max(_FEW_STEPS, _MORE_WINDOWS // per_step)))
    # A longer replay can take a finalist over the limit, and all of them.
    within = [t.result for t in finalists if t.result.mean_delay_steps <= max_mean_delay_steps]
    within = within or [t.result for t in allowed if t.result.mean_delay_steps <= max_mean_delay_steps]
    within = within or [trials[0].result]
    fastest = min(t.time_over_ideal for t in within)
    chosen = min(
        (t for t in within if t.time_over_ideal <= fastest * (1 + _ALIKE)),
        key=lambda t: (t.mean_delay_steps, t.time_over_ideal),
    )
    tried = sorted((t.result for t in trials), key=lambda t: (t.mean_delay_steps, t.time_over_ideal))
    return ChosenThresholds(chosen=chosen, tried=tuple(tried))


def front_table(choice: ChosenThresholds) -> str:
    """The front, one line a candidate; the chosen one is marked."""
    lines = ["  thresholds            time/ideal  mean delay, steps  replayed steps"]
    for t in choice.front if choice.chosen in choice.front else (*choice.front, choice.chosen):
        name = " ".join(map(str, t.thresholds_tokens)) or "none"
        mark = "*" if t == choice.chosen else " "
        lines.append(f"{mark} {name:<20}  {t.time_over_ideal:10.3f}  {t.mean_delay_steps:17.2f}  {t.num_steps:14}")
    return "\n".join(lines)


def threshold_remarks(
    thresholds_tokens: Sequence[int], lengths: Sequence[int] | NDArray[Any], window_tokens: int
) -> list[str]:
    """A sentence for each threshold that no document of a sample passes, or that all do.

    lengths: as in `choose_thresholds`.
    """
    pieces = piece_counts(lengths, window_tokens)
    longest, shortest = max(n for n, c in pieces.items() if c), min(n for n, c in pieces.items() if c)
    said = []
    for threshold in thresholds_tokens:
        if threshold > longest:
            said.append(
                f"thresholds_tokens: no document of the sample has {threshold} tokens, the longest piece has "
                f"{longest}: its queue would stay empty"
            )
    if thresholds_tokens and thresholds_tokens[0] <= shortest:
        said.append(
            f"thresholds_tokens: every document of the sample has at least {thresholds_tokens[0]} tokens, the shortest "
            f"{shortest}: all of them would wait"
        )
    return said


class _Trial:
    """One candidate's run over the sample; it can go on."""

    def __init__(
        self,
        options: PackerOptions,
        thresholds_tokens: tuple[int, ...],
        pieces: Sequence[int],
        packer: MakespanPacker,
    ) -> None:
        self._packer = packer
        self._delay = Delay(
            shape=options.shape, thresholds_tokens=thresholds_tokens, max_delay_steps=options.max_delay_steps
        )
        self._pieces, self._next = pieces, 0
        self._state = self._delay.initial_state()
        self._released: set[int] = set()
        self._time = self._ideal = self._steps = 0
        self._tokens = self._token_steps = 0

    def run(self, num_steps: int) -> None:
        """Count so many steps more; as many are passed over at most until every queue has released."""
        passed = 0
        thresholds = self._delay.thresholds_tokens
        while num_steps:
            trained, step = self._step()
            if len(self._released) < len(thresholds) and passed < 2 * _MANY_STEPS:
                passed += 1
                self._released |= {k for k, t in enumerate(thresholds) if any(d.length >= t for d in trained)}
                continue
            num_steps -= 1
            self._steps += 1
            time, ideal = self._packer.predicted_ns(trained)
            self._time, self._ideal = self._time + time, self._ideal + ideal
            self._tokens += total_tokens(trained)
            self._token_steps += sum((step - d.arrival) * d.length for d in trained)

    @property
    def result(self) -> Tradeoff:
        waiting = self._state.waiting
        token_steps = self._token_steps + sum((self._state.step - d.arrival) * d.length for d in waiting)
        return Tradeoff(
            thresholds_tokens=self._delay.thresholds_tokens,
            time_over_ideal=self._time / max(1, self._ideal),
            mean_delay_steps=token_steps / max(1, self._tokens + total_tokens(waiting)),
            num_steps=self._steps,
        )

    def _step(self) -> tuple[tuple[Document, ...], int]:
        state = self._state
        arrivals: list[Document] = []
        while True:
            intake = self._delay.intake(state, arrivals, steps_left=None)
            if intake.wanted_tokens <= 0:
                break
            drawn = 0
            while drawn < intake.wanted_tokens:
                arrivals.append(self._draw())
                drawn += arrivals[-1].length
        self._state = PackerState(
            step=state.step + 1,
            drawn_tokens=state.drawn_tokens + total_tokens(arrivals),
            budget_tokens=state.budget_tokens + self._delay.shape.budget_tokens,
            queues=intake.queues,
            carried=intake.carried,
        )
        return intake.trained, state.step

    def _draw(self) -> Document:
        number = self._next
        self._next += 1
        length = self._pieces[number % len(self._pieces)]
        return Document(doc_id=number, length=length, arrival=self._state.step, sequence=number, start=0)


def _pieces(lengths: Sequence[int] | NDArray[Any], window_tokens: int) -> list[int]:
    """Lengths in an order that is random and always the same, cut at the window."""
    stored = np.asarray(lengths, dtype=np.int64)
    stored = stored[stored > 0]
    if not len(stored):
        raise DataError("lengths must hold at least one document of more than 0 tokens")
    order = np.argsort(np.random.PCG64(0).random_raw(len(stored)), kind="stable")
    pieces: list[int] = []
    for length in stored[order].tolist():
        pieces += [window_tokens] * (length // window_tokens)
        if length % window_tokens:
            pieces.append(length % window_tokens)
    return pieces
