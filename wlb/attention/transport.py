"""Where the rows of a transfer are packed, moved and unpacked, and in what memory: beside attention on CUDA.

On CUDA all three run on a stream of their own. An asynchronous collective of NCCL has one inside, but that covers the
transfer alone: packing would delay the first local block and unpacking the remote one, each by a copy of all rows,
while attention leaves most of the memory's bandwidth unused. Two waits keep the order::

    compute   ... key, value |  local block           | remote block
                             v                        ^
    side                     pack, exchange, unpack ---

In backward two transfers hide so: keys come again beside a part of the local block, gradients go back beside the rest.

`begin` makes the side stream wait for all that was launched before, `end` makes all that is launched afterwards wait
for the side stream. The host waits for neither.

Memory. Freed memory goes back to the stream that it was allocated on, whatever other streams still do with it. Marking
each use (`Tensor.record_stream`) would keep the largest buffers of every layer from the next one while the host runs
ahead. Instead, what is allocated inside `begin` is safe because the side stream has just waited for all that compute
did with it before; what compute allocates and the side stream reads is held until after `end`; and nothing is allocated
inside `end`. So the buffer that rows are unpacked into is allocated ahead (`allocates_ahead`), which costs its bytes
during the local block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Protocol

import torch

_LEAST_STEP_ROWS = 64


class Transport(Protocol):
    """Where and in what sizes rows are handled on their way.

    allocates_ahead: what `end` fills must be allocated inside `begin`.
    hides_transfers: attention goes on at full speed beside a transfer, so that it is worth dividing it for two of them.
    """

    allocates_ahead: bool
    hides_transfers: bool

    def begin(self) -> AbstractContextManager[None]:
        """Inside: pack and start to send what was computed before."""
        ...

    def end(self) -> AbstractContextManager[None]:
        """Inside: wait for a transfer and unpack. What follows may use it."""
        ...

    def capacity(self, num_rows: int) -> int:
        """Rows to allocate for so many."""
        ...


class HostTransport:
    """Everything in turn, in buffers of exactly what they hold; gloo's threads take attention's cores."""

    allocates_ahead = False
    hides_transfers = False

    def begin(self) -> AbstractContextManager[None]:
        return nullcontext()

    def end(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capacity(self, num_rows: int) -> int:
        return num_rows


class SideStream:
    """A stream beside the one on which attention runs.

    side: the stream. current: the stream that the caller is on. enter: launches go to a stream inside of it.
    """

    allocates_ahead = True
    hides_transfers = True

    def __init__(
        self, side: Any, current: Callable[[], Any], enter: Callable[[Any], AbstractContextManager[Any]]
    ) -> None:
        self._side, self._current, self._enter = side, current, enter

    @contextmanager
    def begin(self) -> Iterator[None]:
        self._side.wait_stream(self._current())
        with self._enter(self._side):
            yield

    @contextmanager
    def end(self) -> Iterator[None]:
        compute = self._current()
        with self._enter(self._side):
            yield
        compute.wait_stream(self._side)

    def capacity(self, num_rows: int) -> int:
        """See `rounded_rows`: the number of rows differs in every micro-batch, and would leave a hole in each."""
        return rounded_rows(num_rows)


def rounded_rows(num_rows: int) -> int:
    """Up to the next eighth of a power of two, so that few sizes come back again and again; at most 1/8 is unused.

    >>> [rounded_rows(n) for n in (0, 1, 65, 1000, 1025, 131073)]
    [0, 64, 128, 1024, 1152, 147456]
    """
    if num_rows == 0:
        return 0
    step = max(_LEAST_STEP_ROWS, 1 << max(0, (num_rows - 1).bit_length() - 4))
    return -(-num_rows // step) * step


def transport_for(device: torch.device) -> Transport:
    """The one of a device."""
    return HostTransport() if device.type == "cpu" else _side_stream(device)


@lru_cache
def _side_stream(device: torch.device) -> SideStream:
    # Of high priority: what is sent late keeps other ranks waiting.
    side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return SideStream(side, lambda: torch.cuda.current_stream(device), torch.cuda.stream)


def empty_rows(transport: Transport, like: torch.Tensor, num_rows: int, row_numbers: int) -> torch.Tensor:
    """(num_rows, row_numbers), of the dtype and on the device of `like`."""
    return like.new_empty(transport.capacity(num_rows), row_numbers)[:num_rows]
