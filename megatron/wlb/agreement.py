"""Ranks compare what they are about to execute, before the first message of a step.

Nothing in Megatron precedes a step's first point-to-point message, and gloo takes a message that is shorter than its
buffer without a word: plans that differ would train on garbage, or hang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron.wlb.parallel import ParallelDims
from wlb.data.planned_step import PlannedStep
from wlb.errors import PlanMismatchError

Int64 = NDArray[np.int64]


def check_same_plan(step: PlannedStep, dims: ParallelDims) -> None:
    """Compare the step's plan over all ranks, and its shard plans over the ranks of each replica.

    Raises:
        PlanMismatchError: on every rank, naming the ranks that differ and the first document that does.
    """
    if dims.world_size == 1:
        return
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor([step.fingerprint, dims.dp_rank, step.shard_fingerprint], dtype=torch.int64, device=device)
    gathered = torch.empty(dims.world_size * len(mine), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(gathered, mine)
    everyone: list[list[int]] = gathered.view(dims.world_size, -1).tolist()
    first_of: dict[int, int] = {}
    for rank, (_, dp_rank, _) in enumerate(everyone):
        first_of.setdefault(dp_rank, rank)
    other_plan = [rank for rank, said in enumerate(everyone) if said[0] != everyone[0][0]]
    other_shards = [rank for rank, said in enumerate(everyone) if said[2] != everyone[first_of[said[1]]][2]]
    if not other_plan and not other_shards:
        return
    # Every rank has come to this line, so a second exchange cannot hang: now the documents themselves.
    tables: list[Any] = [None] * dims.world_size
    dist.all_gather_object(tables, step.document_table if other_plan else _span_table(step))
    if other_plan:
        rank = other_plan[0]
        there, here = _first_difference(tables[rank], tables[0], _document)
        raise PlanMismatchError(
            f"ranks {other_plan} planned step {step.step} otherwise than rank 0; the first difference is {there} on "
            f"rank {rank}, {here} on rank 0; do all ranks read the same index files?"
        )
    rank = other_shards[0]
    model = first_of[everyone[rank][1]]
    there, here = _first_difference(tables[rank], tables[model], _span)
    raise PlanMismatchError(
        f"ranks {other_shards} divide the micro-batches of step {step.step} otherwise than the first rank of their "
        f"replica; the first difference is {there} on rank {rank}, {here} on rank {model}; do all ranks have the same "
        "options and cost files?"
    )


def _first_difference(there: Int64, here: Int64, describe: Callable[[list[int]], str]) -> tuple[str, str]:
    """How each side describes the first row in which they differ."""
    row = next((i for i, (a, b) in enumerate(zip(there, here, strict=False)) if (a != b).any()), None)
    if row is None:
        row = min(len(there), len(here))
    one, two = (describe(side[row].tolist()) if row < len(side) else "nothing more" for side in (there, here))
    return one, two


def _document(row: list[int]) -> str:
    replica, micro_batch, doc_id, sequence, start, length = row
    return (
        f"document {doc_id} (sequence {sequence}, {length} tokens from {start}) in micro-batch {micro_batch} of "
        f"replica {replica}"
    )


def _span(row: list[int]) -> str:
    micro_batch, doc_id, start, stop, cp_rank = row
    document = "the padding" if doc_id < 0 else f"document {doc_id}"
    return f"[{start}, {stop}) of {document} of micro-batch {micro_batch} for CP rank {cp_rank}"


def _span_table(step: PlannedStep) -> Int64:
    """(spans, 5) micro-batch, document id or -1 for padding, start, stop, rank: in order of documents."""
    rows = []
    for i, (micro_batch, plan) in enumerate(zip(step.micro_batches, step.shard_plans, strict=True)):
        ids = [*(d.doc_id for d in micro_batch.documents), -1]
        spans = sorted((s.document, s.start, s.stop, rank) for rank, held in enumerate(plan.ranks) for s in held)
        rows += [(i, ids[document], start, stop, rank) for document, start, stop, rank in spans]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 5)
