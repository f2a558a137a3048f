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

from megatron.wlb.batch import PackedIterator
from megatron.wlb.parallel import ParallelDims
from megatron.wlb.telemetry import Telemetry
from wlb.data.planned_step import PlannedStep
from wlb.errors import PlanMismatchError


class PlannedP2PCommunicator(P2PCommunicator):
    """Takes the shapes of received tensors from two queues instead of asking the sender.

    shapes: of the activations of this replica's micro-batches, in the order in which they run. Without virtual
        stages, forward and backward passes both arrive in that order (1F1B).
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: Any, shapes: Sequence[tuple[int, int, int]]) -> None:
        super().__init__(pp_group=pp_group, config=config)
        self._forward = deque(() if self.is_pp_first_stage else shapes)
        self._backward = deque(() if self.is_pp_last_stage else shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Sequence[int], Sequence[int]]:
        return (
            self._forward.popleft() if recv_prev else (0, 0, 0),
            self._backward.popleft() if recv_next else (0, 0, 0),
        )

    def assert_drained(self, *, forward_only: bool) -> None:
        """Every planned tensor has been received."""
        assert not self._forward, f"{len(self._forward)} planned activations were never received"
        assert forward_only or not self._backward, f"{len(self._backward)} planned gradients were never received"


def run_planned(schedule: Callable[..., Any], dims: ParallelDims, telemetry: Telemetry, call: dict[str, Any]) -> Any:
    """Run one step of `schedule` on the micro-batches of the next plan."""
    iterator = call["data_iterator"]
    packed: PackedIterator = iterator.iterable
    forward_only = call["forward_only"]
    step = packed.current_step() if iterator.replaying else packed.begin_step()
    check_same_plan(step, dims)
    call["num_microbatches"] = len(step.micro_batches)

    model = call["model"]
    config = get_model_config(model[0] if isinstance(model, list) else model)
    communicator = None
    if dims.pp_size > 1:
        groups = call["pg_collection"] or ProcessGroupCollection.use_mpu_process_groups()
        # Between layers, sequence parallelism shares the tokens of a micro-batch among tensor-parallel ranks.
        shards = dims.tp_size if config.sequence_parallel else 1
        shapes = [(tokens // shards, 1, config.hidden_size) for tokens in packed.padded_tokens_of_step()]
        communicator = PlannedP2PCommunicator(groups.pp, config, shapes)
        call |= {"p2p_communicator": communicator, "pg_collection": groups}

    with telemetry.step(step, packed.plan_wait_s, config, dims, forward_only=forward_only):
        losses = schedule(**call)
    if communicator is not None:
        communicator.assert_drained(forward_only=forward_only)
    return losses


def check_same_plan(step: PlannedStep, dims: ParallelDims) -> None:
    """Compare the plan's fingerprint over all ranks, before the first message of the step.

    Raises:
        PlanMismatchError: on every rank, naming the ranks that differ from rank 0.
    """
    if dims.world_size == 1:
        return
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor([step.fingerprint], dtype=torch.int64, device=device)
    everyone = torch.empty(dims.world_size, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(everyone, mine)
    different = [rank for rank, fingerprint in enumerate(everyone.tolist()) if fingerprint != everyone[0].item()]
    if different:
        raise PlanMismatchError(
            f"ranks {different} planned step {step.step} otherwise than rank 0; do all ranks read the same index files?"
        )
