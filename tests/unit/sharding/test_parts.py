"""In how many parts queries get their outputs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity.sharded_cases import padded, plan_named
from wlb.sharding import SHARDERS
from wlb.sharding.index import gather_index, ring_index
from wlb.sharding.parts import Parts, parts_of
from wlb.sharding.phases import Phase


def _of(*parts: tuple[int, int, bool], num_queries: int = 6) -> Parts:
    return parts_of(((slice(start, stop), first) for start, stop, first in parts), num_queries)


def test_by_hand() -> None:
    """Six queries; all have a first part, 2 and 3 a second, 3 a third."""
    parts = _of((0, 6, True), (2, 4, False), (3, 4, False))
    assert parts.most == 3
    assert parts.added.numbers.tolist() == [2, 3]
    assert parts.places.numbers[2:4].tolist() == [0, 1]
    assert not parts.begins_late
    assert parts.stores_first


def test_order() -> None:
    assert _of((0, 3, True), (2, 4, False)).begins_late
    late = _of((0, 3, True), (2, 3, False), (3, 6, True))
    assert not late.begins_late
    assert not late.stores_first
    assert _of((0, 3, True), (3, 6, True)).stores_first
    assert _of((0, 6, True), (2, 3, False), (3, 3, True)).stores_first, "of no query"
    assert (_of((0, 3, True)).most, len(_of((0, 3, True)).added)) == (1, 0)


def _counted(phases: list[Phase]) -> np.ndarray:
    counts = np.zeros(phases[0].num_queries, dtype=np.int64)
    for phase in phases:
        for task in phase.tasks:
            counts[task.start : task.stop] += 1
    return counts


@pytest.mark.parametrize("name", [*SHARDERS, "random"])
def test_any_plan(name: str) -> None:
    """Gathering gives each query at most two parts, so none of them is kept in float32; a ring one of each rank."""
    cp_size, most = 4, []
    plan = plan_named(name, padded([90, 300, 7, 1, 55], cp_size), cp_size, seed=3)
    for rank in range(cp_size):
        gathered, ring = list(gather_index(plan, rank, None).phases), list(ring_index(plan, rank, None).phases)
        for phases in (gathered, ring):
            counts, parts = _counted(phases), phases[-1].parts
            assert parts.most == counts.max()
            assert parts.added.numbers.tolist() == np.flatnonzero(counts > 1).tolist()
            assert parts.stores_first
            assert not parts.begins_late
            by_block = phases[-1].parts_by_block
            assert by_block.most >= parts.most
            assert set(parts.added.numbers.tolist()) <= set(by_block.added.numbers.tolist())
        assert gathered[-1].parts.most <= 2
        most.append(ring[-1].parts.most)
    assert 2 < max(most) <= cp_size + 1


def test_a_window_gives_each_query_one_part_by_phases_and_some_by_blocks() -> None:
    plan = plan_named("per_document", padded([900, 2000], 4), 4, seed=0)
    for rank in range(4):
        last = gather_index(plan, rank, 300).phases[-1]
        assert last.parts.most == 1
        assert last.parts_by_block.most > 1
