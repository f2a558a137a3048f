"""The order in which a pipeline stage runs its passes, and the tokens that order keeps alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from wlb.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pass:
    """One stage's forward or backward over one micro-batch (its index in the replica's order)."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def one_forward_one_backward(*, num_stages: int, stage: int, num_micro_batches: int) -> tuple[Pass, ...]:
    """1F1B without virtual stages, as Megatron runs it (Narayanan et al., arXiv 2104.04473, section 2.2).

    A stage first runs one forward for every stage behind it, then forwards and backwards in turn, then the
    backwards that are left. One stage is the schedule without a pipeline. Two stages, three micro-batches::

        stage 0   F0 F1 B0 F2 B1 B2
        stage 1   F0 B0 F1 B1 F2 B2
    """
    if num_stages < 1:
        raise ConfigError(f"num_stages must be >= 1, got {num_stages}")
    if not 0 <= stage < num_stages:
        raise ConfigError(f"stage must be in [0, num_stages = {num_stages}), got {stage}")
    warm_up = min(num_stages - 1 - stage, num_micro_batches)
    passes = [Pass("forward", i) for i in range(warm_up)]
    for i in range(num_micro_batches - warm_up):
        passes += [Pass("forward", warm_up + i), Pass("backward", i)]
    passes += [Pass("backward", i) for i in range(num_micro_batches - warm_up, num_micro_batches)]
    return tuple(passes)


def peak_tokens_in_flight(passes: Sequence[Pass], tokens: Sequence[int]) -> int:
    """Most tokens whose activations a stage holds at once: from the start of the forward to the end of the backward.

    >>> peak_tokens_in_flight(one_forward_one_backward(num_stages=2, stage=0, num_micro_batches=3), [5, 1, 4])
    6
    """
    held = peak = 0
    for p in passes:
        if p.kind == "forward":
            held += tokens[p.micro_batch]
            peak = max(peak, held)
        else:
            held -= tokens[p.micro_batch]
    return peak
