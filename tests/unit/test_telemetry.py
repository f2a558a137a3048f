"""What a step reports where the device lags behind the host: from events, read once, after the step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.wlb import telemetry
from megatron.wlb.parallel import ParallelDims
from megatron.wlb.step_clock import DeviceClock, HostClock
from megatron.wlb.telemetry import Telemetry


class Device:
    """Works through what it is given later than the host. now_s: its own clock."""

    def __init__(self) -> None:
        self.now_s = 7000.0
        self.num_waits = 0
        self.is_idle = False

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self.at_s = self._device.now_s

    def query(self) -> bool:
        return self._device.is_idle

    def synchronize(self) -> None:
        self._device.num_waits += 1
        assert self._device.is_idle, "the host would have waited for the device"

    def elapsed_time(self, other: Event) -> float:
        assert self._device.is_idle
        return (other.at_s - self.at_s) * 1e3


class _Timers:
    def __call__(self, name: str, log_level: int | None = None) -> Any:
        return SimpleNamespace(start=lambda **_: None, stop=lambda **_: None)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def told(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Telemetry:
    monkeypatch.setattr(telemetry, "statistics_fields", lambda _statistics: {"tokens": 5})
    return Telemetry(
        clock=DeviceClock(device.event, clock=lambda: 100.0),
        log_interval=1,
        iteration=lambda: (1, 8),
        writers=lambda: (None, None),
        timeline=tmp_path,
    )


def _run_step(told: Telemetry, device: Device, number: int = 0) -> None:
    """One micro-batch: forward for 2 seconds of the device, backward for 3, one second of nothing before each."""
    dims = ParallelDims.__new__(ParallelDims)
    for name, value in {"rank": 0, "pp_rank": 0, "dp_rank": 0, "cp_rank": 0, "cp_size": 1, "world_size": 1}.items():
        object.__setattr__(dims, name, value)
    counters = SimpleNamespace(epochs=[0], cut_documents=0, skipped_empty=0)
    planned: Any = SimpleNamespace(
        step=number, statistics=None, counters=counters, plan_s=0.0, micro_batches=[SimpleNamespace(lengths=(3, 2))]
    )
    config = SimpleNamespace(timers=_Timers())
    with told.step(planned, 0.0, config, dims, forward_only=False):
        for name, pass_s in (("forward-compute", 2), ("backward-compute", 3)):
            device.now_s += 1
            config.timers(name, log_level=2).start()
            device.now_s += pass_s
            config.timers(name).stop()
    assert isinstance(config.timers, _Timers)


def _rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "rank000.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_events_are_read_when_the_line_is_printed(told: Telemetry, device: Device, tmp_path: Path) -> None:
    _run_step(told, device)
    assert device.num_waits == 0
    assert _rows(tmp_path) == []
    device.is_idle = True
    assert "imbalance ranks measured: 1.000 |" in told.log_suffix()
    (row,) = _rows(tmp_path)
    # On the host's clock, which said 100 when the step began.
    assert (row["begin_s"], row["end_s"]) == (100.0, 107.0)
    assert row["events"] == [["forward-compute", 101.0, 103.0], ["backward-compute", 104.0, 107.0]]
    told.log_suffix()
    told.close()
    assert len(_rows(tmp_path)) == 1


def test_events_are_read_when_the_next_step_begins(told: Telemetry, device: Device, tmp_path: Path) -> None:
    _run_step(told, device)
    device.is_idle = True
    _run_step(told, device, 1)
    assert [row["step"] for row in _rows(tmp_path)] == [0]
    told.close()
    assert [row["step"] for row in _rows(tmp_path)] == [0, 1]


def test_reading_within_the_step_is_found(told: Telemetry, device: Device) -> None:
    told.clock.lags = False
    with pytest.raises(AssertionError, match="would have waited"):
        _run_step(told, device)


def test_a_device_that_never_comes_to_the_end_is_not_waited_for(
    told: Telemetry, device: Device, tmp_path: Path
) -> None:
    _run_step(told, device)
    told.close()
    assert device.num_waits == 0
    assert _rows(tmp_path) == []


def test_the_clock_of_the_host_is_read_at_once(told: Telemetry, device: Device, tmp_path: Path) -> None:
    told.clock = HostClock(lambda: device.now_s)
    _run_step(told, device)
    (row,) = _rows(tmp_path)
    assert (row["begin_s"], row["end_s"]) == (7000.0, 7007.0)
    assert row["events"][1] == ["backward-compute", 7004.0, 7007.0]
