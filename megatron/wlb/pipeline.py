"""Runs Megatron's pipeline schedules on micro-batches whose number and lengths come from the plan.

Every stage knows the plan, so a receiver knows the shape of each tensor before it arrives: nothing is
exchanged to find it out, and no stage can wait for a shape that never comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron.wlb.agreement import check_same_plan
from megatron.wlb.batch import PackedSteps
from megatron.wlb.parallel import ParallelDims
from megatron.wlb.telemetry import Telemetry
from wlb.schedule import PipelineShape


class PlannedP2PCommunicator(P2PCommunicator):
    """Takes the shapes of received tensors from two queues instead of asking the sender.

    shapes: of the activations of this replica's micro-batches, in the order in which they run.
    pipeline: its stages and chunks.
    forward_only: whether no gradients travel.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: Any,
        shapes: Sequence[tuple[int, int, int]],
        pipeline: PipelineShape,
        *,
        forward_only: bool,
    ) -> None:
        super().__init__(pp_group=pp_group, config=config)
        forward, backward = pipeline.arrivals(pp_group.rank(), len(shapes))
        self._forward = deque(shapes[i] for i in forward)
        self._backward = deque(() if forward_only else (shapes[i] for i in backward))

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Sequence[int], Sequence[int]]:
        return (
            self._forward.popleft() if recv_prev else (0, 0, 0),
            self._backward.popleft() if recv_next else (0, 0, 0),
        )

    def assert_drained(self) -> None:
        """Every planned tensor has been received."""
        assert not self._forward, f"{len(self._forward)} planned activations were never received"
        assert not self._backward, f"{len(self._backward)} planned gradients were never received"


def run_planned(schedule: Callable[..., Any], dims: ParallelDims, telemetry: Telemetry, call: dict[str, Any]) -> Any:
    """Run one step of `schedule` on the micro-batches of the next plan."""
    # With virtual stages, one iterator and one model a chunk; without, one model, in a list or not.
    iterators, models = (v if isinstance(v, list) else [v] for v in (call["data_iterator"], call["model"]))
    packed: PackedSteps = iterators[0].iterable.steps
    forward_only = call["forward_only"]
    replaying = iterators[0].replaying
    step = packed.current_step() if replaying else packed.begin_step()
    check_same_plan(step, dims)
    call["num_microbatches"] = len(step.micro_batches)
    if not (forward_only or replaying):
        # Documents only: padding is no useful work, and evaluation is no training. Once, however many chunks run them.
        for micro_batch in step.micro_batches:
            update_seqlen_stats_from_cu_seqlens(torch.from_numpy(micro_batch.cu_seqlens))

    config = get_model_config(models[0])
    communicator = None
    if dims.pp_size > 1:
        groups = call["pg_collection"] or ProcessGroupCollection.use_mpu_process_groups()
        # Between layers, sequence parallelism shares the tokens of a micro-batch among tensor-parallel ranks.
        shards = dims.tp_size if config.sequence_parallel else 1
        shapes = [(tokens // shards, 1, config.hidden_size) for tokens in packed.shard_tokens_of_step()]
        num_chunks = len(iterators)
        pipeline = PipelineShape(
            num_stages=dims.pp_size,
            num_chunks=num_chunks,
            group_size=config.microbatch_group_size_per_vp_stage if num_chunks > 1 else None,
        )
        communicator = PlannedP2PCommunicator(groups.pp, config, shapes, pipeline, forward_only=forward_only)
        call |= {"p2p_communicator": communicator, "pg_collection": groups}

    with telemetry.step(step, packed.plan_wait_s, config, dims, forward_only=forward_only):
        losses = schedule(**call)
    if communicator is not None:
        communicator.assert_drained()
    return losses
