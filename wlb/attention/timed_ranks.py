"""Context-parallel ranks as processes of their own over gloo, that time sharded attention and measure its memory.

Shapes: T tokens of the shard, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wlb.attention.exchange import GroupExchange
from wlb.attention.gather_memory import GatherMemory
from wlb.attention.sharded import CommType, sharded_attention
from wlb.errors import WlbError
from wlb.sharding.index import gather_index
from wlb.sharding.plan import ShardPlan

_START_UP_S = 60.0  # loading libraries and meeting each other
_ENDING_S = 5.0


class RankFailed(WlbError):
    """A rank raised, died or did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Heads of one attention layer, keys and values of one size; dtype: as torch names it, such as "float32"."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def row_numbers(self) -> int:
        """Of the key and the value of one token."""
        return 2 * self.num_kv_heads * self.head_size

    @property
    def row_bytes(self) -> int:
        return self.row_numbers * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Of forward and backward on one rank. busy_s: of its processor, without waiting for keys or for other programs."""

    elapsed_s: float
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of keys with their values from other ranks on one rank; see `GatherMemory`.

    gathered_rows: of the buffer, by the plan. kept_bytes: alive between the passes.
    attending_bytes, peak_bytes: of the forward pass. backward_peak_bytes: gradients included.
    """

    gathered_rows: int
    attending_bytes: int
    peak_bytes: int
    kept_bytes: int
    backward_peak_bytes: int


class AttentionRanks:
    """Starts the ranks, and stops them with `close`, also after an error.

    folder: empty, where they find each other. timeout_s: for one call on all ranks.
    """

    def __init__(self, cp_size: int, layer: Layer, folder: Path, *, timeout_s: float) -> None:
        self.layer = layer
        self._timeout_s = timeout_s
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._started = False
        context = multiprocessing.get_context("spawn")
        for rank in range(cp_size):
            here, there = context.Pipe()
            # Ranks end with this process, whatever ends it: they wait for its next word.
            process = context.Process(
                target=_serve, args=(rank, cp_size, layer, str(folder), timeout_s, there), daemon=True
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def times(self, plan: ShardPlan, comm_type: CommType) -> list[RankTime]:
        """Of each rank, from a barrier on. The first call with a plan sets it up as well. Raises RankFailed."""
        return self._ask("times", plan, comm_type)

    def memory(self, plan: ShardPlan, *, keep_gathered: bool) -> list[RankMemory]:
        """Of communication type all_gather on each rank. Raises RankFailed."""
        return self._ask("memory", plan, keep_gathered)

    def close(self) -> None:
        """Stop all ranks; those that do not stop by themselves are killed."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        deadline_s = time.monotonic() + _ENDING_S
        for process in self._processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._connections, self._processes = [], []

    def _ask(self, kind: str, *question: Any) -> list[Any]:
        deadline_s = time.monotonic() + self._timeout_s + (0.0 if self._started else _START_UP_S)
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((kind, *question))
            except OSError as error:
                raise RankFailed(f"rank {rank} must be alive, but it ended") from error
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            pending = [c for rank, c in enumerate(self._connections) if rank not in answers]
            ready = wait(pending, timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                silent = [rank for rank in range(len(self._connections)) if rank not in answers]
                raise RankFailed(f"ranks must answer within {self._timeout_s} s, but {silent} did not")
            for rank in [rank for rank, c in enumerate(self._connections) if c in ready]:
                try:
                    raised, answers[rank] = self._connections[rank].recv()
                except EOFError as error:
                    raise RankFailed(f"rank {rank} must be alive, but it ended") from error
                if raised:
                    raise RankFailed(f"rank {rank} failed: {answers[rank]}")
        self._started = True
        return [answers[rank] for rank in range(len(self._connections))]


def _serve(rank: int, cp_size: int, layer: Layer, folder: str, timeout_s: float, connection: Connection) -> None:
    """Answer until there is nobody to ask, or the word to stop comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks handles it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    plans: dict[int, ShardPlan] = {}
    try:
        with suppress(EOFError, BrokenPipeError):
            # A file, not a port: nobody else can take it.
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/meeting",
                rank=rank,
                world_size=cp_size,
                timeout=timedelta(seconds=timeout_s + _START_UP_S),
            )
            group = dist.group.WORLD
            assert group is not None
            exchange = GroupExchange(group)
            while (question := connection.recv()) is not None:
                kind, sent_plan, option = question
                # The same object each time: what is set up for a plan is kept with it.
                plan = plans.setdefault(sent_plan.fingerprint, sent_plan)
                answer = _memory if kind == "memory" else _times
                connection.send((False, answer(exchange, layer, plan, option)))
            dist.destroy_process_group()
    except Exception as error:
        with suppress(OSError):
            connection.send((True, f"{type(error).__name__}: {error}"))


@lru_cache(maxsize=2)
def _tensors(layer: Layer, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query (T, N, H), key and value (T, K, H), and the output's gradient (T, N, H)."""
    generator = torch.Generator().manual_seed(tokens)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, layer.head_size, generator=generator).to(layer.torch_dtype)

    query, key, value = (random(n).requires_grad_() for n in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads))
    return query, key, value, random(layer.num_heads)


def _times(exchange: GroupExchange, layer: Layer, plan: ShardPlan, comm_type: CommType) -> RankTime:
    query, key, value, grad = _tensors(layer, plan.rank_tokens)
    dist.barrier()
    begin_s, begin_busy_s = time.perf_counter(), time.thread_time()
    out = sharded_attention(query, key, value, plan, exchange.rank, exchange, comm_type=comm_type)
    torch.autograd.grad(out, (query, key, value), grad)
    return RankTime(elapsed_s=time.perf_counter() - begin_s, busy_s=time.thread_time() - begin_busy_s)


def _memory(exchange: GroupExchange, layer: Layer, plan: ShardPlan, keep_gathered: bool) -> RankMemory:
    query, key, value, grad = _tensors(layer, plan.rank_tokens)
    with GatherMemory(layer.row_numbers) as memory:
        out = sharded_attention(
            query, key, value, plan, exchange.rank, exchange, comm_type="all_gather", keep_gathered=keep_gathered
        )
        attending_bytes, peak_bytes, kept_bytes = memory.attending_bytes, memory.peak_bytes, memory.live_bytes
        memory.reset()
        torch.autograd.grad(out, (query, key, value), grad)
    return RankMemory(
        gathered_rows=gather_index(plan, exchange.rank, None).gathered_rows,
        attending_bytes=attending_bytes,
        peak_bytes=peak_bytes,
        kept_bytes=kept_bytes,
        backward_peak_bytes=memory.peak_bytes,
    )
