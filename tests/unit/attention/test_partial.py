"""Merging by log-sum-exp, where a set of keys may be empty."""

from __future__ import annotations

import math

import pytest
import torch

from wlb.attention.partial import Partial
from wlb.sharding.phases import PhaseBuilder
from wlb.sharding.tasks import Keys, Task

INFINITY = float("inf")


def _partial(dtype: torch.dtype = torch.float32, num_tokens: int = 2) -> Partial:
    """Of two phases that both reach every row."""
    builder = PhaseBuilder(num_tokens, None)
    tasks = [Task(0, num_tokens, 0, (Keys(0, num_tokens, 0),))]
    phases = [builder.phase(tasks, num_keys=num_tokens, causal=True) for _ in range(2)]
    return Partial(torch.empty(num_tokens, 1, 4, dtype=dtype), 1, phases)


def _column(*values: float) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1, 1)


def test_two_parts_by_their_weights() -> None:
    """Sums of exponentials 1 and 3: a quarter of the first, three quarters of the second."""
    partial = _partial(num_tokens=1)
    partial.merge(slice(0, 1), _column(8.0), torch.tensor([[0.0]]))
    partial.merge(slice(0, 1), _column(4.0), torch.tensor([[math.log(3.0)]]))
    assert partial.out.item() == pytest.approx(5.0)
    assert partial.log_sum_exp.item() == pytest.approx(math.log(4.0))


def test_rows_without_a_key_are_no_nan() -> None:
    partial = _partial()
    nothing = torch.full((2, 1), -INFINITY)
    partial.merge(slice(None), torch.full((2, 1, 1), float("nan")), nothing)
    assert partial.out.flatten().tolist() == [0.0, 0.0]
    assert partial.log_sum_exp.flatten().tolist() == [-INFINITY, -INFINITY]
    # One row sees keys now; then neither does.
    partial.merge(slice(None), _column(7.0, float("nan")), torch.tensor([[2.0], [-INFINITY]]))
    partial.merge(slice(None), torch.full((2, 1, 1), float("nan")), nothing)
    assert partial.out.flatten().tolist() == [7.0, 0.0]
    assert partial.log_sum_exp.flatten().tolist() == [2.0, -INFINITY]


def test_large_scores_do_not_overflow() -> None:
    partial = _partial(num_tokens=1)
    partial.merge(slice(0, 1), _column(1.0), torch.tensor([[1e4]]))
    partial.merge(slice(0, 1), _column(3.0), torch.tensor([[1e4]]))
    assert partial.out.item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("dtype", "exact"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_merging_is_in_float32_or_better(dtype: torch.dtype, exact: torch.dtype) -> None:
    partial = _partial(dtype)
    assert partial.out.dtype == partial.log_sum_exp.dtype == exact


def test_without_a_merge_the_output_is_in_the_dtype_of_the_inputs() -> None:
    """No second copy in float32 where every query's keys are in one place."""
    phase = PhaseBuilder(2, None).phase([Task(0, 2, 0, (Keys(0, 2, 0),))], num_keys=2, causal=True)
    partial = Partial(torch.empty(2, 1, 4, dtype=torch.bfloat16), 1, [phase])
    assert partial.out.dtype == torch.bfloat16
    assert partial.log_sum_exp.dtype == torch.float32
