"""The smallest largest micro-batch, by search with proof: WLB-LLM's formulations (arXiv 2503.17924, section 4.1).

Fixed length: min over placings of max_j sum_i d_i^2, sum_i d_i <= S. Variable length: min max_j sum_i (Wa(d_i) +
Wl(d_i)), sum_i d_i <= S_max. They differ in the work of a document and in the cap, and both are given here. With two
micro-batches and work d^2::

    lengths 5 5 4 4 4, cap 13    longest first, to the least work: 5 4 4 | 5 4, works 57 and 41
                                 optimal: 5 5 | 4 4 4, works 50 and 48
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wlb.documents import Document
from wlb.errors import ConfigError, PackingError
from wlb.packing.placement import longest_first, place, require_fit
from wlb.packing.plain import next_fit, split_to_count
from wlb.packing.solver.model import Filled, PlacementModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A placing of all documents, and how good any could be.

    filled: documents of each micro-batch.
    largest_work: of a micro-batch, in the unit of `work`.
    bound_work: no placing has a smaller largest.
    is_proven: largest_work is within the tolerance of bound_work.
    """

    filled: Filled
    largest_work: int
    bound_work: int
    is_proven: bool


def optimal(
    documents: Sequence[Document],
    *,
    num_micro_batches: int,
    limit_tokens: int,
    work: Callable[[int], int],
    seconds: float,
    tolerance: float = 0.0,
    start: Filled | None = None,
) -> Solution:
    """Place every document so that the largest micro-batch has least work.

    limit_tokens: a micro-batch holds at most so many.
    work: integer work > 0 of a document of this length.
    seconds: to search, counted in the solver's operations: about so long on one core, and the same search anywhere.
    tolerance: share of the largest work by which it may be above the bound. 0 searches until no nanosecond is left,
        which takes for ever where there are many documents of many lengths.
    start: a placing to begin with, of which none worse is returned; None is `quick_placing`.

    Raises:
        ConfigError: OR-Tools is not installed, or seconds or tolerance are out of range.
        PackingError: a document is longer than the limit, the documents do not fit together, or no placing was found
            in the time given.
    """
    if num_micro_batches < 1:
        raise ConfigError(f"num_micro_batches must be >= 1, got {num_micro_batches}")
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"seconds must be finite and > 0, got {seconds}")
    if not 0 <= tolerance < 1:
        raise ConfigError(f"tolerance must be in [0, 1), got {tolerance}")
    ordered = longest_first(documents)
    require_fit(ordered, limit_tokens=limit_tokens)
    if start is None:
        start, left = quick_placing((), ordered, num_micro_batches, limit_tokens=limit_tokens, work=work)
        start = None if left else start
    works = [work(d.length) for d in ordered]
    bound = work_bound(works, num_micro_batches)
    upper = sum(works) if start is None else _largest(start, work)
    if start is not None and _is_close(upper, bound, tolerance):
        return Solution(filled=start, largest_work=upper, bound_work=bound, is_proven=True)
    model = PlacementModel(ordered, num_micro_batches=num_micro_batches, limit_tokens=limit_tokens)
    outcome = model.least_largest_work(works, start, lower=bound, upper=upper, seconds=seconds, tolerance=tolerance)
    if outcome.is_infeasible:
        raise PackingError(
            f"documents must fit in {num_micro_batches} micro-batches of {limit_tokens} tokens, got "
            f"{sum(d.length for d in ordered)} tokens in {len(ordered)} documents that do not"
        )
    filled = start if outcome.filled is None else outcome.filled
    if filled is None:
        raise PackingError(f"seconds must be enough to find a placing of {len(ordered)} documents, got {seconds}")
    largest, bound = _largest(filled, work), max(bound, outcome.bound)
    return Solution(
        filled=filled, largest_work=largest, bound_work=bound, is_proven=_is_close(largest, bound, tolerance)
    )


def quick_placing(
    carried: Sequence[Document],
    arrivals: Sequence[Document],
    num_micro_batches: int,
    *,
    limit_tokens: int,
    work: Callable[[int], int],
) -> tuple[Filled, tuple[Document, ...]]:
    """A placing without the solver, and what it leaves: carried documents first, then longest first to least work.

    Where that leaves something and filling one micro-batch after the other does not, the latter: documents cut where
    windows end fill them to the last token, which placing by work can hardly find.
    """
    placement = place(
        [*carried, *longest_first(arrivals)],
        num_micro_batches=num_micro_batches,
        limit_tokens=limit_tokens,
        work=work,
        fallback="any",
    )
    if placement.left:
        by_age = sorted((*carried, *arrivals), key=lambda d: d.doc_id)
        packs = next_fit(by_age, window_tokens=limit_tokens)
        if len(packs) <= num_micro_batches:
            return tuple(split_to_count(packs, num_micro_batches)), ()
    return placement.filled, placement.left


def place_most(
    start: Filled,
    left: Sequence[Document],
    *,
    required: frozenset[int],
    limit_tokens: int,
    seconds: float,
    tolerance_tokens: int,
) -> Filled:
    """A placing that leaves as few tokens of all these documents as possible, no more than `start` leaves.

    required: ids of the documents of `start` that may not be left.
    """
    documents = longest_first([*(d for held in start for d in held), *left])
    left_tokens = sum(d.length for d in left)
    room = len(start) * limit_tokens - sum(d.length for d in documents)
    if left_tokens <= max(0, -room) + tolerance_tokens:
        return start
    model = PlacementModel(
        documents,
        num_micro_batches=len(start),
        limit_tokens=limit_tokens,
        optional=frozenset(d.doc_id for d in documents) - required,
    )
    outcome = model.least_left_tokens(start, seconds=seconds, tolerance_tokens=tolerance_tokens)
    found = outcome.filled or start
    return found if _tokens(found) > _tokens(start) else start


def work_bound(works: Sequence[int], num_micro_batches: int) -> int:
    """Work that the largest micro-batch has at least, whatever the placing.

    works: of the documents, decreasing. The mean; the largest document; and for every k, of the k N + 1 largest
    documents some k + 1 are together, which weigh at least what the smallest k + 1 of them do.

    >>> work_bound([9, 5, 5, 5, 5], 2)
    15
    """
    bound = max(works, default=0)
    bound = max(bound, -(-sum(works) // num_micro_batches))
    for k in range(1, (len(works) - 1) // num_micro_batches + 1):
        bound = max(bound, sum(works[k * (num_micro_batches - 1) : k * num_micro_batches + 1]))
    return bound


def _largest(filled: Filled, work: Callable[[int], int]) -> int:
    return max(sum(work(d.length) for d in held) for held in filled)


def _tokens(filled: Filled) -> int:
    return sum(d.length for held in filled for d in held)


def _is_close(largest: int, bound: int, tolerance: float) -> bool:
    return largest - bound <= tolerance * largest
