"""How sharded attention is used: views, activation recompute, what travels, what is held."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.parity.sharded_cases import HEADS, errors, inputs, padded, plan_named, random_plan, run_dense, run_sharded
from wlb.attention import Mailbox, all_gather, all_ranks_attention, packed_attention, sharded_attention
from wlb.sharding import SHARDERS, ShardPlan, Span
from wlb.sharding.index import gather_index, ring_index

COMM_TYPES = ("all_gather", "p2p")
CP_SIZE = 4
LENGTHS = (61, 30, 8, 1, 24)
PLAN = random_plan(LENGTHS, CP_SIZE, 1)
WHOLE = ShardPlan(
    lengths=(8, 4, 4),
    ranks=((Span(document=0, start=0, stop=8),), tuple(Span(document=d, start=0, stop=4) for d in (1, 2))),
)
"""Every document on one rank."""


def _shards(pack: tuple[torch.Tensor, ...], plan: ShardPlan) -> list[list[torch.Tensor]]:
    return [[t[torch.from_numpy(plan.pack_indices(r))] for r in range(plan.cp_size)] for t in pack]


def _view(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    if kind == "sliced":
        return torch.cat((tensor, tensor, tensor), dim=-1)[..., tensor.shape[-1] : 2 * tensor.shape[-1]]
    if kind == "heads-outermost":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    return tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)


@pytest.mark.parametrize("comm_type", COMM_TYPES)
@pytest.mark.parametrize("kind", ["sliced", "heads-outermost", "size-outermost"])
def test_views_give_what_contiguous_tensors_give(kind: str, comm_type: str) -> None:
    *qkv, grads = _shards(inputs(sum(LENGTHS), HEADS["gqa"], seed=3), PLAN)

    def run(transform: Any) -> list[torch.Tensor]:
        leaves = [[transform(t).detach().requires_grad_() for t in by_rank] for by_rank in qkv]
        outs = all_ranks_attention(*leaves, PLAN, comm_type=comm_type)
        flat = [t for by_rank in leaves for t in by_rank]
        return [*outs, *torch.autograd.grad(outs, flat, [transform(g) for g in grads])]

    assert not any(_view(kind, t).is_contiguous() for by_rank in qkv for t in by_rank)
    for was, now in zip(run(torch.Tensor.contiguous), run(partial(_view, kind)), strict=True):
        assert torch.equal(was, now)


@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_the_gradient_of_a_sum(comm_type: str) -> None:
    """It is one number expanded over the output."""
    *qkv, grad = inputs(sum(LENGTHS), HEADS["gqa"], seed=4)
    wanted = run_dense((*qkv, torch.ones_like(grad)), LENGTHS)
    leaves = [[t.requires_grad_() for t in by_rank] for by_rank in _shards(tuple(qkv), PLAN)]
    outs = all_ranks_attention(*leaves, PLAN, comm_type=comm_type)
    sum(out.sum() for out in outs).backward()
    restore = torch.from_numpy(PLAN.restore)
    results = (torch.cat(outs).detach(), *(torch.cat([t.grad for t in by_rank]) for by_rank in leaves))
    assert max(errors(tuple(r[restore] for r in results), wanted)) <= 1e-12


@pytest.mark.parametrize("comm_type", COMM_TYPES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_gives_the_same_bits(use_reentrant: bool, comm_type: str) -> None:
    *qkv, grads = _shards(inputs(sum(LENGTHS), HEADS["gqa"], seed=5, dtype=torch.float32), PLAN)

    def run(*, recompute: bool) -> tuple[list[torch.Tensor], int]:
        leaves = [t.detach().clone().requires_grad_() for by_rank in qkv for t in by_rank]
        mailbox = Mailbox(CP_SIZE)

        def attention(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # As a layer: the core's inputs are computed, and recomputed, from the leaves.
            q, k, v = ([t * 1.5 for t in tensors[i * CP_SIZE : (i + 1) * CP_SIZE]] for i in range(3))
            return tuple(all_ranks_attention(q, k, v, PLAN, comm_type=comm_type, mailbox=mailbox))

        outs = checkpoint(attention, *leaves, use_reentrant=use_reentrant) if recompute else attention(*leaves)
        results = [*(o.detach() for o in outs), *torch.autograd.grad(outs, leaves, grads)] if not use_reentrant else []
        if use_reentrant:
            torch.autograd.backward(outs, grads)
            results = [*(o.detach() for o in outs), *(t.grad for t in leaves)]
        assert mailbox.num_waiting == 0
        return results, mailbox.num_messages

    stored, num_stored = run(recompute=False)
    recomputed, num_recomputed = run(recompute=True)
    for was, now in zip(stored, recomputed, strict=True):
        assert torch.equal(was, now)
    # Forward's messages once more: forward, keys of backward and gradients are three times as many as forward's.
    assert num_recomputed * 3 == num_stored * 4


def test_kept_and_gathered_again_are_the_same_bits() -> None:
    pack = inputs(sum(LENGTHS), HEADS["gqa"], seed=6, dtype=torch.float32)
    boxes = {keep: Mailbox(CP_SIZE) for keep in (True, False)}
    kept, again = (
        run_sharded(pack, PLAN, "all_gather", keep_gathered=keep, mailbox=box) for keep, box in boxes.items()
    )
    for one, two in zip(kept, again, strict=True):
        assert torch.equal(one, two)
    assert 3 * boxes[True].num_messages == 2 * boxes[False].num_messages > 0


@pytest.mark.parametrize("comm_type", COMM_TYPES)
@pytest.mark.parametrize("plan_name", [*SHARDERS, "random"])
def test_only_needed_rows_travel(plan_name: str, comm_type: str) -> None:
    """Bytes of forward are the plan's received tokens; gradients go the same way back in float32."""
    lengths = padded((61, 30, 8, 1, 20), CP_SIZE)
    plan = plan_named(plan_name, lengths, CP_SIZE, seed=4)
    heads = HEADS["value-smaller"]
    numbers = heads.num_kv_heads * (heads.head_size + heads.value_size)
    *qkv, grads = _shards(inputs(sum(lengths), heads, seed=7, dtype=torch.bfloat16), plan)
    leaves = [[t.requires_grad_() for t in by_rank] for by_rank in qkv]
    mailbox = Mailbox(CP_SIZE)
    outs = all_ranks_attention(*leaves, plan, comm_type=comm_type, mailbox=mailbox)
    into = [sum(sent[rank] for sent in mailbox.sent_bytes) for rank in range(CP_SIZE)]
    assert into == [plan.received_tokens(rank) * numbers * 2 for rank in range(CP_SIZE)]
    forward = [list(sent) for sent in mailbox.sent_bytes]
    torch.autograd.backward(outs, grads)
    for one in range(CP_SIZE):
        for other in range(CP_SIZE):
            # Forward, again in backward, and the other direction's gradients at twice the width.
            assert mailbox.sent_bytes[one][other] == 2 * forward[one][other] + 2 * forward[other][one]
    assert mailbox.num_waiting == 0


