"""Merging by log-sum-exp, where a set of keys may be empty."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from wlb.attention.partial import Partial, RowsOf
from wlb.sharding.phases import PhaseBuilder
from wlb.sharding.tasks import Keys, Task

INFINITY = float("inf")


def _partial(num_tokens: int, runs: Sequence[tuple[int, int]], *, dtype: torch.dtype, heads: int = 1) -> Partial:
    """Of one phase for each run of queries, with one value a head."""
    builder = PhaseBuilder(num_tokens, None)
    phases = [
        builder.phase([Task(start, stop, start, (Keys(start, stop, start),))], num_keys=num_tokens, causal=True)
        for start, stop in runs
    ]
    return Partial(torch.empty(num_tokens, heads, 4, dtype=dtype), 1, phases)


def _late(num_tokens: int = 2) -> Partial:
    """The second phase begins with some queries and goes on with others, so it adds to rows that have no output."""
    return _partial(num_tokens, [(0, 1), (0, num_tokens)], dtype=torch.float32)


def _column(*values: float) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1, 1)


def test_two_parts_by_their_weights() -> None:
    """Sums of exponentials 1 and 3: a quarter of the first, three quarters of the second."""
    partial = _partial(1, [(0, 1), (0, 1)], dtype=torch.float32)
    partial.put(slice(0, 1), _column(8.0), torch.tensor([[0.0]]))
    partial.merge(slice(0, 1), _column(4.0), torch.tensor([[math.log(3.0)]]))
    assert partial.out.item() == pytest.approx(5.0)
    assert partial.log_sum_exp.item() == pytest.approx(math.log(4.0))


@pytest.mark.parametrize("rows", [slice(None), torch.tensor([0, 1])])
def test_rows_without_a_key_are_no_nan(rows: RowsOf) -> None:
    partial = _late()
    nothing = torch.full((2, 1), -INFINITY)
    partial.merge(rows, torch.full((2, 1, 1), 9.0), nothing)
    assert partial.out.flatten().tolist() == [0.0, 0.0]
    assert partial.log_sum_exp.flatten().tolist() == [-INFINITY, -INFINITY]
    # One row sees keys now; then neither does.
    partial.merge(rows, _column(7.0, 9.0), torch.tensor([[2.0], [-INFINITY]]))
    partial.merge(rows, torch.full((2, 1, 1), 9.0), nothing)
    assert partial.out.flatten().tolist() == [7.0, 0.0]
    assert partial.log_sum_exp.flatten().tolist() == [2.0, -INFINITY]


def test_what_is_not_a_number_stays_so() -> None:
    """A loss that became NaN must be seen, not weighed with nothing."""
    partial = _late()
    partial.put(slice(0, 2), _column(7.0, 7.0), torch.tensor([[2.0], [2.0]]))
    partial.merge(slice(0, 2), _column(7.0, float("nan")), torch.tensor([[1.0], [float("nan")]]))
    assert partial.out.flatten().isnan().tolist() == [False, True]
    assert partial.log_sum_exp.flatten().isnan().tolist() == [False, True]


def test_large_scores_do_not_overflow() -> None:
    partial = _partial(1, [(0, 1), (0, 1)], dtype=torch.float32)
    partial.put(slice(0, 1), _column(1.0), torch.tensor([[1e4]]))
    partial.merge(slice(0, 1), _column(3.0), torch.tensor([[1e4]]))
    assert partial.out.item() == pytest.approx(2.0)


CHAINS: dict[str, tuple[list[tuple[int, int]], tuple[int, int] | None]] = {
    "two parts": ([(0, 64), (0, 64)], None),
    "two parts of some": ([(0, 64), (16, 64)], None),
    "many parts": ([(0, 64)] * 9, None),
    "many parts of some": ([(0, 64)] + [(16, 48)] * 8, (32, 1)),
    "some begin late": ([(0, 32)] + [(16, 64)] * 8, (48, 1)),
    "some are stored late": ([(0, 32), *[(0, 16)] * 8, (32, 64)], None),
}
"""Runs of queries of each phase; shape of sums in float32 that are kept beside the output, of 8 heads."""


@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_any_chain_is_rounded_once(dtype: torch.dtype, name: str, by_index: bool) -> None:
    """The output is what all parts at once in float64 come to, rounded to the dtype: within half a unit of it."""
    runs, _ = CHAINS[name]
    generator = torch.Generator().manual_seed(7)
    partial = _partial(64, runs, dtype=dtype, heads=8)
    values, sums = [], []
    for number, (start, stop) in enumerate(runs):
        value = torch.randn(stop - start, 8, 1, generator=generator).add_(1.0).to(dtype)
        lse = torch.randn(stop - start, 8, generator=generator).to(partial.log_sum_exp.dtype)
        rows: RowsOf = torch.arange(start, stop) if by_index else slice(start, stop)
        first = number == 0 or (name.endswith("late") and start == 32)
        (partial.put if first else partial.merge)(rows, value, lse)
        values.append(torch.zeros(64, 8, dtype=torch.float64))
        sums.append(torch.full((64, 8), -INFINITY, dtype=torch.float64))
        values[-1][start:stop], sums[-1][start:stop] = value[..., 0].double(), lse.double()
    weights = torch.stack(sums).softmax(0)
    wanted = (weights * torch.stack(values)).sum(0)
    assert partial.out.dtype == dtype
    assert partial.log_sum_exp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    unit = torch.finfo(dtype).eps
    scale = torch.stack(values).abs().amax(0)  # in float32 each merge rounds as well
    bound = unit / 2 * wanted.abs() + (1e-6 if dtype == torch.bfloat16 else 4 * unit) * scale
    assert ((partial.out[..., 0].double() - wanted).abs() <= bound).all()
    assert torch.allclose(partial.log_sum_exp.double(), torch.stack(sums).logsumexp(0), rtol=1e-6, atol=1e-6)


def test_a_chain_in_bfloat16_would_be_seen() -> None:
    """The control: two parts are merged in the dtype of the inputs; nine of them so would round nine times."""
    generator = torch.Generator().manual_seed(7)
    partial = _partial(64, [(0, 64), (0, 64)], dtype=torch.bfloat16, heads=8)
    values = torch.randn(9, 64, 8, 1, generator=generator).add_(1.0).bfloat16()
    sums = torch.randn(9, 64, 8, generator=generator)
    partial.put(slice(None), values[0], sums[0])
    for value, lse in zip(values[1:], sums[1:], strict=True):
        partial.merge(slice(None), value, lse)
    wanted = (sums.double().softmax(0) * values[..., 0].double()).sum(0)
    unit = torch.finfo(torch.bfloat16).eps
    errors = (partial.out[..., 0].double() - wanted).abs() / wanted.abs()
    assert (errors > 0.6 * unit).double().mean() > 0.1


@pytest.mark.parametrize("name", CHAINS)
def test_float32_is_kept_for_no_more_rows_than_have_many_parts(name: str) -> None:
    runs, apart = CHAINS[name]
    partial = _partial(64, runs, dtype=torch.bfloat16, heads=1)
    for number, (start, stop) in enumerate(runs[:3]):
        part = torch.ones(stop - start, 1, 1).bfloat16()
        (partial.merge if number else partial.put)(slice(start, stop), part, torch.zeros(stop - start, 1))
    whole = apart is None and len(runs) > 2
    assert partial._stored.dtype == (torch.float32 if whole else torch.bfloat16)
    assert (None if partial._sums is None else (partial._sums.shape[0], partial._sums.shape[1])) == apart
    assert partial._sums is None or partial._sums.dtype == torch.float32


def test_what_a_phase_leaves_out_has_no_float32() -> None:
    """No second copy in float32 where every query's keys are in one place."""
    partial = _partial(2, [(0, 2)], dtype=torch.bfloat16)
    assert partial.out.dtype == torch.bfloat16
    assert partial.out.data_ptr() == partial._stored.data_ptr()
    assert partial.log_sum_exp.dtype == torch.float32
