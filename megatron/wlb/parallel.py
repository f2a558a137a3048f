"""The only reader of Megatron's `parallel_state`: everything else is handed what it needs from here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """Sizes of the parallel dimensions and this process's rank in each."""

    rank: int
    world_size: int
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    dp_size: int
    dp_rank: int
    cp_size: int
    cp_rank: int

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @classmethod
    def current(cls) -> ParallelDims:
        """Read `parallel_state`; it must be initialised."""
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            tp_size=parallel_state.get_tensor_model_parallel_world_size(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            cp_size=parallel_state.get_context_parallel_world_size(),
            cp_rank=parallel_state.get_context_parallel_rank(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSource:
    """From whom a rank gets its batches in plain Megatron, and what of them it needs.

    tp_source: global rank of the tensor-parallel rank that reads them.
    is_first_stage, is_last_stage: of the model chunk `vp_stage`, not of the rank, where there are virtual stages.
    """

    tp_rank: int
    tp_source: int
    tp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    is_first_stage: bool
    is_last_stage: bool

    @classmethod
    def of_chunk(cls, vp_stage: int | None) -> BatchSource:
        """Read `parallel_state` for a model chunk; `vp_stage` is None without virtual stages."""
        ignore_virtual = vp_stage is None
        return cls(
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_source=parallel_state.get_tensor_model_parallel_src_rank(),
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            cp_group=parallel_state.get_context_parallel_group(),
            is_first_stage=parallel_state.is_pipeline_first_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage),
            is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage),
        )


@contextmanager
def single_process(backend: str) -> Iterator[None]:
    """Megatron's process groups for one process, so that a model can be built without a launcher.

    backend: "nccl" or "gloo".
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
