"""Where the state of packing lies beside a Megatron checkpoint.

Megatron itself saves the state of an external data loader (`--dataloader-save`) but never loads one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.training.checkpointing import get_checkpoint_name


def saved_state_path(load: str, iteration: int) -> Path | None:
    """The file that Megatron wrote for data-parallel rank 0; the state is the same for all ranks.

    The folder's name depends on whether the saving run had a pipeline.
    """
    for pipeline_parallel in (False, True):
        name = get_checkpoint_name(
            load,
            iteration,
            pipeline_parallel=pipeline_parallel,
            tensor_rank=0,
            pipeline_rank=0,
            expert_parallel=False,
            expert_rank=0,
            basename="train_dataloader_dprank000.pt",
        )
        if Path(name).is_file():
            return Path(name)
    return None


def load_state(path: Path) -> dict[str, Any]:
    """The dictionary that `PackedSteps.save_state` returned."""
    state: dict[str, Any] = torch.load(path, weights_only=True)["dataloader_state_dict"]
    return state
