"""Outputs of parts of the keys, merged by their log-sum-exp.

If o1 and o2 are the attention of one query over two disjoint sets of keys, with log-sum-exp l1 and l2 of the scores,
then over both it is (e^l1 o1 + e^l2 o2) / (e^l1 + e^l2). Merging is in float32, or float64 where inputs are: a chain
of merges in bfloat16 would round once a step.

Shapes: T tokens, N query heads, V head size of values, R rows of T.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from wlb.sharding.phases import Phase

RowsOf = slice | torch.Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of sums over parts: float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Partial:
    """Output and log-sum-exp of the keys seen so far; a query that has seen none has the log-sum-exp -inf.

    out: (T, N, V). log_sum_exp: (T, N).
    """

    def __init__(self, query: torch.Tensor, value_size: int, phases: Iterable[Phase]) -> None:
        shape = query.shape[:2]
        exact = accumulation_dtype(query.dtype)
        if any(phase.merges for phase in phases):
            self.out = query.new_zeros(*shape, value_size, dtype=exact)
            self.log_sum_exp = query.new_full(shape, float("-inf"), dtype=exact)
        else:
            self.out = query.new_empty(*shape, value_size)
            self.log_sum_exp = query.new_empty(shape, dtype=exact)

    def put(self, rows: RowsOf, out: torch.Tensor, log_sum_exp: torch.Tensor) -> None:
        """(R, N, V), (R, N) of rows that have seen no key yet."""
        self.out[rows] = out.to(self.out.dtype)
        self.log_sum_exp[rows] = log_sum_exp

    def merge(self, rows: RowsOf, out: torch.Tensor, log_sum_exp: torch.Tensor) -> None:
        """(R, N, V), (R, N) of more keys; a -inf among `log_sum_exp` is a row that sees none of them."""
        before = self.log_sum_exp[rows]
        base = torch.maximum(before, log_sum_exp)
        # Of two rows without a key, -inf less -inf would be NaN.
        base = base.masked_fill(base == float("-inf"), 0.0)
        # Divided by their sum rather than taken from the merged log-sum-exp: that one, rounded, would scale the output.
        kept, added = (before - base).exp_(), (log_sum_exp - base).exp_()
        total = kept + added
        self.log_sum_exp[rows] = base + total.log()
        total.masked_fill_(total == 0, 1.0)
        # A kernel may leave anything in the output of a row without a key.
        more = out.masked_fill((log_sum_exp == float("-inf")).unsqueeze(-1), 0.0).to(self.out.dtype)
        merged = self.out[rows] * (kept / total).unsqueeze(-1)
        self.out[rows] = merged.addcmul_(more, (added / total).unsqueeze(-1))
