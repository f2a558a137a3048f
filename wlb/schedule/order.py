"""The order in which a pipeline stage runs its passes, and the tokens that order keeps alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from wlb.errors import ConfigError

PassKind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One stage's forward or backward over one micro-batch (its index in the replica's order).

    chunk: which of the stage's model chunks runs; 0 without virtual stages.
    """

    kind: PassKind
    micro_batch: int
    chunk: int = 0


def one_forward_one_backward(*, num_stages: int, stage: int, num_micro_batches: int) -> tuple[Pass, ...]:
    """1F1B without virtual stages, as Megatron runs it (Narayanan et al., arXiv 2104.04473, section 2.2).

    A stage first runs one forward for every stage behind it, then forwards and backwards in turn, then the
    backwards that are left. One stage is the schedule without a pipeline. Two stages, three micro-batches::

        stage 0   F0 F1 B0 F2 B1 B2
        stage 1   F0 B0 F1 B1 F2 B2
    """
    require_stage(num_stages=num_stages, stage=stage)
    table = [(i, 0) for i in range(num_micro_batches)]
    return _alternate(table, table, warm_up=min(num_stages - 1 - stage, num_micro_batches))


def interleaved_one_forward_one_backward(
    *, num_stages: int, stage: int, num_micro_batches: int, num_chunks: int, group_size: int
) -> tuple[Pass, ...]:
    """1F1B over `num_chunks` model chunks a stage, as Megatron runs it (arXiv 2104.04473, section 2.2).

    group_size: micro-batches that go through one chunk before the next chunk has its turn.

    Two stages of two chunks, two micro-batches; F0' is micro-batch 0 in chunk 1::

        stage 0   F0 F1 F0' F1' B0' B1' B0 B1
        stage 1   F0 F1 F0' B0' F1' B1' B0 B1
    """
    require_stage(num_stages=num_stages, stage=stage)
    forwards = chunk_table(num_micro_batches, num_chunks, group_size)
    backwards = tuple((i, num_chunks - 1 - chunk) for i, chunk in forwards)
    warm_up = interleaved_warm_up(
        num_stages=num_stages,
        stage=stage,
        num_passes=len(forwards),
        num_chunks=num_chunks,
        group_size=group_size,
    )
    return _alternate(forwards, backwards, warm_up=warm_up)


@cache
def chunk_table(num_micro_batches: int, num_chunks: int, group_size: int) -> tuple[tuple[int, int], ...]:
    """(micro-batch, chunk) of every forward of a stage, in order: a group through every chunk, then the next group.

    >>> chunk_table(3, 2, 2)
    ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1))
    """
    return tuple(
        (i, chunk)
        for begin in range(0, num_micro_batches, group_size)
        for chunk in range(num_chunks)
        for i in range(begin, min(begin + group_size, num_micro_batches))
    )


def interleaved_warm_up(*, num_stages: int, stage: int, num_passes: int, num_chunks: int, group_size: int) -> int:
    """Forwards that a stage runs before its first backward."""
    return min(2 * (num_stages - 1 - stage) + (num_chunks - 1) * group_size, num_passes)


def peak_tokens_in_flight(passes: Sequence[Pass], tokens: Sequence[int], *, num_chunks: int = 1) -> int:
    """Most tokens whose activations a stage holds at once: from the start of the forward to the end of the backward.

    tokens: of each micro-batch. A chunk's pass holds 1 / num_chunks of what all chunks of the stage would; the
        result is rounded up.

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
    return -(-peak // num_chunks)


def require_stage(*, num_stages: int, stage: int) -> None:
    """Raise ConfigError unless there is such a stage."""
    if num_stages < 1:
        raise ConfigError(f"num_stages must be >= 1, got {num_stages}")
    if not 0 <= stage < num_stages:
        raise ConfigError(f"stage must be in [0, num_stages = {num_stages}), got {stage}")


def _alternate(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], *, warm_up: int
) -> tuple[Pass, ...]:
    passes = [Pass("forward", *f) for f in forwards[:warm_up]]
    for f, b in zip(forwards[warm_up:], backwards, strict=False):
        passes += [Pass("forward", *f), Pass("backward", *b)]
    passes += [Pass("backward", *b) for b in backwards[len(forwards) - warm_up :]]
    return tuple(passes)
