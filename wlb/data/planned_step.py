"""What one rank needs of a step plan, small enough to be handed from a planning process every step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.cost.model import CostModel
from wlb.data.collate import padded_num_tokens
from wlb.data.sharded_step import ShardStatistics
from wlb.data.stream import StreamCounters
from wlb.documents import Document, MicroBatch, StepPlan, total_tokens
from wlb.metrics import imbalance_degree
from wlb.sharding import ShardPlan

_COLUMNS = 5  # doc_id, length, arrival, sequence, start


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics:
    """Numbers of a plan, over all replicas.

    imbalance_micro_batches, imbalance_replicas: max over mean of predicted forward seconds.
    trained_tokens: tokens of documents; padding comes on top.
    padding_tokens: of all micro-batches.
    num_micro_batches: of all replicas.
    max_micro_batch_tokens: of the longest one, without padding.
    waiting_documents, waiting_tokens: arrived and not trained yet.
    mean_delay_steps: of the trained tokens. max_delay_steps: of the trained documents.
    """

    imbalance_micro_batches: float
    imbalance_replicas: float
    trained_tokens: int
    padding_tokens: int
    num_micro_batches: int
    max_micro_batch_tokens: int
    waiting_documents: int
    waiting_tokens: int
    mean_delay_steps: float
    max_delay_steps: int


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """The part of a plan that one replica executes, and what all ranks compare and report.

    step: index of the step.
    micro_batches: of this replica, in pipeline order.
    shard_plans: how context-parallel ranks divide each of them.
    fingerprint: of the whole plan.
    document_table: (D, 6) int64 of the whole plan, to say where plans differ: replica, micro-batch, document id,
        sequence, start, length.
    statistics: of the whole plan. shard_statistics: of `shard_plans`.
    counters: what the document stream has handed out when the step is planned.
    plan_s: seconds that planning took, wherever it ran.
    ledger_line: see `wlb.data.planner.ledger_line`; empty where no ledger is kept.
    """

    step: int
    micro_batches: tuple[MicroBatch, ...]
    shard_plans: tuple[ShardPlan, ...]
    fingerprint: int
    document_table: NDArray[np.int64] = field(repr=False, compare=False)
    statistics: StepStatistics
    shard_statistics: ShardStatistics
    counters: StreamCounters
    plan_s: float
    ledger_line: str = ""

    @property
    def shard_fingerprint(self) -> int:
        """63-bit digest of `shard_plans`."""
        digest = hashlib.blake2b(digest_size=8)
        for plan in self.shard_plans:
            digest.update(plan.fingerprint.to_bytes(8, "big"))
        return int.from_bytes(digest.digest(), "big") >> 1


def statistics_of(plan: StepPlan, cost: CostModel, *, pad_to_multiple: int) -> StepStatistics:
    """Count a plan; `cost` predicts forward seconds, `pad_to_multiple` is that of the executor."""
    replica_s = [[cost.forward_s(m.lengths) for m in replica] for replica in plan.replicas]
    documents = [d for m in plan.micro_batches for d in m.documents]
    return StepStatistics(
        imbalance_micro_batches=imbalance_degree([s for replica in replica_s for s in replica]),
        imbalance_replicas=imbalance_degree([sum(replica) for replica in replica_s]),
        trained_tokens=plan.num_tokens,
        padding_tokens=sum(padded_num_tokens(m, pad_to_multiple) for m in plan.micro_batches) - plan.num_tokens,
        num_micro_batches=len(plan.micro_batches),
        max_micro_batch_tokens=max(m.num_tokens for m in plan.micro_batches),
        waiting_documents=len(plan.waiting),
        waiting_tokens=total_tokens(plan.waiting),
        mean_delay_steps=plan.mean_delay_steps(),
        max_delay_steps=max((plan.step - d.arrival for d in documents), default=0),
    )


def document_table(plan: StepPlan) -> NDArray[np.int64]:
    """`PlannedStep.document_table` of a plan."""
    rows = [
        (replica, i, d.doc_id, d.sequence, d.start, d.length)
        for replica, micro_batches in enumerate(plan.replicas)
        for i, m in enumerate(micro_batches)
        for d in m.documents
    ]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 6)


def pack_micro_batches(micro_batches: Sequence[MicroBatch]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(documents, 5) int64 of all documents in order, and the number of documents of each micro-batch.

    Two arrays cross a process boundary in microseconds; a tree of objects would hold the interpreter of the
    process that trains.
    """
    rows = [(d.doc_id, d.length, d.arrival, d.sequence, d.start) for m in micro_batches for d in m.documents]
    table = np.array(rows, dtype=np.int64).reshape(len(rows), _COLUMNS)
    return table, np.array([len(m.documents) for m in micro_batches], dtype=np.int64)


def unpack_micro_batches(table: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[MicroBatch, ...]:
    """Undo `pack_micro_batches`."""
    rows: list[Any] = table.tolist()
    documents = [
        Document(doc_id=doc_id, length=length, arrival=arrival, sequence=sequence, start=start)
        for doc_id, length, arrival, sequence, start in rows
    ]
    stops = np.cumsum(counts).tolist()
    starts = [0, *stops[:-1]]
    return tuple(MicroBatch(documents=tuple(documents[a:b])) for a, b in zip(starts, stops, strict=True))
