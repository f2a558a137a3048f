"""Packed attention against the dense oracle, forward and backward, in every precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.attention import dense_attention, packed_attention

HEADS = [pytest.param(4, 4, id="mha"), pytest.param(4, 2, id="gqa"), pytest.param(4, 1, id="mqa")]
HEAD_SIZE = 8
LENGTHS = [
    pytest.param((1,), id="one-token"),
    pytest.param((1, 1, 1, 1), id="only-single-tokens"),
    pytest.param((7, 13, 31, 3, 17), id="primes"),
    pytest.param((16, 16, 16), id="equal"),
    pytest.param((200, 1, 2, 1, 1, 3), id="giant-with-dust"),
    pytest.param((1, 2, 1, 150), id="dust-with-giant"),
]
Tensors = tuple[torch.Tensor, ...]


def _segments(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def _inputs(num_tokens: int, num_heads: int, num_kv_heads: int, *, seed: int) -> Tensors:
    """Query, key, value and the gradient of the output, float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, n, HEAD_SIZE) for n in (num_heads, num_kv_heads, num_kv_heads, num_heads)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def _run(attention: Callable[..., torch.Tensor], inputs: Tensors, segments: tuple[int, ...]) -> Tensors:
    """Output, dq, dk, dv."""
    *qkv, grad = inputs
    leaves = [t.detach().clone().requires_grad_() for t in qkv]
    out = attention(*leaves, segments)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype)))


def _errors(results: Tensors, wanted: Tensors) -> list[float]:
    """Largest error of each result over the largest value wanted."""
    assert len(results) == len(wanted) == 4
    return [float((r.double() - w).abs().max() / w.abs().max()) for r, w in zip(results, wanted, strict=True)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_equals_the_oracle(num_heads: int, num_kv_heads: int, lengths: tuple[int, ...]) -> None:
    segments = _segments(lengths)
    inputs = _inputs(segments[-1], num_heads, num_kv_heads, seed=1)
    wanted = _run(dense_attention, inputs, segments)
    # A document of one token attends to itself alone: no score, no gradient of queries and keys.
    compared = slice(None) if max(lengths) > 1 else slice(0, 4, 3)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        results = _run(packed_attention, tuple(t.to(dtype) for t in inputs), segments)
        assert [r.shape for r in results] == [w.shape for w in wanted]
        for result, exact in zip(results[compared], wanted[compared], strict=True):
            assert float((result.double() - exact).abs().max()) <= bound * float(exact.abs().max())
        for result in results[1:3]:
            assert max(lengths) > 1 or float(result.abs().max()) <= bound


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_bfloat16_errs_at_most_twice_as_much_as_the_definition_in_bfloat16(num_heads: int, num_kv_heads: int) -> None:
    """The ratio rule: PyTorch's own operations in the same precision set the scale of the error."""
    segments = _segments((7, 130, 31, 1, 64))
    low = tuple(t.bfloat16() for t in _inputs(segments[-1], num_heads, num_kv_heads, seed=2))
    wanted = _run(dense_attention, tuple(t.double() for t in low), segments)
    ours = _errors(_run(packed_attention, low, segments), wanted)
    definition = _errors(_run(dense_attention, low, segments), wanted)
    assert all(error > 0 for error in definition)
    assert all(error <= 2 * scale for error, scale in zip(ours, definition, strict=True)), (ours, definition)


@settings(deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 3, 5, 7, 11, 16, 29, 64, 97]), min_size=1, max_size=8).map(tuple),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 3), (3, 1)]),
    seed=st.integers(0, 2**31),
)
def test_any_lengths_equal_the_oracle(lengths: tuple[int, ...], heads: tuple[int, int], seed: int) -> None:
    segments = _segments(lengths)
    inputs = _inputs(segments[-1], *heads, seed=seed)
    results, wanted = (_run(attention, inputs, segments) for attention in (packed_attention, dense_attention))
    for result, exact in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, exact, rtol=0, atol=1e-11)


