"""Documents as columns of integers: what each adds to every duration of the micro-batch that holds it.

R rows: forward nanoseconds of each class of model stretches, backward nanoseconds of each, and of the message if
messages take time. D documents, N micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb.documents import Document
from wlb.schedule.model import PipelineModel

Int64 = NDArray[np.int64]
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The documents of a step, longest first.

    documents: (D,). tokens: (D,). rows: (R, D). total: (D,) work of a document on all stretches, both passes.
    fixed: (R,) what a micro-batch costs however short it is.
    """

    documents: tuple[Document, ...]
    tokens: Int64
    rows: Int64
    total: Int64
    fixed: Int64

    @property
    def num_documents(self) -> int:
        return len(self.documents)


class WorkTable:
    """Computes and remembers a document's column by its length.

    Every number is rounded once per document and then added, so a sum never depends on the order of its terms.
    """

    def __init__(self, model: PipelineModel) -> None:
        self._model = model
        self._costs, self._of_stretch = model.classes()
        self._empty = _seconds(model, ())
        self._columns: dict[int, list[int]] = {}
        self.fixed = np.array([round(s * _NS_PER_S) for s in self._empty], dtype=np.int64)
        stretches = np.bincount(self._of_stretch, minlength=len(self._costs))
        messages = np.zeros(len(self._empty) - 2 * len(stretches), dtype=np.int64)
        self._weights = np.concatenate([stretches, stretches, messages])

    def step_work(self, documents: Sequence[Document]) -> StepWork:
        """The columns of a step's documents, longest first, equal lengths by document id."""
        ordered = tuple(sorted(documents, key=lambda d: (-d.length, d.doc_id)))
        columns = [self._columns.get(d.length) or self._column(d.length) for d in ordered]
        rows = np.array(columns, dtype=np.int64).reshape(-1, len(self.fixed)).T
        return StepWork(
            documents=ordered,
            tokens=np.array([d.length for d in ordered], dtype=np.int64),
            rows=np.ascontiguousarray(rows),
            total=self._weights @ rows,
            fixed=self.fixed,
        )

    def _column(self, length: int) -> list[int]:
        seconds = _seconds(self._model, (length,))
        column = [max(0, round((s - e) * _NS_PER_S)) for s, e in zip(seconds, self._empty, strict=True)]
        self._columns[length] = column
        return column


def durations_ns(model: PipelineModel, lengths: Sequence[int]) -> Int64:
    """(R,) of one micro-batch, whatever its costs are: the rows that `StepWork` holds for a document."""
    return np.array([round(s * _NS_PER_S) for s in _seconds(model, tuple(lengths))], dtype=np.int64)


def _seconds(model: PipelineModel, lengths: tuple[int, ...]) -> list[float]:
    costs, _ = model.classes()
    forward = [cost.forward_s(lengths) for cost in costs]
    backward = [cost.backward_s(lengths) for cost in costs]
    if model.instant_messages:
        return [*forward, *backward]
    # A message of no bytes takes no time, so what any message costs is read off the line through two short ones.
    num_tokens = sum(lengths)
    fixed_s = 2 * model.message_s(1) - model.message_s(2)
    return [*forward, *backward, model.message_s(num_tokens) if num_tokens else fixed_s]
