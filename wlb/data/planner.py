"""Step plans one after another: draw documents, pack them, remember how to go on from each step.

A plan depends on lengths, seed and configuration only, so every rank runs its own planner and all hold the
same plan; no rank tells another. Planning may run ahead of training: a checkpoint taken after training step
k - 1 saves `state_before(k)`, whatever has been planned since.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from wlb.data.saved_state import require_equal
from wlb.data.stream import DocumentStream, StreamCounters
from wlb.documents import Document, StepPlan, total_tokens
from wlb.errors import ConfigError, StateError
from wlb.packing.dealing import filled_up
from wlb.packing.packer import CuttingPacker, Packer, PackerState

_STATE_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedStep:
    """How things stood before a step was planned, and what planning it took."""

    step: int
    stream_state: dict[str, Any]
    packer_state: PackerState
    plan_s: float


class StepPlanner:
    """Plans the steps of a run in order.

    stream: where documents come from. Its window must be the packer's.
    packer: which documents a step trains, and in which micro-batches.
    ramp: packers of the first steps, while the batch size still grows: (first step, packer), steps increasing. Before
        the first of them, and with none, `packer` plans.
    num_steps: steps in the run, counted from step 0 of the stream; then no more than num_steps * budget tokens
        are drawn in all and the last step trains whatever waits, so that with cut="stream" packers that draw
        their budget train the same documents over the run. None: no known end.
    takes: whether a replica's schedule runs so many micro-batches; steps are filled up with empty ones until it does.
    clock: seconds, for `plan_s`.
    kept_steps: planned steps that `state_before` and `plan_s` can still be asked about; more than the number of
        steps planned ahead.

    Raises ConfigError if the windows differ.
    """

    def __init__(
        self,
        *,
        stream: DocumentStream,
        packer: Packer,
        ramp: Sequence[tuple[int, Packer]] = (),
        num_steps: int | None,
        takes: Callable[[int], bool] = lambda _count: True,
        clock: Callable[[], float] = time.perf_counter,
        kept_steps: int = 8,
    ) -> None:
        if any(p.shape.window_tokens != stream.window_tokens for p in (packer, *(p for _, p in ramp))):
            raise ConfigError(
                f"window_tokens of the stream and of the packer must be equal, "
                f"got {stream.window_tokens} and {packer.shape.window_tokens}"
            )
        if num_steps is not None and num_steps < 1:
            raise ConfigError(f"num_steps must be >= 1 or None, got {num_steps}")
        if kept_steps < 1:
            raise ConfigError(f"kept_steps must be >= 1, got {kept_steps}")
        self._stream = stream
        self._packer = packer
        self._ramp = tuple(ramp)
        self._packer_state = packer.initial_state()
        self._num_steps = num_steps
        self._takes = takes
        self._clock = clock
        self._kept: deque[_PlannedStep] = deque(maxlen=kept_steps)

    @property
    def step(self) -> int:
        """Index of the next step to plan."""
        return self._packer_state.step

    @property
    def counters(self) -> StreamCounters:
        """Of the document stream."""
        return self._stream.counters

    @property
    def finished(self) -> bool:
        """Whether every step of the run has been planned."""
        return self._num_steps is not None and self.step >= self._num_steps

    def next_step(self) -> StepPlan:
        """Plan step `self.step`. Raises ConfigError after the last one, PackingError if the packer finds no place."""
        if self.finished:
            raise ConfigError(f"step must be below num_steps {self._num_steps}, got {self.step}")
        begin_s = self._clock()
        stream_state, before = self._stream.state(), self._packer_state
        still_to_draw = steps_left = None
        if self._num_steps is not None:
            steps_left = self._num_steps - before.step
            still_to_draw = self._budget_to_end(before) - self._stream.tokens_drawn
        packer = self._packer_of(before.step)
        arrivals = draw_arrivals(packer, before, self._stream, steps_left=steps_left, at_most_tokens=still_to_draw)
        plan, self._packer_state = packer.plan_step(before, arrivals, steps_left=steps_left)
        plan = filled_up(plan, self._takes)
        self._kept.append(
            _PlannedStep(
                step=before.step,
                stream_state=stream_state,
                packer_state=before,
                plan_s=self._clock() - begin_s,
            )
        )
        return plan

    def plan_s(self, step: int) -> float:
        """Seconds that planning `step` took, for one of the last `kept_steps` planned."""
        return self._planned(step).plan_s

    def state(self) -> dict[str, Any]:
        """JSON-able; with it a new planner plans step `self.step` and all later ones as this one would."""
        return self._state_of(self._stream.state(), self._packer_state)

    def state_before(self, step: int) -> dict[str, Any]:
        """The state from which `step` is planned, for the next step and the last `kept_steps` planned ones."""
        if step == self.step:
            return self.state()
        planned = self._planned(step)
        return self._state_of(planned.stream_state, planned.packer_state)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved state.

        The division of micro-batches among replicas may have changed since, their number in a step may not.
        Raises StateError, and changes nothing, if the state is of other data or of another configuration.
        """
        try:
            require_equal("planner version", saved=state["version"], present=_STATE_VERSION)
            saved = state["packer_state"]
            require_equal(
                "packer state version",
                saved=saved["version"],
                present=self._packer.initial_state().to_json()["version"],
            )
            packer_state = PackerState.from_json(saved)
            for name, present in _packer_config(self._packer).items():
                # What documents are held by does not matter where none are held.
                if packer_state.waiting or name not in self._packer.state_fields:
                    require_equal(f"packer {name}", saved=state["packer"].get(name), present=present)
            require_equal("drawn tokens", saved=packer_state.drawn_tokens, present=state["stream"]["tokens_drawn"])
            stream_state = state["stream"]
        except StateError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"the saved planner state must be complete, got {error!r}") from error
        self._stream.restore(stream_state)
        self._packer_state = packer_state
        self._kept.clear()

    def _packer_of(self, step: int) -> Packer:
        chosen = self._packer
        for first, packer in self._ramp:
            if first <= step:
                chosen = packer
        return chosen

    def _budget_to_end(self, state: PackerState) -> int:
        """Tokens that plain training would have trained at the end of the run."""
        assert self._num_steps is not None
        borders = sorted({state.step, self._num_steps, *(f for f, _ in self._ramp if state.step < f < self._num_steps)})
        stretches = [(b - a) * self._packer_of(a).shape.budget_tokens for a, b in pairwise(borders)]
        return state.budget_tokens + sum(stretches)

    def _planned(self, step: int) -> _PlannedStep:
        for planned in self._kept:
            if planned.step == step:
                return planned
        raise StateError(f"step must be one of {[p.step for p in self._kept]}, the last ones planned, got {step}")

    def _state_of(self, stream_state: dict[str, Any], packer_state: PackerState) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "packer": _packer_config(self._packer),
            "packer_state": packer_state.to_json(),
            "stream": stream_state,
        }


