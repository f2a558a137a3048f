"""Sharded attention between processes, through gloo, against the dense oracle in each of them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.harness.processes import RankFailure, run_ranks
from tests.parity.sharded_cases import HEADS, inputs, padded, plan_named, random_plan, run_dense
from wlb.sharding import SHARDERS, ShardPlan

LENGTHS = (61, 1, 30, 8, 24)
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}
TIMEOUT_S = 60.0


def _join() -> Any:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    return dist


def _error(plan: ShardPlan, exchange: Any, comm_type: str, heads: str, dtype: torch.dtype, **options: Any) -> float:
    """Largest error of this rank's output, dq, dk, dv against the oracle's rows of it."""
    from wlb.attention import sharded_attention

    rank = exchange.rank
    pack = inputs(plan.num_tokens, HEADS[heads], seed=3, dtype=dtype)
    window = {k: v for k, v in options.items() if k == "window_tokens"}
    wanted = run_dense(tuple(t.double() for t in pack), plan.lengths, **window)
    held = torch.from_numpy(plan.pack_indices(rank))
    *leaves, grad = (t[held].requires_grad_() for t in pack)
    out = sharded_attention(*leaves, plan, rank, exchange, comm_type=comm_type, **options)
    results = (out, *torch.autograd.grad(out, leaves, grad.detach()))
    exact = [w[held] for w in wanted]
    return max(
        float((r.detach().double() - w).abs().max() / x.abs().max())
        for r, w, x in zip(results, exact, wanted, strict=True)
    )


def measure() -> dict[str, float]:
    """Error over bound of every case on this rank. Runs on all ranks."""
    dist = _join()
    from wlb.attention import GroupExchange

    exchange = GroupExchange(dist.group.WORLD)
    lengths = padded(LENGTHS, exchange.size)
    outcome: dict[str, float] = {}

    def record(
        name: str, plan: ShardPlan, exchange: Any, comm_type: str, heads: str, dtype: Any, **options: Any
    ) -> None:
        error = _error(plan, exchange, comm_type, heads, dtype, **options)
        outcome[f"{name} {comm_type} {heads} {dtype} {options}"] = error / BOUNDS[dtype]

    for comm_type in ("all_gather", "p2p"):
        for number, name in enumerate((*SHARDERS, "random")):
            plan = plan_named(name, lengths, exchange.size, seed=number)
            heads = list(HEADS)[number % len(HEADS)]
            for dtype in BOUNDS:
                record(name, plan, exchange, comm_type, heads, dtype)
            record(name, plan, exchange, comm_type, heads, torch.float32, window_tokens=7)
        # Nobody needs anything; only the last rank receives.
        whole = plan_named("random", (16,) * exchange.size, exchange.size, seed=1)
        record("equal", whole, exchange, comm_type, "gqa", torch.float32)
        record("per rank", _whole(exchange.size), exchange, comm_type, "gqa", torch.float32)
        record("in order", _in_order(exchange.size), exchange, comm_type, "gqa", torch.float32)
    plan = random_plan(lengths, exchange.size, 5)
    record("kept", plan, exchange, "all_gather", "mqa", torch.float32, keep_gathered=True)
    if exchange.size == 4:
        # Groups in which a rank's number is not its number in the world.
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        own = GroupExchange(groups[dist.get_rank() % 2])
        pair_lengths = padded(LENGTHS, 2)
        for comm_type in ("all_gather", "p2p"):
            record("pairs", random_plan(pair_lengths, 2, 7), own, comm_type, "gqa", torch.float32)
    dist.destroy_process_group()
    return outcome


def _whole(size: int) -> ShardPlan:
    """A document a rank."""
    from wlb.sharding.plan import plan_of_chunks

    return plan_of_chunks((16,) * size, size, [(r, r, 0, 16) for r in range(size)])


def _in_order(size: int) -> ShardPlan:
    """One document in pieces, first to last rank: the first receives nothing, the last sends nothing."""
    from wlb.sharding.plan import plan_of_chunks

    return plan_of_chunks((8 * size,), size, [(r, 0, 8 * r, 8 * r + 8) for r in range(size)])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_equals_the_oracle(world_size: int) -> None:
    outcomes = run_ranks(measure, world_size, timeout_s=TIMEOUT_S)
    assert len(outcomes) == world_size
    for rank, outcome in enumerate(outcomes):
        assert len(outcome) >= 2 * (4 * (len(SHARDERS) + 1) + 3) + 1
        worst = max(outcome, key=outcome.__getitem__)
        assert outcome[worst] <= 1, f"rank {rank}: {worst} is {outcome[worst]:.3g} times its bound"


def overlap() -> dict[str, float]:
    """Seconds in which ranks wait that sent late. Runs on two ranks, of which rank 1 sends a second late."""
    dist = _join()
    from wlb.attention import GroupExchange

    exchange = GroupExchange(dist.group.WORLD)
    rows = torch.arange(12, dtype=torch.bfloat16).view(6, 2) + 100 * exchange.rank
    seconds: dict[str, float] = {}
    for name in ("all_to_all", "shift"):
        received = torch.zeros(6, 2, dtype=torch.bfloat16)
        dist.barrier()
        if exchange.rank == 1:
            time.sleep(0.5)
        begin_s = time.perf_counter()
        peer = 1 - exchange.rank
        counts = [6 if r == peer else 0 for r in range(2)]
        if name == "all_to_all":
            transfer = exchange.all_to_all(rows, counts, received, counts)
        else:
            transfer = exchange.shift(rows, peer, received, peer)
        seconds[f"{name} started"] = time.perf_counter() - begin_s
        transfer.wait()
        seconds[f"{name} over"] = time.perf_counter() - begin_s
        assert torch.equal(received, rows - 100 * exchange.rank + 100 * peer)
    dist.destroy_process_group()
    return seconds


def test_a_transfer_runs_while_its_rank_goes_on() -> None:
    early, _ = run_ranks(overlap, 2, timeout_s=TIMEOUT_S)
    for name in ("all_to_all", "shift"):
        assert early[f"{name} started"] < 0.25
        assert early[f"{name} over"] > 0.3


def misfit() -> None:
    """Rank 1 holds a plan of four ranks. Runs on two."""
    dist = _join()
    from wlb.attention import GroupExchange, sharded_attention

    exchange = GroupExchange(dist.group.WORLD)
    plan = plan_named("per_document", (32,), 4 if exchange.rank else 2)
    tensors = [torch.zeros(plan.rank_tokens, 2, 8) for _ in range(3)]
    sharded_attention(*tensors, plan, exchange.rank, exchange, comm_type="all_gather")


def test_a_plan_of_other_ranks_is_named_at_once() -> None:
    with pytest.raises(RankFailure, match="ShardingError: exchange must be that of rank 1 of 4, as the plan has them"):
        run_ranks(misfit, 2, timeout_s=TIMEOUT_S)
