"""Turns step plans into the batches of this rank: the iterator that Megatron's training loop reads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron.wlb.packed_seq_params import packed_seq_params
from megatron.wlb.parallel import ParallelDims
from wlb.data.collate import PackedTokens, ReadTokens, collate, padded_num_tokens
from wlb.data.plan_source import PlanSource
from wlb.data.planned_step import PlannedStep
from wlb.documents import MicroBatch


class PackedIterator:
    """Plans a step when the schedule asks for one, then gives its micro-batches one `next` at a time.

    Every rank holds one and plans the same steps. Only the first and the last pipeline stage read tokens.

    source: where planned steps come from.
    read: stored tokens of a sequence.
    pad_to_multiple: the tail of a micro-batch is padded to it.
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
        pad_to_multiple: int,
        padding_token: int,
        vocab_size: int,
        max_positions: int,
        save_companions: Callable[[], dict[str, Any]] = dict,
        ledger: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._source = source
        self._read = read if dims.is_first_stage or dims.is_last_stage else _no_tokens
        self.pad_to_multiple = pad_to_multiple
        self._padding_token = padding_token
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._save_companions = save_companions
        self._ledger = ledger
        self._clock = clock
        self._step: PlannedStep | None = None
        self.plan_wait_s = 0.0
        self._pending: deque[MicroBatch] = deque()

    def begin_step(self) -> PlannedStep:
        """Take the next planned step; the following `next`s give its micro-batches.

        `plan_wait_s` is then the time for which there was none.
        """
        assert not self._pending, f"{len(self._pending)} micro-batches of the last step were never trained"
        begin_s = self._clock()
        self._step = self._source.next_step()
        self.plan_wait_s = self._clock() - begin_s
        if self._ledger is not None:
            self._ledger(self._step.ledger_line)
        self._pending.extend(self._step.micro_batches)
        return self._step

    def current_step(self) -> PlannedStep:
        """The step begun last."""
        assert self._step is not None, "no step has begun"
        return self._step

    def padded_tokens_of_step(self) -> list[int]:
        """Tokens of each micro-batch of this replica with padding, in the order in which they run."""
        return [padded_num_tokens(m, self.pad_to_multiple) for m in self.current_step().micro_batches]

    def __iter__(self) -> PackedIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        """`tokens`, `labels`, `position_ids` (1, T) int64, `loss_mask` (1, T) float32, `packed_seq_params`."""
        micro_batch = self._pending.popleft()
        packed = collate(
            micro_batch,
            self._read,
            pad_to_multiple=self.pad_to_multiple,
            padding_token=self._padding_token,
            vocab_size=self._vocab_size,
        )
        return batch_on_device(micro_batch, packed, max_positions=self._max_positions)

    def save_state(self) -> dict[str, Any]:
        """What Megatron stores beside a checkpoint: from it, the step after the last trained one is planned."""
        return {"train": self.state(), **self._save_companions()}

    def state(self) -> dict[str, Any]:
        """Of the source alone."""
        return self._source.state()

    def close(self) -> None:
        """Give back what planning holds."""
        self._source.close()


def batch_on_device(micro_batch: MicroBatch, packed: PackedTokens, *, max_positions: int) -> dict[str, Any]:
    """What the model takes, on the device.

    Returns:
        `tokens`, `labels`, `position_ids` (1, T) int64, `loss_mask` (1, T) float32, `packed_seq_params`.
    """
    names = ("tokens", "labels", "position_ids", "loss_mask")
    batch: dict[str, Any] = {
        name: torch.from_numpy(getattr(packed, name)).pin_memory().cuda(non_blocking=True).unsqueeze(0)
        for name in names
    }
    segments = tuple(packed.cu_seqlens.tolist())
    positions = batch["position_ids"][0]
    batch["packed_seq_params"] = packed_seq_params(micro_batch, segments, positions, max_positions=max_positions)
    return batch


def _no_tokens(_sequence: int, _start: int, count: int) -> np.ndarray:
    return np.zeros(count, dtype=np.int64)