def test_views_give_what_contiguous_tensors_give() -> None:
    """Slices of one projection, as Megatron hands them over; heads outermost; head size outermost."""
    segments = _segments((9, 4, 20))
    query, key, value, grad = _inputs(segments[-1], 4, 4, seed=3)
    wanted = _run(packed_attention, (query, key, value, grad), segments)
    joined = torch.cat((query, key, value), dim=-1)
    sliced = joined.split(HEAD_SIZE, dim=-1)
    transposed = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (query, key, value)]
    head_size_outermost = [t.permute(2, 0, 1).contiguous().permute(1, 2, 0) for t in (query, key, value)]
    for views in (sliced, transposed, head_size_outermost):
        assert not any(t.is_contiguous() for t in views)
        leaves = [t.detach().requires_grad_() for t in views]
        out = packed_attention(*leaves, segments)
        results = (out.detach(), *torch.autograd.grad(out, leaves, grad))
        for result, exact in zip(results, wanted, strict=True):
            assert torch.equal(result, exact)


def test_the_gradient_may_be_a_view() -> None:
    segments = _segments((9, 4, 20))
    *qkv, grad = _inputs(segments[-1], 4, 2, seed=4)
    wanted = _run(packed_attention, (*qkv, grad), segments)
    for view in (
        grad.transpose(0, 1).contiguous().transpose(0, 1),
        grad.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    ):
        assert not view.is_contiguous()
        for result, exact in zip(_run(packed_attention, (*qkv, view), segments), wanted, strict=True):
            assert torch.equal(result, exact)
    # One value for all entries, which is what the gradient of a sum looks like.
    expanded = torch.ones((), dtype=torch.float64).expand_as(grad)
    wanted = _run(packed_attention, (*qkv, torch.ones_like(grad)), segments)
    for result, exact in zip(_run(packed_attention, (*qkv, expanded), segments), wanted, strict=True):
        assert torch.equal(result, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_documents_do_not_see_each_other(dtype: torch.dtype) -> None:
    """Another first document, NaN included, leaves the bits of the second one's output and gradients as they were."""
    segments = _segments((37, 50))
    inputs = tuple(t.to(dtype) for t in _inputs(segments[-1], 4, 2, seed=5))
    before = _run(packed_attention, inputs, segments)
    for value in (3.0, float("nan")):
        changed = tuple(t.clone() for t in inputs)
        for tensor in changed:
            tensor[: segments[1]] = value
        after = _run(packed_attention, changed, segments)
        for was, now in zip(before, after, strict=True):
            assert torch.equal(was[segments[1] :], now[segments[1] :])
            assert not torch.equal(was[: segments[1]], now[: segments[1]])


def test_the_comparison_sees_merged_documents() -> None:
    """The control: one boundary left out is far beyond every bound above."""
    segments = _segments((37, 50, 20))
    inputs = _inputs(segments[-1], 4, 2, seed=6)
    wanted = _run(dense_attention, inputs, segments)
    merged = _errors(_run(packed_attention, inputs, (0, segments[1], segments[3])), wanted)
    assert all(error > 0.1 for error in merged)


def test_scale_is_a_factor_on_the_scores() -> None:
    segments = _segments((11, 6))
    query, key, value, _ = _inputs(segments[-1], 4, 4, seed=7)
    wanted = dense_attention(query, key, value, segments, scale=0.7)
    torch.testing.assert_close(packed_attention(query, key, value, segments, scale=0.7), wanted, rtol=0, atol=1e-12)
    assert not torch.allclose(packed_attention(query, key, value, segments), wanted)


@pytest.mark.parametrize("value_size", [5, 8, 12])
@pytest.mark.parametrize("window_tokens", [None, 1, 4, 300])
def test_windows_and_value_sizes_equal_the_oracle(window_tokens: int | None, value_size: int) -> None:
    """Documents longer than what one mask covers; values narrower and wider than queries."""
    segments = _segments((700, 1, 40))
    query, key, _, _ = _inputs(segments[-1], 4, 2, seed=9)
    generator = torch.Generator().manual_seed(10)
    value, grad = (torch.randn(741, n, value_size, generator=generator, dtype=torch.float64) for n in (2, 4))
    results, wanted = (
        _run(partial(attention, window_tokens=window_tokens), (query, key, value, grad), segments)
        for attention in (packed_attention, dense_attention)
    )
    assert results[0].shape == (741, 4, value_size)
    for result, exact in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, exact, rtol=0, atol=1e-11)


def test_segments_must_end_at_the_number_of_tokens() -> None:
    query, key, value, _ = _inputs(17, 4, 4, seed=8)
    with pytest.raises(ValueError, match="segments must end at the number of tokens 17, got 16"):
        packed_attention(query, key, value, (0, 16))
