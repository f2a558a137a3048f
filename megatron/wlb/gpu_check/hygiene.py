"""Whether attention makes the launching thread wait for the device, and how varying lengths use its memory.

Shapes: T tokens of the pack.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, get_args

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.wlb.gpu_check.model import SmallGpt, packed_batch, packed_gpt
from megatron.wlb.gpu_check.packs import Heads, by_rank, draw_pack
from megatron.wlb.gpu_check.rank_times import TimesScale, draw_lengths
from wlb.attention import CommType, all_ranks_attention
from wlb.documents import MicroBatch, documents_from_lengths
from wlb.sharding import SHARDERS, ShardCosts

SYNCS_RULE = "after one micro-batch, attention of further ones waits for nothing: 0 host syncs, forward and backward"
ALLOCATOR_RULE = "losses finite; no figure decides anything"

_SYNC_MESSAGE = "synchronizing CUDA operation"


@dataclass(frozen=True, kw_only=True)
class HygieneScale:
    """cp_sizes: of the attention. sync_lengths: of micro-batches of equal T, the first one warms up.

    model, num_micro_batches, most_tokens: whose memory is watched, and on what; T varies from a half to the whole.
    """

    cp_sizes: tuple[int, ...]
    heads: Heads
    sync_lengths: tuple[tuple[int, ...], ...]
    tile_tokens: int
    model: SmallGpt
    num_micro_batches: int
    most_tokens: int


class _CountingMode(TorchDispatchMode):
    """Operators that hand a value to the host, where there is no device whose driver could say so."""

    _WAITING = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_dim"})

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in self._WAITING:
            self._found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_syncs(device: torch.device) -> Iterator[list[str]]:
    """Where the host waits for `device` inside the block, one entry each time: CUDA's own word, else by operator."""
    found: list[str] = []
    if device.type != "cuda":
        with _CountingMode(found):
            yield found
        return
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found += [f"{w.filename}:{w.lineno}" for w in caught if _SYNC_MESSAGE in str(w.message)]


def check_syncs(scale: HygieneScale, *, engine: bool) -> tuple[bool, dict[str, Any]]:
    """By number of ranks and exchange: syncs of micro-batches whose plan was there before, and whose plan is new.

    Of the step of a whole model: where it waits, for information: Megatron has its own reasons.
    """
    measured: dict[str, Any] = {}
    passed = True
    for cp_size in scale.cp_sizes:
        for comm_type in get_args(CommType):
            counts = _attention_syncs(scale, cp_size, comm_type)
            measured[f"CP {cp_size}, {comm_type}"] = counts
            passed &= counts["known plan"] == counts["new plan"] == 0
    places = _model_syncs(scale, engine=engine)
    measured["a GPT's forward and backward"] = {
        "host syncs": len(places),
        "places": "; ".join(sorted(set(places))) or "none",
    }
    return passed, measured


def _attention_syncs(scale: HygieneScale, cp_size: int, comm_type: CommType) -> dict[str, Any]:
    pack = draw_pack(sum(scale.sync_lengths[0]), scale.heads, seed=2)
    costs = ShardCosts(tile_tokens=scale.tile_tokens)
    plans = [SHARDERS["per_document"](lengths, cp_size, costs) for lengths in scale.sync_lengths]
    shards = [[by_rank(t, plan) for t in pack] for plan in plans]

    def step(i: int) -> None:
        query, key, value, grad = shards[i]
        leaves = [t.requires_grad_() for tensors in (query, key, value) for t in tensors]
        outs = all_ranks_attention(query, key, value, plans[i], comm_type=comm_type)
        torch.autograd.grad(outs, leaves, grad)

    step(0)
    with host_syncs(pack[0].device) as known:
        step(0)
    with host_syncs(pack[0].device) as new:
        for i in range(1, len(plans)):
            step(i)
    places = sorted({*known, *new})
    return {"known plan": len(known), "new plan": len(new), "places": "; ".join(places) or "none"}


def _model_syncs(scale: HygieneScale, *, engine: bool) -> list[str]:
    model = packed_gpt(scale.model, torch.bfloat16, transformer_engine=engine)
    steps = [_training_step(model, lengths) for lengths in scale.sync_lengths]
    steps[0]()
    with host_syncs(next(model.parameters()).device) as found:
        for step in steps[1:]:
            step()
    return found


def check_allocator(
    scale: HygieneScale, packs: TimesScale, budget_s: float, *, engine: bool
) -> tuple[bool, dict[str, Any]]:
    """Peaks of what was allocated and of what PyTorch reserved for it, over micro-batches of varying length."""
    deadline_s = monotonic() + budget_s
    model = packed_gpt(scale.model, torch.bfloat16, transformer_engine=engine)
    rng = np.random.default_rng(3)
    on_cuda = next(model.parameters()).is_cuda
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses: list[torch.Tensor] = []
    segments = []
    for number in range(scale.num_micro_batches):
        if number > 2 and monotonic() > deadline_s:
            break
        num_tokens = int(rng.integers(scale.most_tokens // 2, scale.most_tokens + 1))
        losses.append(_training_step(model, draw_lengths(packs, num_tokens, seed=number))())
        segments.append(_stat("segment.all.allocated"))
    finite = all(map(math.isfinite, torch.stack(losses).tolist()))
    measured: dict[str, Any] = {"micro-batches": len(losses), "losses finite": finite}
    if on_cuda:
        allocated, reserved = _stat("allocated_bytes.all.peak"), _stat("reserved_bytes.all.peak")
        measured |= {
            "peak allocated MiB": allocated / 2**20,
            "peak reserved MiB": reserved / 2**20,
            "reserved over allocated": reserved / allocated,
            "blocks asked of the driver": segments[-1],
            "of these in the last half": segments[-1] - segments[len(segments) // 2],
            "retries": _stat("num_alloc_retries"),
        }
    else:
        measured["memory"] = "not measured: without a device nothing counts what is allocated"
    return finite, measured


def _stat(name: str) -> int:
    return int(torch.cuda.memory_stats().get(name, 0))


def _training_step(model: Any, lengths: Sequence[int]) -> Callable[[], torch.Tensor]:
    """Forward and backward of one micro-batch whose batch is on the device; returns the loss, on the device too."""
    micro_batch = MicroBatch(documents=documents_from_lengths(lengths))
    rng = np.random.default_rng(len(lengths))
    stored = [rng.integers(1, model.vocab_size, size=n + 1) for n in lengths]
    batch = packed_batch(model, stored, micro_batch, pad_to_multiple=16)

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        per_token = model(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["labels"],
            packed_seq_params=batch["packed_seq_params"],
        )
        loss = (per_token * batch["loss_mask"]).sum() / sum(lengths)
        loss.backward()
        return loss.detach()

    return step
