"""From filled micro-batches to replicas, and the order in which each replica's pipeline runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from wlb.documents import Document, MicroBatch, StepPlan


def deal_by_work(work: Sequence[int], num_replicas: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batch indices of each replica: equally many, and about equal work.

    work: integers >= 0, as many as a multiple of num_replicas. The one with most work first, each to the replica
    with least work so far that still has room; ties go to the lower index.

    >>> deal_by_work([9, 1, 5, 4], 2)
    ((0, 1), (2, 3))
    """
    if len(work) % num_replicas:
        raise ValueError(f"work must have a multiple of num_replicas = {num_replicas} entries, got {len(work)}")
    room = len(work) // num_replicas
    dealt: list[list[int]] = [[] for _ in range(num_replicas)]
    totals = [0] * num_replicas
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        replica = min((r for r in range(num_replicas) if len(dealt[r]) < room), key=totals.__getitem__)
        dealt[replica].append(i)
        totals[replica] += work[i]
    return tuple(tuple(d) for d in dealt)


def pipeline_order(work: Sequence[int]) -> tuple[int, ...]:
    """Order of a replica's micro-batches: least work at both ends, most in the middle.

    The pipeline fills behind the first micro-batches and empties behind the last, and every idle stage waits
    for as long as those take; in between, large ones are hidden behind each other's work.

    >>> [[5, 1, 4, 2, 3][i] for i in pipeline_order([5, 1, 4, 2, 3])]
    [2, 4, 5, 3, 1]
    """
    rising = sorted(range(len(work)), key=lambda i: (work[i], i))
    return (*rising[1::2], *reversed(rising[::2]))


def replicas_by_work(
    filled: Sequence[tuple[Document, ...]], work: Sequence[int], num_replicas: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    """`deal_by_work`, then `pipeline_order` inside each replica."""
    replicas = []
    for dealt in deal_by_work(work, num_replicas):
        order = pipeline_order([work[i] for i in dealt])
        replicas.append(tuple(MicroBatch(documents=filled[dealt[k]]) for k in order))
    return tuple(replicas)


def replicas_round_robin(
    filled: Sequence[tuple[Document, ...]], num_replicas: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Pack m * num_replicas + r is micro-batch m of replica r, the order in which Megatron deals samples."""
    return tuple(
        tuple(MicroBatch(documents=documents) for documents in filled[r::num_replicas]) for r in range(num_replicas)
    )


def filled_up(plan: StepPlan, takes: Callable[[int], bool]) -> StepPlan:
    """The plan with empty micro-batches behind each replica's last one until the schedule takes their number.

    takes: whether a replica can run so many; true for some larger number, whatever the number.

    >>> plan = StepPlan(step=0, replicas=((MicroBatch(documents=()),) * 3,), waiting=())
    >>> len(filled_up(plan, lambda count: count % 2 == 0).replicas[0])
    4
    """
    replicas = []
    for replica in plan.replicas:
        count = len(replica)
        while not takes(count):
            count += 1
        replicas.append((*replica, *(MicroBatch(documents=()) for _ in range(count - len(replica)))))
    return replace(plan, replicas=tuple(replicas)) if tuple(replicas) != plan.replicas else plan
