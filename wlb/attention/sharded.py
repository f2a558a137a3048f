"""Attention of one rank under a `ShardPlan`: packed documents, causal, keys and values fetched where they are held.

Shapes: T tokens of the micro-batch, N query heads, K key/value heads, H head size of queries and keys, V of values.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args

import torch
from torch.autograd.function import once_differentiable

from wlb.attention import all_gather, ring
from wlb.attention.call import Call, Gradients, Saved
from wlb.attention.exchange import KvExchange
from wlb.attention.kernels import kernel_for
from wlb.attention.transport import Transport, transport_for
from wlb.errors import ConfigError, ShardingError
from wlb.sharding.index import visible_window
from wlb.sharding.plan import ShardPlan

CommType = Literal["all_gather", "p2p"]


class Path(Protocol):
    """A communication type: `all_gather` or `ring`."""

    def forward(
        self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, /
    ) -> Generator[None, None, Saved]: ...

    def backward(
        self,
        call: Call,
        saved: Saved,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grad_out: torch.Tensor,
        /,
    ) -> Generator[None, None, Gradients]: ...


def sharded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: ShardPlan,
    rank: int,
    exchange: KvExchange | None,
    *,
    comm_type: CommType,
    scale: float | None = None,
    window_tokens: int | None = None,
    keep_gathered: bool = False,
    kernel: str = "auto",
    deterministic: bool = False,
    transport: Transport | None = None,
) -> torch.Tensor:
    """Causal attention inside each document of a micro-batch that is divided over ranks.

    Every rank must call it, forward and backward, with its own shard and an equal plan.

    Args:
        query, key, value: rows of `rank` in the order of the plan's spans, (T/cp, N, H), (T/cp, K, H), (T/cp, K, V);
            N is a multiple of K. Views are taken; a last dimension that is not contiguous is copied.
        exchange: with the other ranks; None where the plan has one rank.
        comm_type: "all_gather" fetches all that is missing at once and holds one copy of it; "p2p" fetches it rank by
            rank while it computes, holds two ranks' part, and merges more often.
        scale: factor on the scores, 1 / sqrt(H) by default.
        window_tokens: a query at position i sees keys (i - window_tokens, i]; all before it by default.
        keep_gathered: keep what "all_gather" fetched until backward; else it is fetched again.
        kernel: what computes, by its name in `wlb.attention.kernels`; "auto" chooses.
        deterministic: backward gives the same bits again, as under `torch.use_deterministic_algorithms`, which asks for
            it too: kernels are told, and gradients of keys that several spans see are added up in one order.
        transport: where rows are handled on their way; that of the device by default.

    Returns:
        (T/cp, N, V) in the dtype of `query`.

    Raises:
        ShardingError: the plan does not fit the tensors, the rank or the exchange.
        ConfigError: an option, a kernel, a dtype or a head size that cannot be used.
    """
    call = checked_call(
        query,
        key,
        value,
        plan,
        rank,
        exchange,
        comm_type=comm_type,
        scale=scale,
        window_tokens=window_tokens,
        keep_gathered=keep_gathered,
        kernel=kernel,
        transport=transport,
    )
    function = _AllGatherAttention if comm_type == "all_gather" else _RingAttention
    out: torch.Tensor = function.apply(call, deterministic, query, key, value)  # type: ignore[no-untyped-call]
    return out


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, deterministic: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return _forward(ctx, all_gather, call, deterministic, query, key, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, all_gather, grad_out)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, deterministic: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return _forward(ctx, ring, call, deterministic, query, key, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, ring, grad_out)


def _forward(
    ctx: Any,
    path: Path,
    call: Call,
    deterministic: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    query, key, value = (with_unit_stride(t) for t in (query, key, value))
    saved = exhausted(path.forward(call, query, key, value))
    ctx.save_for_backward(query, key, value, *tensors_to_save(saved))
    ctx.call, ctx.deterministic = call, deterministic
    return saved.out


def _backward(ctx: Any, path: Path, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value, *rest = ctx.saved_tensors
    with _deterministic_algorithms(asked=ctx.deterministic):
        # Copied once here, if at all, instead of in every block.
        grads = exhausted(path.backward(ctx.call, restored(rest), query, key, value, grad_out.contiguous()))
    return None, None, *grads


@contextmanager
def _deterministic_algorithms(*, asked: bool) -> Iterator[None]:
    """Torch's switch is where kernels and sums look, and it is the whole process's: on for this block, if asked."""
    if not asked or torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def path_of(comm_type: CommType) -> Path:
    """The module that does it."""
    return all_gather if comm_type == "all_gather" else ring


def exhausted[R](generator: Generator[None, None, R]) -> R:
    """Run to the end: where it yields, the other ranks run in processes of their own."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def with_unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """What kernels take: any view whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def tensors_to_save(saved: Saved) -> Sequence[torch.Tensor]:
    """For `save_for_backward`, where hooks of activation recompute and offload see them."""
    return [t for t in (saved.out, saved.log_sum_exp, saved.gathered) if t is not None]


