"""Packers by name, and the contract's value types."""

import json
from dataclasses import replace

import pytest

from wlb.cost import CrossoverCost
from wlb.documents import documents_from_lengths
from wlb.errors import ConfigError, StateError
from wlb.packing import PACKERS, PackerOptions, PackerState, StepShape, build_packer

SHAPE = StepShape(window_tokens=8, micro_batches_per_replica=2, num_replicas=3)
OPTIONS = PackerOptions(
    shape=SHAPE,
    cost=CrossoverCost(crossover_tokens=8),
    cap_windows=2.0,
    thresholds_tokens=(6,),
    greedy_window_batches=4,
)


def test_names_and_what_each_packer_takes():
    assert list(PACKERS) == ["plain", "greedy", "wlb", "makespan", "two_stage", "solver"]
    packers = plain, greedy, wlb, makespan, two_stage, solver = tuple(build_packer(name, OPTIONS) for name in PACKERS)
    assert [p.natural_cut for p in packers] == ["stream", "window", "window", "stream", "stream", "window"]
    assert [p.cap_tokens for p in packers] == [8, 8, 16, 16, 16, 16]
    assert [p.thresholds_tokens for p in packers] == [(), (), (6,), (), (), ()]
    assert [p.free_counts for p in packers] == [False, False, False, True, True, False]
    assert [p.wanted_tokens(p.initial_state()) for p in (plain, wlb, makespan, two_stage, solver)] == [48] * 5
    assert greedy.wanted_tokens(greedy.initial_state()) == 4 * 48


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(
        ConfigError, match="packer must be one of plain, greedy, wlb, makespan, two_stage, solver, got 'best'"
    ):
        build_packer("best", OPTIONS)


def test_step_shape():
    assert (SHAPE.num_micro_batches, SHAPE.budget_tokens) == (6, 48)
    with pytest.raises(ConfigError, match="num_replicas must be >= 1, got 0"):
        StepShape(window_tokens=8, micro_batches_per_replica=1, num_replicas=0)


def test_state_survives_json():
    a, b, c, d = documents_from_lengths([5, 6, 7, 8], arrival=2, first_id=10)
    state = PackerState(
        step=3, drawn_tokens=99, budget_tokens=90, queues=((a,), ()), carried=(b,), planned=(((c,), (d,)),)
    )
    assert PackerState.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert state.waiting == (a, b, c, d)


@pytest.mark.parametrize(
    "saved",
    [None, [], {}, {"version": 2}, {"version": 1}, {**PackerState().to_json(), "carried": [[1, 2]]}],
)
def test_a_state_that_is_not_ours_is_refused(saved):
    with pytest.raises(StateError, match="packer state must be"):
        PackerState.from_json(saved)


def test_a_cap_that_is_not_given_is_the_packers_own():
    own = replace(OPTIONS, cap_windows=None)
    assert [build_packer(name, own).cap_tokens for name in PACKERS] == [8, 8, 12, 8, 8, 12]
