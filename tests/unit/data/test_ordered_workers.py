import os
import signal
import time

import pytest

from wlb.data.ordered_workers import ordered_workers
from wlb.errors import DataError, WlbError


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_the_items(workers):
    def slow_when_even(x):
        time.sleep(0.004 * (x % 2 == 0))
        return x * x

    with ordered_workers(slow_when_even, workers=workers) as map_items:
        assert list(map_items(range(30))) == [x * x for x in range(30)]
        assert list(map_items([])) == []


def test_items_are_drawn_as_needed_and_may_be_large():
    drawn = []

    def endless():
        while True:
            drawn.append(len(drawn))
            yield bytes(300_000)  # more than a pipe holds

    with ordered_workers(lambda data: data + b"1", workers=2) as map_items:
        results = map_items(endless())
        assert [len(next(results)) for _ in range(10)] == [300_001] * 10
        assert len(drawn) <= 10 + 2 * 3


def test_an_error_is_raised_in_turn():
    def fail_at_5(x):
        if x == 5:
            raise DataError("five")
        return x

    with ordered_workers(fail_at_5, workers=3) as map_items:
        results = map_items(range(10))
        assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(DataError, match="five"):
            next(results)


def test_a_killed_worker_is_an_error_and_no_worker_outlives_the_block():
    with ordered_workers(_pid, workers=2) as map_items:
        pids = set(map_items(range(8)))
        assert os.getpid() not in pids
        os.kill(min(pids), signal.SIGKILL)
        with pytest.raises(WlbError, match="a worker process was killed"):
            list(map_items(range(8)))
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def _pid(item):
    time.sleep(0.01)
    return os.getpid()