def restored(tensors: Sequence[torch.Tensor]) -> Saved:
    """Undo `tensors_to_save`."""
    out, log_sum_exp, *gathered = tensors
    return Saved(out=out, log_sum_exp=log_sum_exp, gathered=gathered[0] if gathered else None)


def checked_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: ShardPlan,
    rank: int,
    exchange: KvExchange | None,
    *,
    comm_type: CommType,
    scale: float | None,
    window_tokens: int | None,
    keep_gathered: bool,
    kernel: str = "auto",
    transport: Transport | None = None,
) -> Call:
    """The arguments of `sharded_attention`; raises as it does, before anything is sent."""
    if comm_type not in get_args(CommType):
        raise ConfigError(f"comm_type must be one of {', '.join(get_args(CommType))}, got {comm_type!r}")
    if window_tokens is not None and window_tokens < 1:
        raise ConfigError(f"window_tokens must be >= 1, got {window_tokens}")
    if keep_gathered and comm_type != "all_gather":
        raise ConfigError(f"keep_gathered is of comm_type all_gather, got {comm_type}")
    _check_plan(query, key, value, plan, rank, exchange)
    _check_heads(query, key, value, rank)
    window_tokens = visible_window(plan, window_tokens)
    computing = kernel_for(query.device, kernel, query=query, value=value, window_tokens=window_tokens)
    computing.check(query, value)
    if window_tokens is not None and comm_type == "p2p" and plan.cp_size > 1 and not computing.cuts_by_window:
        raise ConfigError(f"window_tokens needs comm_type all_gather on CUDA, got p2p with a window of {window_tokens}")
    return Call(
        plan=plan,
        rank=rank,
        exchange=exchange,
        transport=transport or transport_for(query.device),
        kernel=computing,
        scale=scale if scale is not None else 1 / math.sqrt(query.shape[-1]),
        window=window_tokens,
        keep_gathered=keep_gathered,
    )


def _check_plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: ShardPlan,
    rank: int,
    exchange: KvExchange | None,
) -> None:
    if not 0 <= rank < plan.cp_size:
        raise ShardingError(f"rank must be in [0, {plan.cp_size}), the ranks of the plan, got {rank}")
    if exchange is None:
        if plan.cp_size > 1:
            raise ShardingError(f"exchange is required on rank {rank} for a plan of {plan.cp_size} ranks, got None")
    elif (exchange.size, exchange.rank) != (plan.cp_size, rank):
        raise ShardingError(
            f"exchange must be that of rank {rank} of {plan.cp_size}, as the plan has them, "
            f"got rank {exchange.rank} of {exchange.size}"
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3 or tensor.shape[0] != plan.rank_tokens:
            raise ShardingError(
                f"{name} must be (tokens, heads, size) with the plan's {plan.rank_tokens} tokens of rank {rank}, "
                f"got {tuple(tensor.shape)}"
            )


def _check_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rank: int) -> None:
    if key.shape[2] != query.shape[2]:
        raise ShardingError(f"key must have the head size of query, {query.shape[2]}, got {key.shape[2]} (rank {rank})")
    if value.shape[1] != key.shape[1]:
        raise ShardingError(f"value must have the heads of key, {key.shape[1]}, got {value.shape[1]} (rank {rank})")
    if query.shape[1] % key.shape[1]:
        raise ShardingError(
            f"heads of query must be a multiple of those of key, {key.shape[1]}, got {query.shape[1]} (rank {rank})"
        )
