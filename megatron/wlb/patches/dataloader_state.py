"""megatron.training.checkpointing:maybe_save_dataloader_state

What saves the state of an external data loader with a checkpoint. It takes one iterator, where virtual pipeline stages
have a list of them, and every context-parallel rank of a data-parallel rank would write the same file at once.
Seam that failed: the training loop makes the list itself, and calls this with no hook of ours before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.wlb.patches.registry import Patch


def make_patch(writes: Callable[[], bool]) -> Patch:
    """writes: () -> whether this rank may write; the same answer on all ranks of a data-parallel group."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def maybe_save_dataloader_state(train_iterator: Any, *args: Any, **kwargs: Any) -> None:
            if writes():
                # The iterators of all chunks have one state.
                first = train_iterator[0] if isinstance(train_iterator, list) else train_iterator
                original(first, *args, **kwargs)

        return maybe_save_dataloader_state

    return Patch(
        target="megatron.training.checkpointing:maybe_save_dataloader_state",
        distribution="megatron-core",
        versions=">=0.19.2,<0.20",
        source_digest="44184b052d8447d6",
        reason="it fails on the list of iterators of virtual stages, and all context-parallel ranks write one file",
        make=make,
    )
