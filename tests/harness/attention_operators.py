"""Operators of attention libraries in plain PyTorch, with the signatures and the habits of their releases.

They honour offsets, lengths, masks and layouts of the log-sum-exp as each library does. Gradients are written, never
added, one task after the other; what a task does not own is left NaN. So whoever reads a row that means nothing, or
lets two tasks of one call own the same key, gets a wrong answer.

Shapes: T query rows, S key rows, N query heads, K key/value heads, H head size of queries and keys, V of values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Called:
    """One call of an operator. sizes: what a library may keep a plan by: tasks, longest queries, longest keys."""

    direction: str
    sizes: tuple[int, int, int]
    query_rows: int
    key_rows: int
    key_address: int
    deterministic: bool | None = None


@dataclass
class Calls:
    """What an emulated library was called with."""

    made: list[Called] = field(default_factory=list)

    def add(self, direction: str, sizes: tuple[int, int, int], query: Any, key: Any, deterministic: Any = None) -> None:
        assert sizes[0] > 0
        self.made.append(
            Called(
                direction=direction,
                sizes=sizes,
                query_rows=len(query),
                key_rows=len(key),
                key_address=key.data_ptr(),
                deterministic=deterministic,
            )
        )

    def of(self, direction: str) -> list[Called]:
        return [call for call in self.made if call.direction == direction]


def hidden_scores(
    num_queries: int, num_keys: int, window: tuple[int, int], *, is_causal: bool, from_bottom_right: bool
) -> torch.Tensor:
    """(q, k) true where a query does not see a key."""
    left, right = window
    at = torch.arange(num_queries)[:, None] + (num_keys - num_queries if from_bottom_right else 0)
    hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    if left >= 0:
        hidden |= torch.arange(num_keys) < at - left
    if right >= 0 or is_causal:
        hidden |= torch.arange(num_keys) > at + max(right, 0)
    return hidden


@dataclass(frozen=True, kw_only=True)
class Task:
    """Rows of one task, and what its queries do not see."""

    queries: slice
    keys: slice
    hidden: torch.Tensor
    scale: float

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """(N, q, k)."""
        keys = key[self.keys].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = torch.einsum("qnh,knh->nqk", query[self.queries], keys) * self.scale
        return scores.masked_fill(self.hidden, float("-inf"))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(q, N, V), (N, q)."""
        scores = self.scores(query, key)
        values = value[self.keys].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return torch.einsum("nqk,knv->qnv", scores.softmax(-1), values), scores.logsumexp(-1)

    def write_gradients(
        self,
        grads: tuple[torch.Tensor, ...],
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        log_sum_exp: torch.Tensor,
    ) -> None:
        """With the output and the log-sum-exp (N, q) given, which are of more keys than the task's."""
        groups = query.shape[1] // key.shape[1]
        weights = (self.scores(query, key) - log_sum_exp[..., None]).exp()
        keys, values = (t[self.keys].repeat_interleave(groups, dim=1) for t in (key, value))
        grad = grad_out[self.queries]
        by_weight = torch.einsum("qnv,knv->nqk", grad, values)
        by_score = weights * (by_weight - (grad * out[self.queries]).sum(-1).T[..., None]) * self.scale
        grads[0][self.queries] = torch.einsum("nqk,knh->qnh", by_score, keys)
        for whole, each in (
            (grads[1], torch.einsum("nqk,qnh->knh", by_score, query[self.queries])),
            (grads[2], torch.einsum("nqk,qnv->knv", weights, grad)),
        ):
            whole[self.keys] = each.unflatten(1, (key.shape[1], groups)).sum(2)


def tasks_of(
    query_starts: Any, query_lengths: Any, key_starts: Any, key_lengths: Any, longest: tuple[int, int], **mask: Any
) -> Iterator[tuple[int, Task]]:
    """Number and task of those with rows."""
    scale = mask.pop("scale")
    columns = (query_starts, query_lengths, key_starts, key_lengths)
    assert all(column.dtype == torch.int32 and column.is_contiguous() for column in columns)
    for number, (q, num_queries, k, num_keys) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        assert num_queries <= longest[0]
        assert num_keys <= longest[1]
        assert (num_queries > 0) == (num_keys > 0)
        if num_queries:
            hidden = hidden_scores(num_queries, num_keys, **mask)
            yield (
                number,
                Task(queries=slice(q, q + num_queries), keys=slice(k, k + num_keys), hidden=hidden, scale=scale),
            )


