"""The placing of documents under a cap, as OR-Tools' CP-SAT solver sees it.

Everything in it is a whole number: tokens, and work in whatever unit the caller compares (squared tokens,
nanoseconds). CP-SAT computes in 64 bits, so nothing is scaled or rounded, and a sum that would not fit is refused.

The solver is deterministic: one thread, a fixed seed, and a limit counted in its own operations, in units of about a
second of one core, never in seconds of a clock. Ranks with the same version of it find the same placing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from wlb.documents import Document, total_tokens
from wlb.errors import ConfigError, PackingError

Filled = tuple[tuple[Document, ...], ...]

_LARGEST_SUM = 2**53  # the bound comes back as a float, which holds whole numbers up to here
_SEED = 1


def require_solver() -> None:
    """Raise ConfigError unless OR-Tools is installed."""
    if find_spec("ortools") is None:
        raise ConfigError(
            "packer solver needs the package ortools, which is not installed: pip install 'wlb-megatron[solver]'"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a search found.

    filled: documents of each micro-batch, longest first; None if the search ended before it found any.
    bound: of the objective, no placing is better.
    is_infeasible: there is no placing at all.
    """

    filled: Filled | None
    bound: int
    is_infeasible: bool


class PlacementModel:
    """Each document in one micro-batch at most, each micro-batch within the cap.

    documents: longest first.
    optional: ids of the documents that may be left out.

    Micro-batches are alike, so they are numbered by the longest document in them: document i is in one of the first
    i + 1. None stays empty where documents suffice: moving a document into an empty one makes no placing worse.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        num_micro_batches: int,
        limit_tokens: int,
        optional: frozenset[int] = frozenset(),
    ) -> None:
        require_solver()
        from ortools.sat.python import cp_model

        self._sat = cp_model
        self._model = cp_model.CpModel()
        self._documents = documents
        self._columns = range(num_micro_batches)
        # _is_in[i][j]: document i is in micro-batch j
        self._is_in = [
            [self._model.new_bool_var("") for _ in range(min(num_micro_batches, i + 1))] for i in range(len(documents))
        ]
        for document, row in zip(documents, self._is_in, strict=True):
            if document.doc_id in optional:
                self._model.add_at_most_one(row)
            else:
                self._model.add_exactly_one(row)
        for j in self._columns:
            held = self._held([d.length for d in documents], j)
            self._model.add(sum(held) <= limit_tokens)
            if len(documents) >= num_micro_batches:
                self._model.add_bool_or([row[j] for row in self._is_in if j < len(row)])

    def least_left_tokens(self, start: Filled, *, seconds: float, tolerance_tokens: int) -> Outcome:
        """Leave out as few tokens as possible; a difference of `tolerance_tokens` does not matter."""
        tokens = total_tokens(self._documents)
        placed = [v * d.length for d, row in zip(self._documents, self._is_in, strict=True) for v in row]
        self._model.minimize(tokens - sum(placed))
        self._hint(start)
        return self._search(seconds=seconds, absolute_gap_limit=float(tolerance_tokens))

    def least_largest_work(
        self, work: Sequence[int], start: Filled | None, *, lower: int, upper: int, seconds: float, tolerance: float
    ) -> Outcome:
        """Make the largest sum of work in a micro-batch as small as possible.

        work: of each document, > 0.
        lower, upper: the objective is known to be between them.
        tolerance: stop when the objective is within this share of the bound.
        """
        if sum(work) >= _LARGEST_SUM:
            raise PackingError(f"work of all documents must be below 2**53 for packer solver, got {sum(work)}")
        largest = self._model.new_int_var(lower, upper, "")
        for j in self._columns:
            self._model.add(sum(self._held(work, j)) <= largest)
        self._model.minimize(largest)
        if start is not None:
            self._hint(start)
        return self._search(seconds=seconds, relative_gap_limit=tolerance)

    def _held(self, amounts: Sequence[int], j: int) -> list[Any]:
        return [amount * row[j] for amount, row in zip(amounts, self._is_in, strict=True) if j < len(row)]

    def _hint(self, start: Filled) -> None:
        """Begin at `start`, its micro-batches numbered by the longest document in them."""
        column_of = {d.doc_id: j for j, held in enumerate(start) for d in held}
        renumbered: dict[int, int] = {}
        for document, row in zip(self._documents, self._is_in, strict=True):
            j = column_of.get(document.doc_id)
            target = None if j is None else renumbered.setdefault(j, len(renumbered))
            for column, variable in enumerate(row):
                self._model.add_hint(variable, int(column == target))

    def _search(self, *, seconds: float, **limits: float) -> Outcome:
        solver = self._sat.CpSolver()
        parameters = solver.parameters
        parameters.num_workers = 1
        # Several strategies take turns on the one thread; unlike a race of threads, that is repeatable.
        parameters.interleave_search = True
        parameters.random_seed = _SEED
        parameters.max_deterministic_time = seconds
        for name, value in limits.items():
            setattr(parameters, name, value)
        status = solver.status_name(solver.solve(self._model))
        assert status != "MODEL_INVALID", self._model.validate()
        if status not in ("OPTIMAL", "FEASIBLE"):
            return Outcome(filled=None, bound=0, is_infeasible=status == "INFEASIBLE")
        filled: list[list[Document]] = [[] for _ in self._columns]
        for document, row in zip(self._documents, self._is_in, strict=True):
            for held, variable in zip(filled, row, strict=False):
                if solver.boolean_value(variable):
                    held.append(document)
        return Outcome(
            filled=tuple(tuple(held) for held in filled),
            bound=round(solver.best_objective_bound),
            is_infeasible=False,
        )
