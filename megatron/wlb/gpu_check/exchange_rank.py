"""One of the two processes of `exchange`: its shard's attention over a real process group. Loads no Megatron.

python -m megatron.wlb.gpu_check.exchange_rank FOLDER BACKEND RANK
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist

from wlb.attention import CommType, GroupExchange, sharded_attention
from wlb.sharding import ShardPlan

_TIMEOUT_S = 30


def run_rank(folder: Path, backend: str, rank: int) -> None:
    """Reads `case.pt`, leaves `rank<rank>.pt`: by communication type, output, dq, dk and dv of the rank."""
    case = torch.load(folder / "case.pt")
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    size = len(case["shards"])
    dist.init_process_group(
        backend,
        # A file, not a port: nobody else can take it.
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    group = dist.group.WORLD
    assert group is not None
    exchange = GroupExchange(group)
    plan = ShardPlan.from_table(case["table"].numpy(), lengths=case["lengths"], cp_size=size)
    results: dict[str, list[torch.Tensor]] = {}
    for comm_type in get_args(CommType):
        *given, grad = (t.to(device) for t in case["shards"][rank])
        query, key, value = (t.requires_grad_() for t in given)
        out = sharded_attention(
            query, key, value, plan, rank, exchange, comm_type=comm_type, window_tokens=case["window"]
        )
        results[comm_type] = [t.detach().cpu() for t in (out, *torch.autograd.grad(out, (query, key, value), grad))]
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
