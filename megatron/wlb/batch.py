"""Turns step plans into the batches of this rank: the iterators that Megatron's training loop reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron.wlb.packed_seq_params import packed_seq_params
from megatron.wlb.parallel import ParallelDims
from wlb.attention.device_rows import to_device
from wlb.data.collate import PackedTokens, ReadTokens, collate
from wlb.data.plan_source import PlanSource
from wlb.data.planned_step import PlannedStep
from wlb.documents import MicroBatch
from wlb.sharding import ShardPlan


class PackedSteps:
    """Plans a step when the schedule asks for one, then makes the batches of its micro-batches.

    Every rank holds one and plans the same steps. Only the first and the last pipeline stage read tokens. All model
    chunks of a rank share it, and a batch is made once for them.

    num_chunks: model chunks of this rank.
    source: where planned steps come from.
    read: stored tokens of a sequence.
    padding_token: token id of padding; never trained.
    vocab_size: token ids are below it.
    max_positions: no document is longer.
    save_companions: further state that goes into the checkpoint, such as the validation stream's.
    ledger: told the line of each step that begins.
    clock: seconds, for the time that training waited for a plan.
    """

    def __init__(
        self,
        source: PlanSource,
        dims: ParallelDims,
        read: ReadTokens,
        *,
        num_chunks: int,
        padding_token: int,
        vocab_size: int,
        max_positions: int,
        save_companions: Callable[[], dict[str, Any]] = dict,
        ledger: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._source = source
        self._read = read if dims.is_first_stage or dims.is_last_stage else _no_tokens
        self._cp_rank = dims.cp_rank
        self._padding_token = padding_token
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._save_companions = save_companions
        self._ledger = ledger
        self._clock = clock
        self._step: PlannedStep | None = None
        self.plan_wait_s = 0.0
        self._given = [0] * num_chunks
        self._batches: dict[int, dict[str, Any]] = {}

    def begin_step(self) -> PlannedStep:
        """Take the next planned step; the following `next`s of every chunk give its micro-batches.

        `plan_wait_s` is then the time for which there was none.
        """
        assert self._step is None or set(self._given) == {len(self._step.micro_batches)}, (
            f"micro-batches of the last step were never trained: chunks got {self._given} of "
            f"{len(self._step.micro_batches)}"
        )
        begin_s = self._clock()
        self._step = self._source.next_step()
        self.plan_wait_s = self._clock() - begin_s
        if self._ledger is not None:
            self._ledger(self._step.ledger_line)
        self._given = [0] * len(self._given)
        return self._step

    def current_step(self) -> PlannedStep:
        """The step begun last."""
        assert self._step is not None, "no step has begun"
        return self._step

    def shard_tokens_of_step(self) -> list[int]:
        """Tokens that a context-parallel rank holds of each micro-batch, padding included, in the order in which they
        run."""
        return [plan.rank_tokens for plan in self.current_step().shard_plans]

    def chunk(self, chunk: int) -> PackedIterator:
        """What one model chunk of this rank reads; 0 without virtual stages."""
        return PackedIterator(self, chunk)

    def next_batch(self, chunk: int) -> dict[str, Any]:
        """What `batch_on_device` gives of the chunk's next micro-batch."""
        i = self._given[chunk]
        self._given[chunk] += 1
        if i not in self._batches:
            self._batches[i] = self._make_batch(i)
        return self._batches[i] if min(self._given) <= i else self._batches.pop(i)

    def _make_batch(self, i: int) -> dict[str, Any]:
        step = self.current_step()
        micro_batch, plan = step.micro_batches[i], step.shard_plans[i]
        packed = collate(
            micro_batch,
            self._read,
            plan=plan,
            rank=self._cp_rank,
            padding_token=self._padding_token,
            vocab_size=self._vocab_size,
        )
        return batch_on_device(micro_batch, packed, plan, self._cp_rank, max_positions=self._max_positions)

    def save_state(self) -> dict[str, Any]:
        """What Megatron stores beside a checkpoint: from it, the step after the last trained one is planned."""
        return {"train": self.state(), **self._save_companions()}

    def state(self) -> dict[str, Any]:
        """Of the source alone."""
        return self._source.state()

    def close(self) -> None:
        """Give back what planning holds."""
        self._source.close()


class PackedIterator:
    """The micro-batches of the current step, one `next` at a time, for one model chunk."""

    def __init__(self, steps: PackedSteps, chunk: int) -> None:
        self.steps = steps
        self._chunk = chunk

    def __iter__(self) -> PackedIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        """What `batch_on_device` gives."""
        return self.steps.next_batch(self._chunk)

    def save_state(self) -> dict[str, Any]:
        """Of all chunks: see `PackedSteps.save_state`."""
        return self.steps.save_state()


def batch_on_device(
    micro_batch: MicroBatch, packed: PackedTokens, plan: ShardPlan, cp_rank: int, *, max_positions: int
) -> dict[str, Any]:
    """What the model takes on a context-parallel rank, on the device.

    Returns:
        `tokens`, `labels`, `position_ids` (1, S) int64, `loss_mask` (1, S) float32, of the rank's shard of S tokens,
        and `packed_seq_params`, of the whole pack.
    """
    names = ("tokens", "labels", "position_ids", "loss_mask")
    device = torch.device("cuda", torch.cuda.current_device())
    *tensors, cu_seqlens = to_device([*(getattr(packed, name) for name in names), packed.cu_seqlens], device)
    batch: dict[str, Any] = {name: tensor.unsqueeze(0) for name, tensor in zip(names, tensors, strict=True)}
    batch["packed_seq_params"] = packed_seq_params(
        micro_batch,
        plan,
        cp_rank,
        position_ids=batch["position_ids"][0],
        max_positions=max_positions,
        cu_seqlens=cu_seqlens,
    )
    return batch


def _no_tokens(_sequence: int, _start: int, count: int) -> np.ndarray:
    return np.zeros(count, dtype=np.int64)