def draw_arrivals(
    packer: Packer,
    state: PackerState,
    stream: DocumentStream,
    *,
    steps_left: int | None = None,
    at_most_tokens: int | None = None,
) -> tuple[Document, ...]:
    """The documents of step `state.step`: drawn until the packer wants no more.

    at_most_tokens: of all draws together; None is no bound.
    """
    arrivals: tuple[Document, ...] = ()

    def take(wanted_tokens: int, *, cut_last: bool) -> tuple[Document, ...]:
        left = None if at_most_tokens is None else at_most_tokens - total_tokens(arrivals)
        if cut_last and left is not None:
            wanted_tokens = min(wanted_tokens, left)
        return stream.take(wanted_tokens, arrival=state.step, at_most_tokens=left, cut_last=cut_last)

    while (wanted := packer.wanted_tokens(state, arrivals, steps_left=steps_left)) > 0:
        taken = take(wanted, cut_last=False)
        if not taken:
            break
        arrivals += taken
    if isinstance(packer, CuttingPacker):
        arrivals += take(packer.cut_tokens(state, arrivals, steps_left=steps_left), cut_last=True)
    return arrivals


def ledger_line(plan: StepPlan) -> str:
    """One line of JSON: per replica, per micro-batch, [doc_id, sequence, start, length] of each document.

    After a resume a step that had been planned but not trained is planned again: of two lines with the same
    step, the later one counts.
    """
    replicas = [
        [[[d.doc_id, d.sequence, d.start, d.length] for d in micro_batch.documents] for micro_batch in replica]
        for replica in plan.replicas
    ]
    return json.dumps({"step": plan.step, "replicas": replicas}, separators=(",", ":")) + "\n"


def _packer_config(packer: Packer) -> dict[str, Any]:
    """What the documents that wait in a saved state depend on.

    Costs, search budgets and the like are left out: they may change from one run to the next.
    """
    return {
        "algorithm": type(packer).__name__,
        "window_tokens": packer.shape.window_tokens,
        "num_micro_batches": packer.shape.num_micro_batches,
        **{name: json.dumps(getattr(packer, name)) for name in packer.state_fields},
    }
