"""The contract of a packer: documents that arrive in a step in, micro-batches of that step out.

A packer is a frozen configuration. Its state is a value that goes in and comes out, so that planning is
a pure function: the same documents give the same plans on every rank and after every resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from wlb.documents import Document, StepPlan
from wlb.errors import ConfigError, StateError

_STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The size of a step, as Megatron's arguments give it.

    window_tokens: `--seq-length`, the tokens of one micro-batch of plain training.
    micro_batches_per_replica: global batch size / data-parallel size (micro-batch size is 1).
    num_replicas: data-parallel size.
    """

    window_tokens: int
    micro_batches_per_replica: int
    num_replicas: int

    def __post_init__(self) -> None:
        for name in ("window_tokens", "micro_batches_per_replica", "num_replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches_per_replica * self.num_replicas

    @property
    def budget_tokens(self) -> int:
        """Tokens that a step of plain training holds."""
        return self.num_micro_batches * self.window_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PackerState:
    """What a packer remembers between steps.

    step: index of the next step to plan.
    drawn_tokens: tokens of all documents that have arrived so far.
    budget_tokens: tokens that plain training would have trained so far: budgets of the steps planned, added up.
    queues: documents held back, one tuple per outlier band, first in first out.
    carried: documents that did not fit, in the order in which they are tried again.
    planned: micro-batches already filled for later steps (packers that look ahead), one tuple a step.
    """

    step: int = 0
    drawn_tokens: int = 0
    budget_tokens: int = 0
    queues: tuple[tuple[Document, ...], ...] = ()
    carried: tuple[Document, ...] = ()
    planned: tuple[tuple[tuple[Document, ...], ...], ...] = ()

    @property
    def waiting(self) -> tuple[Document, ...]:
        """Every document that arrived and is not trained yet."""
        ahead = (d for step in self.planned for micro_batch in step for d in micro_batch)
        return (*(d for q in self.queues for d in q), *self.carried, *ahead)

    def to_json(self) -> dict[str, Any]:
        """Plain ints and lists."""
        return {
            "version": _STATE_VERSION,
            "step": self.step,
            "drawn_tokens": self.drawn_tokens,
            "budget_tokens": self.budget_tokens,
            "queues": [[_to_list(d) for d in q] for q in self.queues],
            "carried": [_to_list(d) for d in self.carried],
            "planned": [[[_to_list(d) for d in m] for m in step] for step in self.planned],
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> PackerState:
        """Raises StateError if `saved` is of another version or is not what `to_json` gives."""
        version = saved.get("version") if isinstance(saved, dict) else None
        if version != _STATE_VERSION:
            raise StateError(f"version of the packer state must be {_STATE_VERSION}, got {version!r}")
        try:
            return cls(
                step=saved["step"],
                drawn_tokens=saved["drawn_tokens"],
                budget_tokens=saved["budget_tokens"],
                queues=tuple(tuple(_from_list(d) for d in q) for q in saved["queues"]),
                carried=tuple(_from_list(d) for d in saved["carried"]),
                planned=tuple(tuple(tuple(_from_list(d) for d in m) for m in step) for step in saved["planned"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"the saved packer state must be what to_json gives, got {error!r}") from error


class Packer(Protocol):
    """One packing algorithm, configured."""

    natural_cut: ClassVar[Literal["stream", "window"]]
    """The document cut that the algorithm was published with; it works with either."""

    state_fields: ClassVar[tuple[str, ...]]
    """Options on which the documents held in a state depend: a state saved under others is refused."""

    free_counts: ClassVar[bool]
    """Whether replicas may run any number of micro-batches, each another one; if not, all run
    `shape.micro_batches_per_replica`, and more only in a last step."""

    @property
    def shape(self) -> StepShape: ...

    @property
    def cap_tokens(self) -> int:
        """No micro-batch ever holds more."""
        ...

    @property
    def thresholds_tokens(self) -> tuple[int, ...]:
        """Shortest document of each outlier queue, increasing; () for a packer that delays nothing."""
        ...

    def initial_state(self) -> PackerState:
        """The state before the first step."""
        ...

    def wanted_tokens(
        self, state: PackerState, arrivals: Sequence[Document] = (), *, steps_left: int | None = None
    ) -> int:
        """Tokens of new documents still to draw before planning step `state.step`; 0 or less once that is enough.

        Asked again after each draw: what comes may wait, and something else is then drawn in its place.

        arrivals: documents drawn for the step so far.
        steps_left: as in `plan_step`; a packer that looks ahead draws no further than that.
        """
        ...

    def plan_step(
        self, state: PackerState, arrivals: Sequence[Document], *, steps_left: int | None = None
    ) -> tuple[StepPlan, PackerState]:
        """Plan step `state.step`.

        arrivals: documents drawn for it, in arrival order.
        steps_left: steps still to plan including this one, where the end is known. With 1, everything
            that waits is trained in this step, in additional micro-batches where the caps demand it.
        """
        ...


@runtime_checkable
class CuttingPacker(Protocol):
    """A packer that keeps to a budget of tokens where whole documents cannot."""

    def cut_tokens(self, state: PackerState, arrivals: Sequence[Document], *, steps_left: int | None = None) -> int:
        """Tokens to draw, once no more whole documents are wanted, with the last of them cut to measure; 0 if none.

        arrivals, steps_left: as in `Packer.wanted_tokens`.
        """
        ...


def _to_list(d: Document) -> list[int]:
    return [d.doc_id, d.length, d.arrival, d.sequence, d.start]


def _from_list(values: list[int]) -> Document:
    doc_id, length, arrival, sequence, start = values
    return Document(doc_id=doc_id, length=length, arrival=arrival, sequence=sequence, start=start)
