"""Megatron's description of a packed sequence, carrying the micro-batch it was made from.

Extra fields of a subclass travel through the model untouched: Transformer Engine is handed the fields of the
base class only. So the plan goes with the micro-batch, also when activations are recomputed, and never
through a global.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from wlb.documents import MicroBatch

# The one attribute we add to a tensor: RoPE is handed `cu_seqlens` and nothing else of the pack.
POSITIONS_ATTRIBUTE = "wlb_positions"


@dataclass
class PlannedPackedSeqParams(PackedSeqParams):
    """`PackedSeqParams` of a planned micro-batch.

    micro_batch: its documents.
    segments: cumulative lengths as ints, the padding at the tail as a last segment of its own.
    """

    micro_batch: MicroBatch | None = None
    segments: tuple[int, ...] = ()


def packed_seq_params(
    micro_batch: MicroBatch, segments: tuple[int, ...], position_ids: torch.Tensor, *, max_positions: int
) -> PlannedPackedSeqParams:
    """Describe a packed micro-batch to Megatron's attention.

    Args:
        segments: cumulative lengths, leading 0, padding included.
        position_ids: (T,) position of every token in its document, on the device.
        max_positions: no document is longer; RoPE's table never has to be.

    `max_seqlen` is the longest segment rounded up to a power of two: Megatron caches one RoPE table for every
    value that it sees.
    """
    cu_seqlens = torch.tensor(segments, dtype=torch.int32, device=position_ids.device)
    setattr(cu_seqlens, POSITIONS_ATTRIBUTE, position_ids)
    longest = max(stop - start for start, stop in pairwise(segments))
    max_seqlen = max(longest, min(1 << (longest - 1).bit_length(), max_positions))
    return PlannedPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        # Left to itself, Transformer Engine compares two tensors on the host in every layer to find this out.
        pad_between_seqs=False,
        micro_batch=micro_batch,
        segments=segments,
    )
