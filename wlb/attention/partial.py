"""Outputs of parts of the keys, merged by their log-sum-exp.

If o1 and o2 are the attention of one query over two disjoint sets of keys, with log-sum-exp l1 and l2 of the scores,
then over both it is (e^l1 o1 + e^l2 o2) / (e^l1 + e^l2), which lies between them by the sigmoid of l2 - l1. It is
computed in float32, or float64 where inputs are. A kernel gives its output in the dtype of the inputs, so a first part
is stored in it as it is, and the merge of two is rounded to it once, like any output. Only where three or more come
together would a chain of merges in bfloat16 round once a step: sums of such queries are kept in float32 until the end.

Shapes: T tokens, N query heads, V head size of values, R rows of T, M rows with sums in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wlb.attention.device_rows import on_device
from wlb.sharding.phases import Phase

RowsOf = slice | torch.Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of sums over parts: float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Partial:
    """Output and log-sum-exp of the keys seen so far; a query that has seen none has the log-sum-exp -inf.

    log_sum_exp: (T, N), in the accumulation dtype.
    """

    def __init__(self, query: torch.Tensor, value_size: int, phases: Sequence[Phase]) -> None:
        """phases: all that will come, in their order."""
        self._parts = phases[-1].parts_by_block if query.device.type == "cpu" else phases[-1].parts
        self._dtype, exact = query.dtype, accumulation_dtype(query.dtype)
        chains = self._parts.most > 2 and query.dtype != exact
        self._is_apart = chains and self._parts.stores_first and len(self._parts.added) < query.shape[0]
        # What is there has no weight for a row without a key, but NaN times nothing is NaN.
        new = query.new_zeros if self._parts.begins_late else query.new_empty
        dtype = exact if chains and not self._is_apart else query.dtype
        self._stored = new(*query.shape[:2], value_size, dtype=dtype)
        self._sums: torch.Tensor | None = None  # (M, N, V)
        self.log_sum_exp = query.new_full(query.shape[:2], float("-inf"), dtype=exact)

    @property
    def out(self) -> torch.Tensor:
        """(T, N, V) in the dtype of the inputs."""
        if self._sums is not None:
            rows = on_device(self._parts.added, self._sums.device)
            self._stored.index_copy_(0, rows, self._sums.to(self._dtype))
        return self._stored.to(self._dtype)

    def put(self, rows: RowsOf, out: torch.Tensor, log_sum_exp: torch.Tensor) -> None:
        """(R, N, V), (R, N) of rows that have seen no key yet."""
        _set(self._stored, rows, out)
        _set(self.log_sum_exp, rows, log_sum_exp)

    def merge(self, rows: RowsOf, out: torch.Tensor, log_sum_exp: torch.Tensor) -> None:
        """(R, N, V), (R, N) of more keys; a -inf among `log_sum_exp` is a row that sees none of them, of any finite
        output."""
        before = self.log_sum_exp[rows]
        # Of two rows without a key, -inf less -inf would be NaN.
        beyond = (log_sum_exp - before).masked_fill_(log_sum_exp == float("-inf"), float("-inf"))
        # Not by the merged log-sum-exp, which is rounded: two weights that do not add to 1 would scale the output.
        weight = beyond.sigmoid_().unsqueeze(-1)
        _set(self.log_sum_exp, rows, torch.logaddexp(before, log_sum_exp))
        sums = self._stored
        if self._is_apart:
            if self._sums is None:
                added = on_device(self._parts.added, out.device)
                self._sums = self._stored.index_select(0, added).to(weight.dtype)
            sums, rows = self._sums, on_device(self._parts.places, out.device)[rows]
        if isinstance(rows, slice) and sums.dtype == weight.dtype:
            sums[rows].lerp_(out.to(sums.dtype), weight)
        else:
            # Products are in the dtype of the weights.
            _set(sums, rows, (sums[rows] * (1 - weight)).addcmul_(out, weight))


def _set(whole: torch.Tensor, rows: RowsOf, part: torch.Tensor) -> None:
    """whole[rows] = part, in the dtype of the whole."""
    if isinstance(rows, slice):
        whole[rows].copy_(part)
    else:
        whole.index_copy_(0, rows, part.to(whole.dtype))
