"""When a rank worked: from the host's clock where host and device are one, from CUDA events where they are not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class StepClock(Protocol):
    """Notes moments of a step, and says later when they were.

    lags: whether a moment is only known once the device has come to it.
    """

    lags: bool

    def begin(self) -> Any:
        """The moment from which those of a step are counted."""
        ...

    def mark(self) -> Any:
        """This moment of the device's work."""
        ...

    def is_over(self, mark: Any) -> bool:
        """Whether the device has come to it."""
        ...

    def seconds(self, begin: Any, marks: Sequence[Any]) -> list[float]:
        """When they were, on the host's clock. Waits for the device to come to them."""
        ...


class HostClock:
    """For a device that has done everything when a call returns. clock: seconds."""

    lags = False

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def begin(self) -> float:
        return self._clock()

    def mark(self) -> float:
        return self._clock()

    def is_over(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, marks: Sequence[float]) -> list[float]:
        return list(marks)


class DeviceClock:
    """CUDA events on the stream on which the model runs, read when their step is over: no pass is held up.

    A step begins when ranks have just compared their plans, for which the device has been waited for: so the moment at
    which the host begins a step is the device's as well, to within a launch. That sets each step anew, since the clocks
    of devices run apart over hours.

    make_event: an event that can be timed. clock: seconds.
    """

    lags = True

    def __init__(
        self, make_event: Callable[[], Any] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._clock = clock

    def begin(self) -> tuple[Any, float]:
        return self.mark(), self._clock()

    def mark(self) -> Any:
        event = self._make_event()
        event.record()
        return event

    def is_over(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, begin: tuple[Any, float], marks: Sequence[Any]) -> list[float]:
        first, first_s = begin
        for event in marks:
            event.synchronize()
        return [first_s + first.elapsed_time(event) / 1e3 for event in marks]