@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_a_window_sends_less(comm_type: str) -> None:
    """Two ranks, one document of 16: rank 1 holds [4, 12) and sees 2 keys before it, rank 0 2 keys before 12."""
    plan = plan_named("per_sequence", (16,), 2)
    pack = inputs(16, HEADS["gqa"], seed=8)
    mailbox = Mailbox(2)
    results = run_sharded(pack, plan, comm_type, window_tokens=3, mailbox=mailbox)
    assert max(errors(results, run_dense(pack, (16,), window_tokens=3))) <= 1e-12
    forward_rows = 2
    row_bytes = 2 * (8 + 8) * 8
    assert mailbox.sent_bytes == [[0, 3 * forward_rows * row_bytes], [3 * forward_rows * row_bytes, 0]]


@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_whole_documents_send_nothing_and_gather_nothing(comm_type: str) -> None:
    mailbox = Mailbox(2)
    pack = inputs(16, HEADS["gqa"], seed=9)
    results = run_sharded(pack, WHOLE, comm_type, mailbox=mailbox)
    assert max(errors(results, run_dense(pack, WHOLE.lengths))) <= 1e-12
    assert mailbox.num_messages == 0
    assert [gather_index(WHOLE, rank, None).gathered_rows for rank in range(2)] == [0, 0]
    assert not any(gather_index(WHOLE, rank, None).exchanges for rank in range(2))
    assert all(step.is_idle for rank in range(2) for step in ring_index(WHOLE, rank, None).steps)


def test_one_copy_of_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gathered buffer has each key that a rank needs once: what it receives, and its own ones before the last."""
    gathered_rows: list[int] = []
    original = all_gather._gathered

    def counting(*args: Any) -> torch.Tensor:
        buffer = original(*args)
        gathered_rows.append(len(buffer))
        return buffer

    monkeypatch.setattr(all_gather, "_gathered", counting)
    lengths = (64, 16, 3, 5)
    plan = ShardPlan.from_table(plan_named("per_sequence", (64, 16), 2).table, lengths=(64, 16), cp_size=2)
    # Pack cut at 20, 40, 60: rank 0 holds [0, 20) and [60, 64) of document 0 and all of document 1, rank 1 [20, 60).
    assert lengths[:2] == plan.lengths
    assert [[(s.document, s.start, s.stop) for s in spans] for spans in plan.ranks] == [
        [(0, 0, 20), (0, 60, 64), (1, 0, 16)],
        [(0, 20, 60)],
    ]
    run_sharded(inputs(80, HEADS["gqa"], seed=10), plan, "all_gather", keep_gathered=True)
    assert gathered_rows == [60, 20]


def test_one_rank_needs_no_exchange_and_is_packed_attention() -> None:
    lengths = (9, 1, 22)
    plan = plan_named("per_document", lengths, 1)
    query, key, value, _ = inputs(32, HEADS["value-smaller"], seed=11)
    wanted = packed_attention(query, key, value, (0, 9, 10, 32), window_tokens=5)
    for comm_type in COMM_TYPES:
        out = sharded_attention(query, key, value, plan, 0, None, comm_type=comm_type, window_tokens=5)
        assert torch.equal(out, wanted)


def test_an_empty_micro_batch() -> None:
    plan = ShardPlan(lengths=(), ranks=((), ()))
    empty = [[torch.empty(0, 4, 8, requires_grad=True) for _ in range(2)] for _ in range(3)]
    for comm_type in COMM_TYPES:
        outs = all_ranks_attention(*empty, plan, comm_type=comm_type)
        assert [o.shape for o in outs] == [(0, 4, 8)] * 2
        torch.autograd.backward(outs, [torch.empty(0, 4, 8)] * 2)