def packed_tasks(query: Any, key: Any, cu_q: Any, cu_k: Any, longest: tuple[int, int], **mask: Any) -> list[Any]:
    """Tasks whose rows lie back to back, none of them empty, without a row between or behind them."""
    for tensor, edges, most in ((query, cu_q, longest[0]), (key, cu_k, longest[1])):
        assert edges[0] == 0
        assert edges[-1] == len(tensor)
        assert edges.diff().max() == most
        assert edges.diff().min() > 0
    lengths = (cu_q.diff(), cu_k.diff())
    return list(tasks_of(cu_q[:-1], lengths[0], cu_k[:-1], lengths[1], longest, from_bottom_right=True, **mask))


def offset_tasks(
    query: Any, key: Any, starts: tuple[Any, Any], lengths: tuple[Any, Any], longest: tuple[int, int], **mask: Any
) -> list[Any]:
    """Tasks that lie anywhere in order; as many starts as tasks and one."""
    for tensor, first, count in zip((query, key), starts, lengths, strict=True):
        assert len(first) == len(count) + 1
        assert first.diff().min() >= 0, "accumulators of a task begin where those of the one before it end"
        assert (first[:-1] + count).max() <= len(tensor)
    assert (starts[0][:-1] + lengths[0] <= starts[0][1:]).all(), "two tasks must not have a query in common"
    return list(tasks_of(starts[0][:-1], lengths[0], starts[1][:-1], lengths[1], longest, **mask))


def check_sizes(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.shape[-1] % 8 == 0
        assert tensor.stride(-1) == 1


def poisoned(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full(t.shape, NAN, dtype=t.dtype) for t in tensors)


def with_parameters(names: str, num_required: int, body: Callable[..., Any]) -> Callable[..., Any]:
    """`body`, which takes a mapping, behind a signature; a default is never looked at unless it is passed."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name, kinds, **({} if i < num_required else {"default": None}))
        for i, name in enumerate(names.split())
    ]
    signature = inspect.Signature(parameters)

    def operator(*args: Any, **kwargs: Any) -> Any:
        return body(signature.bind(*args, **kwargs).arguments)

    operator.__signature__ = signature  # type: ignore[attr-defined]
    return operator


def torch_operators(calls: Calls) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """As `torch.ops.torch_attn._varlen_attn` and its backward are called."""

    def tasks(query: Any, key: Any, cu_q: Any, cu_k: Any, longest: tuple[int, int], window: list[int], **mask: Any):
        assert mask["is_causal"] == (window == [-1, 0])
        return packed_tasks(query, key, cu_q, cu_k, longest, window=tuple(window), **mask)

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, is_causal, scale, window_size, enable_gqa):
        check_sizes(q, k, v)
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert enable_gqa == (q.shape[1] != k.shape[1])
        calls.add("forward", (len(cu_q) - 1, max_q, max_k), q, k)
        (out,), lse = poisoned(q), q.new_full((q.shape[1], len(q)), NAN)
        for _, task in tasks(q, k, cu_q, cu_k, (max_q, max_k), window_size, is_causal=is_causal, scale=scale):
            out[task.queries], lse[:, task.queries] = task.attend(q, k, v)
        return out, lse, torch.zeros(2, dtype=torch.uint64)

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, is_causal, rng_state, scale, window_size):
        check_sizes(grad, q, k, v, out)
        assert rng_state.dtype == torch.uint64
        assert lse.shape == (q.shape[1], len(q))
        assert lse.is_contiguous()
        calls.add("backward", (len(cu_q) - 1, max_q, max_k), q, k)
        grads = poisoned(q, k, v)
        for _, task in tasks(q, k, cu_q, cu_k, (max_q, max_k), window_size, is_causal=is_causal, scale=scale):
            task.write_gradients(grads, grad, q, k, v, out, lse[:, task.queries])
        return grads

    return forward, backward
