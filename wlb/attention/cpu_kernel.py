"""The flash attention that PyTorch ships for the CPU, one call per block.

It is called below autograd, on slices of the packed tensors: autograd's own slicing would write a gradient of the
whole pack for every block. Its backward takes an output and a log-sum-exp that were merged from several calls.

Shapes: T tokens of the shard, S rows of the key buffer, L rows of a block, N query heads, K key/value heads, H head
size of queries and keys, V of values.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from wlb.attention.partial import Partial
from wlb.sharding.phases import Block, Phase

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuKernel:
    """A `Kernel`. Takes float64, float32, bfloat16 and float16, and unequal head sizes by zeros behind the smaller."""

    cuts_by_window = True

    def check(self, query: torch.Tensor, value: torch.Tensor) -> None:
        """Everything goes."""

    def forward(
        self,
        partial: Partial,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        phase: Phase,
        scale: float,
    ) -> None:
        size, value_size = max(query.shape[-1], value.shape[-1]), value.shape[-1]
        masks = _Masks(query.dtype, phase.window)
        for block in phase.blocks:
            queries = slice(block.query_start, block.query_stop)
            keys = slice(block.key_start, block.key_stop)
            out, log_sum_exp = _forward(
                _as_batch(query, queries, size),
                _as_batch(key, keys, size),
                _as_batch(value, keys, size),
                0.0,
                block.kind == "diagonal",
                attn_mask=masks.of(block),
                scale=scale,
            )
            add = partial.put if block.first else partial.merge
            # (1, N, L, V) -> (L, N, V), (1, N, L) -> (L, N)
            add(queries, out[0].transpose(0, 1)[..., :value_size], log_sum_exp[0].transpose(0, 1))

    def backward(
        self,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        log_sum_exp: torch.Tensor,
        phase: Phase,
        scale: float,
    ) -> None:
        size = max(query.shape[-1], value.shape[-1])
        masks = _Masks(query.dtype, phase.window)
        for block in phase.blocks:
            queries = slice(block.query_start, block.query_stop)
            keys = slice(block.key_start, block.key_stop)
            block_grads = _backward(
                _as_batch(grad_out, queries, size),
                _as_batch(query, queries, size),
                _as_batch(key, keys, size),
                _as_batch(value, keys, size),
                _as_batch(out, queries, size),
                log_sum_exp[queries].transpose(0, 1).unsqueeze(0),
                0.0,
                block.kind == "diagonal",
                attn_mask=masks.of(block),
                scale=scale,
            )
            for grad, rows, block_grad in zip(grads, (queries, keys, keys), block_grads, strict=True):
                grad[rows] += block_grad[0].transpose(0, 1)[..., : grad.shape[-1]]


class _Masks:
    """Masks of blocks that a window cuts, each shape made once a call."""

    def __init__(self, dtype: torch.dtype, window: int | None) -> None:
        self._dtype, self._window = dtype, window
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}

    def of(self, block: Block) -> torch.Tensor | None:
        """(queries, keys), 0 where visible and -inf elsewhere; None where the block needs none."""
        if block.kind != "masked":
            return None
        assert self._window is not None
        shape = (block.query_stop - block.query_start, block.key_stop - block.key_start, block.shift)
        if shape not in self._masks:
            distance = torch.arange(shape[0])[:, None] + block.shift - torch.arange(shape[1])
            hidden = (distance < 0) | (distance >= self._window)
            self._masks[shape] = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        return self._masks[shape]


def _as_batch(packed: torch.Tensor, rows: slice, size: int) -> torch.Tensor:
    """(T, N, H) -> (1, N, L, size), a view unless H is smaller."""
    batch = packed[rows].transpose(0, 1).unsqueeze(0)
    return batch if batch.shape[-1] == size else pad(batch, (0, size - batch.shape[-1]))
