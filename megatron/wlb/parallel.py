"""The only reader of Megatron's `parallel_state`: everything else is handed a `ParallelDims`."""

from __future__ import annotations

from dataclasses import dataclass

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
        import torch.distributed as dist

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
