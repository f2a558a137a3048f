"""One micro-batch through the model: the forward step of a packed run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.training.global_vars import get_timers
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron.wlb.packed_seq_params import PlannedPackedSeqParams
from megatron.wlb.stock import masked_loss


def packed_forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """The forward step of `megatron.training.pretrain` for planned micro-batches."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next(data_iterator)
    timers("batch-generator").stop()
    packed: PlannedPackedSeqParams = batch["packed_seq_params"]
    if torch.is_grad_enabled():
        # Documents only: padding is no useful work, and evaluation is no training.
        micro_batch = packed.micro_batch
        assert micro_batch is not None
        update_seqlen_stats_from_cu_seqlens(torch.from_numpy(micro_batch.cu_seqlens))
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed,
    )
    return output, partial(masked_loss, batch["loss_mask"])
