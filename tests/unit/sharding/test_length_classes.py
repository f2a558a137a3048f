"""Which tasks share a call, so that few blocks are launched for nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import SHARED_DATA
from wlb.sharding import SHARDERS, ShardCosts
from wlb.sharding.calls import KernelCall
from wlb.sharding.index import gather_index, ring_index
from wlb.sharding.length_classes import LEAST_SAVED_TILES, MOST_CLASSES, length_classes, tiles_of
from wlb.sharding.phases import Phase

WINDOW = 131072
MOST_TIMES_NEEDED = 4.0
PACKS = ("one of 64K and 108 short", "log-normal with outliers", "wikipedia.txt", "wlb_llm_128k.json", "prolong.json")


def tiles(rows: int) -> int:
    return -(-rows // 128)


def launched(calls: tuple[KernelCall, ...], side: int) -> int:
    """Blocks a head: tiles of the longest task of each call, in all of its tasks. side: 0 queries, 1 keys."""
    return sum(len(c.queries) * tiles((c.most_queries, c.most_keys)[side]) for c in calls)


def needed(call: KernelCall, side: int) -> int:
    starts, stops = (call.queries, call.keys)[side].T
    return sum(tiles(length) for length in (stops - starts).tolist())


def _lognormal(rng: random.Random) -> int:
    return int(WINDOW * rng.uniform(0.3, 1)) if rng.random() < 0.01 else int(rng.lognormvariate(6.5, 1.6))


def _of_trace(lengths: list[int], rng: random.Random) -> int:
    return rng.choice(lengths)


@lru_cache
def _trace(path: Path) -> list[int]:
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else [int(n) for n in text.split()]


def packs(name: str, count: int, multiple: int) -> Iterator[tuple[int, ...]]:
    """Packs of a window, and of a multiple of tokens."""
    if name == PACKS[0]:
        short = (WINDOW // 2) // 108
        yield (WINDOW // 2, *[short] * 107, WINDOW // 2 - 107 * short)
        return
    rng = random.Random(3)
    draw = _lognormal
    if name != PACKS[1]:
        path = SHARED_DATA / "lengths" / name
        if not path.exists():
            pytest.skip(f"needs the real lengths of {path.name}; what is lost: blocks launched for these")
        draw = partial(_of_trace, _trace(path))
    for _ in range(count):
        room, lengths = WINDOW, []
        while room:
            lengths.append(max(1, min(draw(rng), room)))
            room -= lengths[-1]
        assert sum(lengths) % multiple == 0
        yield tuple(lengths)


def phases_of(lengths: tuple[int, ...], sharder: str, cp_size: int, ranks: tuple[int, ...]) -> Iterator[Phase]:
    plan = SHARDERS[sharder](lengths, cp_size, ShardCosts())
    for rank in ranks:
        for index in (gather_index(plan, rank, None), ring_index(plan, rank, None)):
            yield from (p for p in index.phases if p.num_tasks)


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("sharder", SHARDERS)
def test_few_blocks_are_launched_for_nothing(sharder: str, name: str) -> None:
    """At most four times as many as are needed, by queries and by keys; in a phase of which that is little, no more
    than a call is worth."""
    num_calls = num_phases = 0
    totals = np.zeros((3, 2), dtype=np.int64)
    for cp_size in (2, 8):
        for lengths in packs(name, 2, 2 * cp_size):
            for phase in phases_of(lengths, sharder, cp_size, (0, cp_size - 1)):
                num_phases, num_calls = num_phases + 1, num_calls + len(phase.calls_by_length)
                assert len(phase.calls_by_length) <= MOST_CLASSES
                for side in (0, 1):
                    least, most = needed(phase.call, side), launched(phase.calls_by_length, side)
                    assert most <= MOST_TIMES_NEEDED * least + LEAST_SAVED_TILES
                    apart = launched(phase.calls_apart, side)
                    assert apart <= MOST_TIMES_NEEDED * least + LEAST_SAVED_TILES * len(phase.calls_apart)
                    totals[:, side] += least, most, apart
    assert num_phases > 4
    assert (totals[1:] <= MOST_TIMES_NEEDED * totals[0]).all()


def test_one_call_would_launch_many_times_what_is_needed() -> None:
    """What all of it is for: one document of 64K and 108 short ones, on rank 3 of 8."""
    (lengths,) = packs(PACKS[0], 1, 16)
    plan = SHARDERS["per_document"](lengths, 8, ShardCosts())
    remote = gather_index(plan, 3, None).remote
    assert needed(remote.call, 1) < 1200
    assert launched((remote.call,), 1) > 60 * needed(remote.call, 1)
    assert launched(remote.calls_by_length, 1) < 2 * needed(remote.call, 1)
    assert len(remote.calls_by_length) == 2


def test_by_hand() -> None:
    """1, 1, 2, 2, 2 and 500 tiles 20 times over: 120 * 500 in one call, 100 * 2 + 20 * 500 in two."""
    rows = np.array([1, 128, 129, 200, 256, 64000] * 20)
    assert length_classes(rows, rows).tolist() == [0, 0, 0, 0, 0, 1] * 20
    three = np.repeat([128, 128 * 32, 128 * 1024], [2000, 100, 5])
    assert length_classes(three, three).tolist() == [0] * 2000 + [1] * 100 + [2] * 5
    # Long by keys or by queries alone.
    assert length_classes(np.array([1] * 50 + [128]), np.array([128] * 50 + [128 * 500])).tolist() == [0] * 50 + [1]
    assert length_classes(np.array([128] * 50 + [128 * 500]), np.array([1] * 51)).tolist() == [0] * 50 + [1]


def test_short_phases_stay_one_call() -> None:
    """Ten tasks of up to 32 tiles launch 640, all in all less than a call is worth."""
    rows = np.array([100] * 9 + [4096])
    assert not length_classes(rows, rows).any()
    assert not length_classes(rows[:1], rows[:1]).any()


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 200_000)), min_size=1, max_size=60))
def test_any_lengths(lengths: list[tuple[int, int]]) -> None:
    """Classes count up without a gap, are in the order of lengths in octaves, and never launch more than one call."""
    queries, keys = np.array(lengths).T
    classes = length_classes(queries, keys)
    assert sorted(set(classes.tolist())) == list(range(classes.max() + 1))
    assert classes.max() < MOST_CLASSES
    longest = np.maximum(tiles_of(queries), tiles_of(keys))
    for number in range(classes.max()):
        assert longest[classes <= number].max() < longest[classes > number].min()

    def total(classes: np.ndarray) -> int:
        return sum(
            int((classes == n).sum() * (tiles_of(queries[classes == n]).max() + tiles_of(keys[classes == n]).max()))
            for n in range(classes.max() + 1)
        )

    saved = total(np.zeros_like(classes)) - total(classes)
    assert saved >= LEAST_SAVED_TILES * classes.max()
