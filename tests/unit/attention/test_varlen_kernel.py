"""What is handed to PyTorch's variable-length operators: checked with operators of their meaning that run anywhere.

The CUDA operators themselves are run by the GPU check.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.parity.sharded_cases import HEADS, Heads, errors, inputs, padded, plan_named, run_dense, run_sharded
from wlb.attention import packed_attention, sharded, varlen_kernel
from wlb.attention.varlen_kernel import VarlenKernel
from wlb.errors import ConfigError
from wlb.sharding import SHARDERS

COMM_TYPES = ("all_gather", "p2p")


def _scores(
    query: torch.Tensor, key: torch.Tensor, scale: float, is_causal: bool, window_size: list[int]
) -> torch.Tensor:
    """(N, q, k), masked from the bottom right corner on."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qnh,knh->nqk", query, key) * scale
    num_queries, num_keys = scores.shape[1:]
    at = torch.arange(num_queries)[:, None] + num_keys - num_queries
    left, right = window_size
    hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    if left >= 0:
        hidden |= torch.arange(num_keys) < at - left
    if right >= 0 or is_causal:
        hidden |= torch.arange(num_keys) > at + max(right, 0)
    return scores.masked_fill(hidden, float("-inf"))


def _check(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int) -> None:
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    for tensor, edges, longest in ((query, cu_q, max_q), (key, cu_k, max_k), (value, cu_k, max_k)):
        assert tensor.is_contiguous()
        assert edges.dtype == torch.int32
        assert edges[0] == 0
        assert edges[-1] == len(tensor)
        assert edges.diff().max() == longest
        assert edges.diff().min() > 0


def _fake_forward(
    query: Any,
    key: Any,
    value: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float,
    window_size: list[int],
    enable_gqa: bool,
    *,
    calls: list[tuple[int, int]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(query, key, value, cu_q, cu_k, max_q, max_k)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert is_causal == (window_size == [-1, 0])
    calls.append((len(query), len(key)))
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        scores = _scores(query[a:b], key[c:d], scale, is_causal, window_size)
        lse[:, a:b] = scores.logsumexp(-1)
        values = value[c:d].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        out[a:b] = torch.einsum("nqk,knv->qnv", scores.softmax(-1), values)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def _fake_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Any,
    scale: float,
    window_size: list[int],
) -> tuple[torch.Tensor, ...]:
    """With the output and log-sum-exp given, which are of more keys than these."""
    _check(query, key, value, cu_q, cu_k, max_q, max_k)
    assert rng_state.dtype == torch.uint64
    assert lse.shape == (query.shape[1], len(query))
    assert lse.is_contiguous()
    groups = query.shape[1] // key.shape[1]
    grads = [torch.empty_like(t) for t in (query, key, value)]
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        weights = (_scores(query[a:b], key[c:d], scale, is_causal, window_size) - lse[:, a:b, None]).exp()
        keys, values = (t[c:d].repeat_interleave(groups, dim=1) for t in (key, value))
        by_weight = torch.einsum("qnv,knv->nqk", grad_out[a:b], values)
        by_score = weights * (by_weight - (grad_out[a:b] * out[a:b]).sum(-1).T[..., None]) * scale
        grads[0][a:b] = torch.einsum("nqk,knh->qnh", by_score, keys)
        for grad, each in (
            (grads[1], torch.einsum("nqk,qnh->knh", by_score, query[a:b])),
            (grads[2], torch.einsum("nqk,qnv->knv", weights, grad_out[a:b])),
        ):
            grad[c:d] = each.unflatten(1, (key.shape[1], groups)).sum(2)
    return tuple(grads)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(query rows, key rows) of each forward call, of a kernel that takes float64 and runs anywhere."""
    recorded: list[tuple[int, int]] = []
    kernel = VarlenKernel(partial(_fake_forward, calls=recorded), _fake_backward)
    monkeypatch.setattr(sharded, "kernel_for", lambda _: kernel)
    monkeypatch.setattr(varlen_kernel, "_DTYPES", (torch.float64,))
    return recorded


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("comm_type", COMM_TYPES)
@pytest.mark.parametrize("plan_name", [*SHARDERS, "random"])
def test_equals_the_oracle(plan_name: str, comm_type: str, cp_size: int, calls: list[tuple[int, int]]) -> None:
    for number, heads in enumerate(HEADS.values()):
        lengths = padded((31, 17, 1, 3, 40), cp_size)
        plan = plan_named(plan_name, lengths, cp_size, seed=number)
        pack = inputs(plan.num_tokens, heads, seed=number)
        for window in (None, 1, 5, 20) if comm_type == "all_gather" or cp_size == 1 else (None,):
            wanted = run_dense(pack, lengths, window_tokens=window, scale=0.3)
            results = run_sharded(pack, plan, comm_type, window_tokens=window, scale=0.3)
            assert max(errors(results, wanted)) <= 1e-12
    assert calls


def test_one_call_takes_all_documents_as_they_lie(calls: list[tuple[int, int]]) -> None:
    query, key, value, _ = inputs(40, HEADS["gqa"], seed=1)
    packed_attention(query, key, value, (0, 31, 32, 40))
    assert calls == [(40, 40)]


def test_gathering_takes_two_calls_a_rank(calls: list[tuple[int, int]]) -> None:
    """Rank 0 holds [0, 4) and [12, 16) of 16: itself, then the tail's 12 keys. Rank 1: itself, then 4 keys."""
    run_sharded(inputs(16, HEADS["gqa"], seed=2), plan_named("per_sequence", (16,), 2), "all_gather")
    assert sorted(calls) == sorted([(8, 8), (4, 12), (8, 8), (8, 4)])


def test_what_flash_attention_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = VarlenKernel(_fake_forward, _fake_backward)
    monkeypatch.setattr(sharded, "kernel_for", lambda _: kernel)
    single, large = inputs(8, HEADS["mha"], seed=3, dtype=torch.float32), Heads(head_size=264)
    with pytest.raises(ConfigError, match=r"takes bfloat16 or float16, got torch\.float32"):
        run_sharded(single, plan_named("per_sequence", (8,), 2), "all_gather")
    with pytest.raises(ConfigError, match="head sizes up to 256, got 264 and 8"):
        run_sharded(inputs(8, large, seed=3, dtype=torch.bfloat16), plan_named("per_sequence", (8,), 2), "p2p")
    half = tuple(t.bfloat16() for t in single)
    with pytest.raises(ConfigError, match="window_tokens needs comm_type all_gather on CUDA, got p2p with a window"):
        run_sharded(half, plan_named("per_sequence", (8,), 2), "p2p", window_tokens=3)
