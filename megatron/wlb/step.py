"""One micro-batch through the model: the forward step of a packed run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.training.global_vars import get_timers

from megatron.wlb.stock import masked_loss


def packed_forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """The forward step of `megatron.training.pretrain` for planned micro-batches."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next(data_iterator)
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=batch["packed_seq_params"],
    )
    return output, partial(masked_loss, batch["loss_mask"])
