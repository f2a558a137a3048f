"""Rows between processes for the GPU check: the process group of training, here of one rank that sends to itself, and
of two processes where there are two GPUs.

Shapes: S rows sent, W numbers a row.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
import torch.distributed as dist

from megatron.wlb.gpu_check.kernels import Outcome
from megatron.wlb.gpu_check.model import relative_error
from megatron.wlb.gpu_check.packs import Heads, by_rank, draw_pack, in_pack_order
from megatron.wlb.gpu_check.rule import RESULTS
from megatron.wlb.gpu_check.sharding import LATE_CYCLES, run_plan
from wlb.attention import CommType, GroupExchange, Transfer
from wlb.attention.exchange import CONNECTING_BACKENDS, cuda_backend
from wlb.attention.transport import empty_rows, transport_for
from wlb.sharding import SHARDERS, ShardCosts

TOLERANCE = 0.01
EXCHANGE_RULE = (
    "every number that a rank sends itself arrives, however sizes change and memory is reused; two processes, where "
    f"there are two GPUs, give the results of one to {TOLERANCE:g}"
)
CP_SIZE = 2
CASE_FILE = "case.pt"
_TIMEOUT_S = 60
_ROOT = Path(__file__).resolve().parents[3]

# (S, W) sent, (S, W) received
_Send = Callable[[torch.Tensor, torch.Tensor], Transfer]


@dataclass(frozen=True, kw_only=True)
class ExchangeScale:
    """num_rows: S of successive messages, over and over. row_numbers: W. rounds: messages of each kind."""

    num_rows: tuple[int, ...]
    row_numbers: int
    rounds: int


def check_exchange(scale: ExchangeScale, lengths: tuple[int, ...], heads: Heads, tile_tokens: int) -> Outcome:
    """lengths, heads, tile_tokens: of the pack of the two processes, see `sharding.ShardingScale`."""
    group = dist.group.WORLD
    assert group is not None
    exchange = GroupExchange(group)
    measured: dict[str, Any] = {
        "all_to_all": _to_itself(scale, lambda s, r: exchange.all_to_all(s, [len(s)], r, [len(r)]))
    }
    if cuda_backend(group) in CONNECTING_BACKENDS:
        measured["shift"] = _to_itself(scale, lambda s, r: exchange.shift(s, 0, r, 0))
    else:
        measured["shift"] = {"skipped": f"{cuda_backend(group)} has no messages of a rank to itself"}
    passed = all(case.get("wrong numbers", 0) == 0 for case in measured.values())
    on_cuda = torch.empty(0).cuda().is_cuda
    if on_cuda and torch.cuda.device_count() < CP_SIZE:
        measured["two processes"] = {"skipped": "two ranks of NCCL need two GPUs, and there is one"}
        return passed, measured
    differences = _in_two_processes(lengths, heads, tile_tokens, backend="nccl" if on_cuda else "gloo")
    return passed and all(d <= TOLERANCE for d in differences.values()), measured | {"two processes": differences}


def _to_itself(scale: ExchangeScale, send: _Send) -> dict[str, Any]:
    """As attention does it, each message late, while compute takes and fills memory of the same sizes."""
    device = torch.empty(0).cuda().device
    transport = transport_for(device)
    numbers = torch.arange(max(scale.num_rows) * scale.row_numbers, device=device).remainder_(127)
    numbers = numbers.view(-1, scale.row_numbers).bfloat16()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    num_messages = sent_bytes = 0
    for number in range(scale.rounds):
        num_rows = scale.num_rows[number % len(scale.num_rows)]
        source = numbers[:num_rows] + number % 3  # so that what a buffer held before is wrong
        with transport.begin():
            if device.type == "cuda":
                torch.cuda._sleep(LATE_CYCLES)
            sent = empty_rows(transport, source, num_rows, scale.row_numbers)
            sent.copy_(source)
            received = empty_rows(transport, source, num_rows, scale.row_numbers)
            transfer = send(sent, received)
        num_messages, sent_bytes = num_messages + 1, sent_bytes + sent.numel() * sent.element_size()
        del sent
        for other in scale.num_rows:
            torch.full((transport.capacity(other), scale.row_numbers), 200.0, dtype=source.dtype, device=device)
        with transport.end():
            transfer.wait()
        wrong += (received != source).sum()
        del transfer, received, source
        if number % len(scale.num_rows) == 0:
            torch.cuda.empty_cache()
    return {"wrong numbers": int(wrong.item()), "messages": num_messages, "MiB": sent_bytes / 2**20}


def _in_two_processes(lengths: tuple[int, ...], heads: Heads, tile_tokens: int, *, backend: str) -> dict[str, float]:
    """By exchange and result: relative error against all ranks in this process."""
    plan = SHARDERS["per_document"](lengths, CP_SIZE, ShardCosts(tile_tokens=tile_tokens))
    pack = draw_pack(sum(lengths), heads, seed=6)
    shards = list(zip(*(by_rank(tensor, plan) for tensor in pack), strict=True))
    with TemporaryDirectory(prefix="exchange-") as name:
        folder = Path(name)
        case = {"table": torch.from_numpy(plan.table), "lengths": plan.lengths, "window": heads.window_tokens}
        torch.save(case | {"shards": [[t.cpu() for t in shard] for shard in shards]}, folder / CASE_FILE)
        found = _run_ranks(folder, backend)
    differences = {}
    for comm_type in get_args(CommType):
        wanted, _ = run_plan(pack, plan, comm_type, heads, kernel="auto")
        for i, result in enumerate(RESULTS):
            ours = in_pack_order([rank[comm_type][i] for rank in found], plan)
            differences[f"{comm_type}: {result}"] = relative_error(ours, wanted[i].cpu())
    return differences


def _run_ranks(folder: Path, backend: str) -> list[dict[str, list[torch.Tensor]]]:
    """By rank, what `exchange_rank` left. Raises RuntimeError with the end of its log where one fails."""
    logs = [folder / f"rank{rank}.log" for rank in range(CP_SIZE)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                command = [
                    sys.executable,
                    "-m",
                    "megatron.wlb.gpu_check.exchange_rank",
                    str(folder),
                    backend,
                    str(rank),
                ]
                processes.append(subprocess.Popen(command, cwd=_ROOT, stdout=file, stderr=subprocess.STDOUT))
        for process, log in zip(processes, logs, strict=True):
            if (code := process.wait(_TIMEOUT_S)) != 0:
                text = log.read_text(errors="replace")
                raise RuntimeError(f"{log.stem} of two processes ended with exit code {code}:\n{text[-2000:]}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(CP_SIZE)]
