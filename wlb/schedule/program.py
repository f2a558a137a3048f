"""What each pipeline rank does in a step, messages included, in the order in which Megatron-Core 0.19 does it.

A rank computes passes and exchanges messages with its neighbours: activations with the next rank, gradients with the
one before (in a ring where there are virtual stages). It posts a send or a receive, and later waits for it; a message
travels once both of its ends are posted. So a rank that waits for its own send stands still until the receiver is
there for it, and with micro-batches of unequal length that is where a step loses time that a count of passes
does not show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from wlb.errors import ConfigError
from wlb.schedule.order import (
    Pass,
    chunk_table,
    interleaved_one_forward_one_backward,
    interleaved_warm_up,
    one_forward_one_backward,
    peak_tokens_in_flight,
)

Sends = Literal["blocking", "overlapped", "buffered"]


@dataclass(frozen=True, slots=True)
class Post:
    """Start of one end of a message; the n-th send of a rank on a channel meets the n-th receive of its neighbour."""

    channel: Literal["activation", "gradient"]
    end: Literal["send", "receive"]
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Standing still until the oldest post of this kind that has not been waited for is done."""

    channel: Literal["activation", "gradient"]
    end: Literal["send", "receive"]


Instruction = Pass | Post | Wait

_WAITS = {
    ("activation", "send"): Wait("activation", "send"),
    ("activation", "receive"): Wait("activation", "receive"),
    ("gradient", "send"): Wait("gradient", "send"),
    ("gradient", "receive"): Wait("gradient", "receive"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """How a replica's pipeline is cut and scheduled.

    num_stages: pipeline-parallel size.
    num_chunks: model chunks of a stage (virtual pipeline size); 1 is 1F1B without virtual stages.
    group_size: micro-batches that pass a chunk before the next chunk has its turn; None is num_stages, Megatron's
        default.
    sends: "blocking", a rank waits for its messages at once (Megatron's batched exchanges: all it does without
        virtual stages, and `--no-overlap-p2p-communication` with them); "overlapped", with virtual stages receives
        and gradient sends run beside the next pass (Megatron's default there); "buffered", no sender ever waits, the
        textbook model.
    """

    num_stages: int = 1
    num_chunks: int = 1
    group_size: int | None = None
    sends: Sends = "blocking"

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.num_chunks > 1 and self.num_stages == 1:
            raise ConfigError(f"num_chunks must be 1 without a pipeline (num_stages 1), got {self.num_chunks}")
        if self.group_size is not None and self.group_size < self.num_stages:
            raise ConfigError(f"group_size must be >= num_stages = {self.num_stages}, got {self.group_size}")
        if self.sends not in ("blocking", "overlapped", "buffered"):
            raise ConfigError(f"sends must be 'blocking', 'overlapped' or 'buffered', got {self.sends!r}")
        if self.sends == "overlapped" and self.num_chunks == 1:
            raise ConfigError("sends must not be 'overlapped' without virtual stages (num_chunks 1): Megatron has none")

    @property
    def group(self) -> int:
        return self.num_stages if self.group_size is None else self.group_size

    @property
    def num_virtual_stages(self) -> int:
        """Stretches of the model; stretch v is chunk v // num_stages of stage v % num_stages."""
        return self.num_stages * self.num_chunks

    def takes(self, num_micro_batches: int) -> bool:
        """Whether Megatron's schedule runs so many micro-batches: virtual stages want whole groups, or a rest of at
        least num_stages."""
        if self.num_chunks == 1:
            return num_micro_batches >= 1
        rest = num_micro_batches % self.group
        return num_micro_batches >= self.group and (rest == 0 or rest >= self.num_stages)

    def passes(self, stage: int, num_micro_batches: int) -> tuple[Pass, ...]:
        """Passes of one stage in order."""
        if self.num_chunks == 1:
            return one_forward_one_backward(
                num_stages=self.num_stages, stage=stage, num_micro_batches=num_micro_batches
            )
        return interleaved_one_forward_one_backward(
            num_stages=self.num_stages,
            stage=stage,
            num_micro_batches=num_micro_batches,
            num_chunks=self.num_chunks,
            group_size=self.group,
        )

    def arrivals(self, stage: int, num_micro_batches: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Micro-batches whose activations, and whose gradients, a stage receives, in the order in which it does.

        Both are the order of the passes. The first stretch of the model receives no activations and the last no
        gradients; what the leading stage of a direction then receives has gone through the others one chunk before.

        >>> PipelineShape(num_stages=2, num_chunks=2).arrivals(0, 4)
        ((0, 1, 2, 3), (0, 1, 0, 1, 2, 3, 2, 3))
        """
        order = [(i, chunk > 0) for i, chunk in chunk_table(num_micro_batches, self.num_chunks, self.group)]
        everything, behind_the_first_chunk = (
            tuple(i for i, _ in order),
            tuple(i for i, is_behind in order if is_behind),
        )
        return (
            behind_the_first_chunk if stage == 0 else everything,
            behind_the_first_chunk if stage == self.num_stages - 1 else everything,
        )

    def first_stage_peak_tokens(self, tokens: list[int] | tuple[int, ...]) -> int:
        """Most tokens whose activations the first stage holds, for micro-batches of so many tokens in this order."""
        return peak_tokens_in_flight(self.passes(0, len(tokens)), tokens, num_chunks=self.num_chunks)

    def program(self, stage: int, num_micro_batches: int) -> Iterator[Instruction]:
        """Everything that one stage does in a step."""
        if self.num_chunks == 1:
            return _program(self.num_stages, stage, num_micro_batches)
        return _InterleavedProgram(self, stage, num_micro_batches).instructions()


def _exchange(*posts: Post) -> Iterator[Instruction]:
    """Posts everything, then waits for everything."""
    yield from posts
    for p in posts:
        yield _WAITS[p.channel, p.end]


def _program(num_stages: int, stage: int, count: int) -> Iterator[Instruction]:
    """1F1B: blocking sends and receives while filling and draining, one exchange with a neighbour after every pass
    in between."""
    has_previous, has_next = stage > 0, stage < num_stages - 1
    warm_up = min(num_stages - 1 - stage, count)

    def activation(end: Literal["send", "receive"], i: int) -> tuple[Post, ...]:
        return (Post("activation", end, i),) if (has_next if end == "send" else has_previous) else ()

    def gradient(end: Literal["send", "receive"], i: int) -> tuple[Post, ...]:
        return (Post("gradient", end, i),) if (has_previous if end == "send" else has_next) else ()

    for i in range(warm_up):
        yield from _exchange(*activation("receive", i))
        yield Pass("forward", i)
        yield from _exchange(*activation("send", i))
    if count > warm_up:
        yield from _exchange(*activation("receive", warm_up))
    for i in range(count - warm_up):
        yield Pass("forward", warm_up + i)
        yield from _exchange(*activation("send", warm_up + i), *gradient("receive", i))
        yield Pass("backward", i)
        is_last = i == count - warm_up - 1
        yield from _exchange(*gradient("send", i), *(() if is_last else activation("receive", warm_up + i + 1)))
    for i in range(count - warm_up, count):
        yield from _exchange(*gradient("receive", i))
        yield Pass("backward", i)
        yield from _exchange(*gradient("send", i))


class _InterleavedProgram:
    """1F1B with virtual stages. Which exchange brings which tensor follows from the positions k in the table of
    passes: what rank r computes at position k, its neighbour behind computes at position k too."""

    def __init__(self, shape: PipelineShape, stage: int, count: int) -> None:
        self._stages, self._stage, self._chunks = shape.num_stages, stage, shape.num_chunks
        self._table = chunk_table(count, shape.num_chunks, shape.group)
        self._warm_up = interleaved_warm_up(
            num_stages=shape.num_stages,
            stage=stage,
            num_passes=len(self._table),
            num_chunks=shape.num_chunks,
            group_size=shape.group,
        )
        self._overlapped = shape.sends == "overlapped"
        # Gradient messages that the steady phase leaves under way for the drain.
        self._receiving, self._sending = 0, False

    def instructions(self) -> Iterator[Instruction]:
        total, warm_up = len(self._table), self._warm_up
        if self._stage > 0:
            yield from _exchange(Post("activation", "receive", 0))
        for k in range(warm_up):
            yield self._forward(k)
            posts = [*self._send_activation(k), *self._receive_activation(k, k < total - 1)]
            ends_warm_up = k == warm_up - 1 < total - 1
            first_gradient = self._first_gradient() if ends_warm_up else ()
            if self._overlapped:
                yield from _exchange(*posts)
                yield from first_gradient
            else:
                yield from _exchange(*posts, *first_gradient)
        yield from self._steady_overlapped() if self._overlapped else self._steady()
        if warm_up == total:
            yield from _exchange(*self._first_gradient())
        for k in range(total - warm_up, total):
            if self._receiving and self._awaits_gradient(k):
                self._receiving -= 1
                yield Wait("gradient", "receive")
            yield self._backward(k)
            send = self._send_gradient(k)
            yield from _exchange(*send, *self._receive_gradient(k, k < total - 1))
            if send and self._sending:
                self._sending = False
                yield Wait("gradient", "send")

    def _steady(self) -> Iterator[Instruction]:
        remaining = len(self._table) - self._warm_up
        for k in range(remaining):
            f = k + self._warm_up
            yield self._forward(f)
            yield self._backward(k)
            yield from _exchange(
                *self._send_activation(f),
                *self._send_gradient(k),
                *self._receive_activation(f, k < remaining - 1),
                *self._receive_gradient(k, True),
            )

    def _steady_overlapped(self) -> Iterator[Instruction]:
        """Receives are waited for before the pass that needs them, activations sent at once (Megatron frees them),
        gradients sent by the time the next gradient is."""
        remaining = len(self._table) - self._warm_up
        receiving_activations = 0
        self._receiving = len(self._first_gradient()) if remaining else 0
        for k in range(remaining):
            f = k + self._warm_up
            if receiving_activations and not (self._stage == 0 and self._chunk(f) == 0):
                receiving_activations -= 1
                yield Wait("activation", "receive")
            yield self._forward(f)
            receive = self._receive_activation(f, k < remaining - 1)
            receiving_activations += len(receive)
            send = self._send_activation(f)
            yield from (*send, *receive)
            if send:
                yield Wait("activation", "send")
            if self._receiving and self._awaits_gradient(k):
                self._receiving -= 1
                yield Wait("gradient", "receive")
            yield self._backward(k)
            receive = self._receive_gradient(k, True)
            self._receiving += len(receive)
            send = self._send_gradient(k)
            yield from (*send, *receive)
            if self._sending:
                yield Wait("gradient", "send")
            self._sending = bool(send)

    def _chunk(self, k: int, kind: Literal["forward", "backward"] = "forward") -> int:
        chunk = self._table[k][1]
        return chunk if kind == "forward" else self._chunks - 1 - chunk

    def _forward(self, k: int) -> Pass:
        return Pass("forward", *self._table[k])

    def _backward(self, k: int) -> Pass:
        return Pass("backward", self._table[k][0], self._chunk(k, "backward"))

    def _is_last_stretch(self, chunk: int) -> bool:
        return self._stage == self._stages - 1 and chunk == self._chunks - 1

    def _awaits_gradient(self, k: int) -> bool:
        return not self._is_last_stretch(self._chunk(k, "backward"))

    def _send_activation(self, k: int) -> tuple[Post, ...]:
        return () if self._is_last_stretch(self._chunk(k)) else (Post("activation", "send", self._table[k][0]),)

    def _send_gradient(self, k: int) -> tuple[Post, ...]:
        is_first_stretch = self._stage == 0 and self._chunk(k, "backward") == 0
        return () if is_first_stretch else (Post("gradient", "send", self._table[k][0]),)

    def _first_gradient(self) -> tuple[Post, ...]:
        return () if self._stage == self._stages - 1 else (Post("gradient", "receive", 0),)

    def _receive_activation(self, k: int, wanted: bool) -> tuple[Post, ...]:
        comes = wanted and self._comes(k, is_leading=self._stage == 0, last_chunk=self._chunks - 1, kind="forward")
        return (Post("activation", "receive", 0),) if comes else ()

    def _receive_gradient(self, k: int, wanted: bool) -> tuple[Post, ...]:
        is_leading = self._stage == self._stages - 1
        comes = wanted and self._comes(k, is_leading=is_leading, last_chunk=0, kind="backward")
        return (Post("gradient", "receive", 0),) if comes else ()

    def _comes(self, k: int, *, is_leading: bool, last_chunk: int, kind: Literal["forward", "backward"]) -> bool:
        """Whether a tensor arrives while position k is being exchanged. The leading rank of a direction gets what
        the trailing rank, stages - 1 positions behind it, has just made, unless that leaves the pipeline there."""
        if not is_leading:
            return True
        behind = k - (self._stages - 1)
        return behind >= 0 and self._chunk(behind, kind) != last_chunk
