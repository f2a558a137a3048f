"""What gathering keys and values takes of the memory of the rank that receives most, beside what its plan says.

Shapes: G rows of the gathered buffer, W numbers of a row's key and value.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from megatron.wlb.gpu_check.packs import Tensors, by_rank, draw_pack
from megatron.wlb.gpu_check.rank_times import TimesScale, draw_lengths
from wlb.attention import KvExchange, Mailbox, Transfer
from wlb.attention.in_process import in_lockstep
from wlb.attention.sharded import checked_call, path_of
from wlb.sharding import SHARDERS, ShardPlan

MEMORY_RULE = (
    "the gathered buffer holds one row for each key before a rank's last span of a document, so none for a document "
    "that the rank holds whole"
)


def check_memory(scale: TimesScale) -> tuple[bool, dict[str, Any]]:
    """Of one pack of the largest size, by ranks and sharder; the peak on CUDA only, own rows to send included."""
    num_tokens = max(scale.pack_tokens)
    lengths = draw_lengths(scale, num_tokens, seed=0)
    pack = draw_pack(num_tokens, scale.heads, seed=0)
    row_bytes = scale.heads.kv_numbers * pack[1].element_size()
    measured: dict[str, Any] = {"keys and values of the pack MiB": num_tokens * row_bytes / 2**20}
    passed = True
    for cp_size in scale.cp_sizes:
        for name, shard in SHARDERS.items():
            plan = shard(lengths, cp_size, scale.costs)
            rank = max(range(cp_size), key=plan.received_tokens)
            gathered, peak_bytes = _run(pack, plan, rank)
            rows = [len(g) for g in gathered]
            planned = [_keys_before_last_spans(plan, r) for r in range(cp_size)]
            case = {
                "received MiB": plan.received_tokens(rank) * row_bytes / 2**20,
                "planned MiB": planned[rank] * row_bytes / 2**20,
                "gathered MiB": gathered[rank].numel() * gathered[rank].element_size() / 2**20,
            }
            measured[f"CP {cp_size}, {name}"] = case | {f"{k} MiB": v / 2**20 for k, v in peak_bytes.items()}
            passed &= rows == planned and all(g[0].numel() == scale.heads.kv_numbers for g in gathered if len(g))
    return passed, measured


class _HoldingExchange:
    """A `KvExchange` that keeps what was sent, so that no rank's memory is freed in another rank's segment."""

    def __init__(self, exchange: KvExchange) -> None:
        self._exchange = exchange
        self.size, self.rank = exchange.size, exchange.rank
        self._sent: list[torch.Tensor] = []

    def all_to_all(self, sent: torch.Tensor, *args: Any) -> Transfer:
        self._sent.append(sent)
        return self._exchange.all_to_all(sent, *args)

    def shift(self, sent: torch.Tensor, *args: Any) -> Transfer:
        self._sent.append(sent)
        return self._exchange.shift(sent, *args)


def _keys_before_last_spans(plan: ShardPlan, rank: int) -> int:
    """Spans are ordered by start, so of each document the last one stays."""
    return sum({s.document: s.start for s in plan.ranks[rank]}.values())


def _run(pack: Tensors, plan: ShardPlan, rank: int) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Gathered buffers (G, W) by rank; bytes that `rank` adds at most in a forward and in a backward pass."""
    path, mailbox = path_of("all_gather"), Mailbox(plan.cp_size)
    shards = list(zip(*(by_rank(t, plan) for t in pack), strict=True))
    calls = [
        checked_call(
            *(query, key, value, plan, r, _HoldingExchange(mailbox.exchange(r))),
            comm_type="all_gather",
            scale=None,
            window_tokens=None,
            keep_gathered=True,
        )
        for r, (query, key, value, _) in enumerate(shards)
    ]
    peaks: dict[str, int] = {}
    forwards = [path.forward(c, *s[:3]) for c, s in zip(calls, shards, strict=True)]
    # Where the CPU takes the place of a device nothing counts what is allocated.
    watch = _with_peak if pack[0].is_cuda else _unwatched
    saved = in_lockstep(watch(forwards, rank, "forward peak", peaks))
    backwards = [path.backward(c, v, *s) for c, v, s in zip(calls, saved, shards, strict=True)]
    in_lockstep(watch(backwards, rank, "backward peak", peaks))
    return [s.gathered for s in saved if s.gathered is not None], peaks


def _with_peak[R](
    ranks: Sequence[Generator[None, None, R]], rank: int, name: str, peaks: dict[str, int]
) -> list[Generator[None, None, R]]:
    """The same generators, `peaks[name]` set by that of `rank` as it runs."""

    def watched(generator: Generator[None, None, R]) -> Generator[None, None, R]:
        held = peak = 0
        while True:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            try:
                next(generator)
            except StopIteration as end:
                return end.value
            finally:
                peak = max(peak, held + torch.cuda.max_memory_allocated() - before)
                held += torch.cuda.memory_allocated() - before
                peaks[name] = peak
            yield

    return [watched(g) if r == rank else g for r, g in enumerate(ranks)]


def _unwatched[R](
    ranks: Sequence[Generator[None, None, R]], _rank: int, _name: str, _peaks: dict[str, int]
) -> list[Generator[None, None, R]]:
    return list(ranks)
