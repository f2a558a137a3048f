"""A library that keeps a plan for each size builds few, whatever lengths come; one that launches blocks for the longest
task in every task launches few for nothing. Counted as their operators are called."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness.attention_operators import with_parameters
from tests.harness.flash_operators import FLASH2_PARAMETERS, FLASH3_PARAMETERS
from wlb.attention.cudnn_kernel import CudnnKernel
from wlb.attention.flash2_kernel import Flash2Kernel
from wlb.attention.flash3_kernel import Flash3Kernel
from wlb.attention.partial import Partial
from wlb.attention.torch_kernel import TorchKernel
from wlb.sharding import SHARDERS, ShardCosts, calls
from wlb.sharding.index import gather_index
from wlb.sharding.length_classes import TILE_ROWS
from wlb.sharding.phases import Phase

WINDOW, CP_SIZE = 32768, 4


def _packs(count: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Log-normal lengths, a few documents of up to a window among them; a third of the packs are shorter."""
    rng = random.Random(seed)
    for number in range(count):
        room = WINDOW if number % 3 else rng.randrange(WINDOW // 2, WINDOW) // CP_SIZE * CP_SIZE
        lengths: list[int] = []
        while room:
            drawn = rng.uniform(0.3, 1) * WINDOW if rng.random() < 0.01 else rng.lognormvariate(6.5, 1.6)
            lengths.append(max(1, min(int(drawn), room)))
            room -= lengths[-1]
        yield tuple(lengths)


def _phases(count: int, seed: int) -> Iterator[Phase]:
    for number, lengths in enumerate(_packs(count, seed)):
        plan = SHARDERS["per_document" if number % 2 else "per_sequence"](lengths, CP_SIZE, ShardCosts())
        for rank in (0, 1):
            yield from (p for p in gather_index(plan, rank, None).phases if p.num_tasks)


def _cudnn(sizes: list[tuple[int, ...]]) -> CudnnKernel:
    def forward(**a: Any) -> Any:
        tasks = len(a["cu_seqlens_q"]) - 1
        assert len(a["cu_seqlens_q_padded"]) == len(a["cu_seqlens_kv_padded"]) == tasks + 1
        sizes.append((tasks, a["max_seqlen_q"], a["max_seqlen_kv"]))
        return a["q"], [a["q"].new_zeros(len(a["q"]), 1, 1)]

    def backward(dqkv_layout: Any, **a: Any) -> Any:
        sizes.append((len(a["cu_seqlens_q"]) - 1, a["max_seqlen_q"], a["max_seqlen_kv"]))
        return a["q"], a["k"], a["v"]

    operators = {"fused_attn_fwd": forward, "fused_attn_bwd": backward}
    return CudnnKernel(SimpleNamespace(FusedAttnBackend={"F16_arbitrary_seqlen": 1}, **operators))


def _flash(kernel: Any, parameters: Any) -> Callable[[list[tuple[int, ...]]], Any]:
    """Notes what backward is called with."""

    def make(sizes: list[tuple[int, ...]]) -> Any:
        def forward(a: Any) -> Any:
            return a["q"], a["q"].new_zeros(1, len(a["q"])), None, None

        def backward(a: Any) -> None:
            sizes.append((len(a["cu_seqlens_q"]) - 1, a["max_seqlen_q"], a["max_seqlen_k"]))

        return kernel(*(with_parameters(*p, f) for p, f in zip(parameters, (forward, backward), strict=True)))

    return make


def _torch(sizes: list[tuple[int, ...]]) -> TorchKernel:
    """Likewise."""

    def forward(query: Any, *_others: Any) -> Any:
        return query, query.new_zeros(1, len(query)), None

    def backward(_grad: Any, q: Any, k: Any, v: Any, _out: Any, _lse: Any, *edges: Any) -> Any:
        cu_q, _, max_q, max_k, *_ = edges
        sizes.append((len(cu_q) - 1, max_q, max_k))
        return q, k, v

    return TorchKernel(forward, backward)


def _sizes_of(make: Any, count: int, seed: int) -> list[tuple[int, ...]]:
    """What the operators of a kernel are called with, forward and backward."""
    sizes: list[tuple[int, ...]] = []
    kernel = make(sizes)
    buffer = torch.zeros(WINDOW, 1, 8, dtype=torch.bfloat16)
    sums = torch.zeros(WINDOW, 1, 8)
    for phase in _phases(count, seed):
        query, key = buffer[: phase.num_queries], buffer[: phase.num_keys]
        kernel.forward(Partial(query, 8, [phase]), query, key, key, phase, 1.0)
        grads = (sums[: phase.num_queries], sums[: phase.num_keys], sums[: phase.num_keys])
        merged = torch.zeros(phase.num_queries, 1)
        kernel.backward(grads, query, query, key, key, query, merged, phase, 1.0)
    return sizes


def test_few_sizes_for_many_packs() -> None:
    """All are powers of two. With up to 128 tasks, queries from 128 to 8,192 and keys from 128 to 32,768 there are at
    most 8 * 7 * 9 = 504, however long training is; 60 packs see an eighth of them."""
    sizes = _sizes_of(_cudnn, 60, seed=1)
    assert len(sizes) > 400
    assert all(n & (n - 1) == 0 for size in sizes for n in size)
    assert all(tasks <= 128 and 128 <= queries <= 8192 and 128 <= keys <= WINDOW for tasks, queries, keys in sizes)
    assert len(set(sizes)) <= 80


LAUNCHING = {
    "flash3": _flash(Flash3Kernel, FLASH3_PARAMETERS["3.0"]),
    "flash2": _flash(Flash2Kernel, FLASH2_PARAMETERS["2.8"]),
    "torch": _torch,
}


@pytest.mark.parametrize("name", LAUNCHING)
def test_few_blocks_are_launched_for_nothing(name: str) -> None:
    """What an operator that launches blocks for the longest task is asked for in backward, beside what tasks need."""
    sizes = _sizes_of(LAUNCHING[name], 20, seed=1)
    phases = list(_phases(20, seed=1))
    needed = sum(_tiles(stop - start) for p in phases for start, stop in p.call.keys.tolist())
    launched = sum(num_tasks * _tiles(most_keys) for num_tasks, _, most_keys in sizes)
    assert sum(num_tasks for num_tasks, _, _ in sizes) == sum(p.num_tasks for p in phases)
    assert len(sizes) < 2 * len(phases)
    assert needed <= launched <= 3 * needed
    assert sum(p.num_tasks * _tiles(p.call.most_keys) for p in phases) > 4 * needed, "in one call a phase"


def _tiles(rows: int) -> int:
    return -(-rows // TILE_ROWS)


def test_without_rounding_nearly_every_pack_would_bring_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "bucket", lambda count, least=1: count)
    """A backward call comes with the sizes of a forward one, so at most half of all are different."""
    sizes = _sizes_of(_cudnn, 60, seed=1)
    assert len(set(sizes)) > 0.4 * len(sizes)
