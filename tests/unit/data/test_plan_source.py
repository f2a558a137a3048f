"""Planning in a process beside training gives the very steps that planning in place gives."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.data import learnable_documents, write_index
from wlb.cost import CrossoverCost
from wlb.data.index_file import IndexRows, index_lengths
from wlb.data.plan_process import ProcessSource
from wlb.data.plan_source import InlineSource, PlannerSpec
from wlb.data.planned_step import pack_micro_batches, unpack_micro_batches
from wlb.documents import MicroBatch, documents_from_lengths
from wlb.errors import ConfigError, PlannerProcessError, StateError
from wlb.packing import PACKERS, PackerOptions, StepShape
from wlb.sharding import Sharding
from wlb.sharding.index import gather_index, prepared

NUM_STEPS = 6


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[IndexRows, ...]:
    prefix = tmp_path_factory.mktemp("plan") / "text_document"
    write_index(prefix, learnable_documents(count=600, seed=3, longest=150))
    return (IndexRows(prefix=str(prefix), first=0, stop=600, weight=1.0, sequence_base=0),)


def _spec(rows: tuple[IndexRows, ...], packer: str = "wlb", **changes: Any) -> PlannerSpec:
    cost = CrossoverCost(crossover_tokens=20)
    shape = StepShape(window_tokens=64, micro_batches_per_replica=2, num_replicas=2)
    spec = PlannerSpec(
        rows=rows,
        window_tokens=64,
        cut="stream",
        seed=11,
        packer=packer,
        options=PackerOptions(shape=shape, cost=cost, thresholds_tokens=(30,) if packer == "wlb" else ()),
        num_steps=NUM_STEPS,
        replica=1,
        cost=cost,
        pad_to_multiple=4,
        keeps_ledger=True,
    )
    return dataclasses.replace(spec, **changes)


@pytest.fixture
def process(rows: tuple[IndexRows, ...]) -> Iterator[ProcessSource]:
    source = ProcessSource(_spec(rows), steps_ahead=2, rank=3, timeout_s=20)
    yield source
    source.close()


def _without_time(step: Any) -> Any:
    return dataclasses.replace(step, plan_s=0.0)


def _plan_to_the_end(source: ProcessSource) -> None:
    for _ in range(NUM_STEPS):
        source.next_step()


def test_index_lengths_are_those_of_megatron(rows: tuple[IndexRows, ...]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(rows[0].prefix)
    assert index_lengths(rows[0].prefix).tolist() == dataset.sequence_lengths.tolist()


def test_micro_batches_survive_the_tables() -> None:
    documents = documents_from_lengths([5, 2, 9])
    micro_batches = (MicroBatch(documents=documents[:1]), MicroBatch(documents=()), MicroBatch(documents=documents[1:]))
    table, counts = pack_micro_batches(micro_batches)
    assert counts.tolist() == [1, 0, 2]
    assert unpack_micro_batches(table, counts) == micro_batches


@pytest.mark.parametrize("packer", sorted(PACKERS))
def test_a_process_plans_what_is_planned_in_place(packer: str, rows: tuple[IndexRows, ...]) -> None:
    """Also after a state saved while the process was ahead, restored in either kind."""
    spec = _spec(rows, packer)
    inline, process = InlineSource(spec), ProcessSource(spec, steps_ahead=3, rank=0, timeout_s=20)
    try:
        for _ in range(2):
            assert _without_time(process.next_step()) == _without_time(inline.next_step())
        state = process.state()
        assert state == inline.state()
        rest = [_without_time(process.next_step()) for _ in range(NUM_STEPS - 2)]
        with pytest.raises(ConfigError, match="got 6"):
            process.next_step()
    finally:
        process.close()
    resumed = InlineSource(dataclasses.replace(spec, restored=state))
    assert [_without_time(resumed.next_step()) for _ in range(NUM_STEPS - 2)] == rest
    assert rest[-1].statistics.waiting_tokens == 0
    assert sum(m.num_tokens for m in rest[-1].micro_batches) > 0


def test_a_state_of_other_data_is_refused_at_the_start(rows: tuple[IndexRows, ...]) -> None:
    state = InlineSource(_spec(rows)).state()
    with pytest.raises(StateError, match="seed"):
        ProcessSource(_spec(rows, seed=12, restored=state), steps_ahead=1, rank=0, timeout_s=20)


def test_an_error_in_planning_reaches_training(rows: tuple[IndexRows, ...]) -> None:
    missing = (dataclasses.replace(rows[0], prefix=rows[0].prefix + "-gone"),)
    with pytest.raises(PlannerProcessError, match="FileNotFoundError"):
        ProcessSource(_spec(missing), steps_ahead=1, rank=0, timeout_s=20)


def test_a_state_is_kept_however_far_planning_is_ahead(rows: tuple[IndexRows, ...]) -> None:
    spec = _spec(rows, num_steps=20)
    inline, process = InlineSource(spec), ProcessSource(spec, steps_ahead=12, rank=0, timeout_s=20)
    try:
        for _ in range(3):
            assert _without_time(process.next_step()) == _without_time(inline.next_step())
        assert process.state() == inline.state()
    finally:
        process.close()


def test_an_error_met_ahead_comes_when_its_step_is_asked_for(rows: tuple[IndexRows, ...]) -> None:
    """The third step cannot be planned. Whoever is two steps ahead still hands over the first two."""
    process = ProcessSource(_spec(rows, num_steps=2), steps_ahead=2, rank=0, timeout_s=20)
    process._num_steps = None  # so that more is ordered than the planner knows of
    try:
        assert [process.next_step().step for _ in range(2)] == [0, 1]
        with pytest.raises(ConfigError, match="step must be below num_steps 2, got 2"):
            process.next_step()
    finally:
        process.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_for_the_whole_job_leaves_planning_alive(number: signal.Signals, process: ProcessSource) -> None:
    """Training asks it for the state that goes into the checkpoint which it saves on that very signal."""
    process.next_step()
    os.kill(process._process.pid, number)
    time.sleep(0.05)
    assert process.state()["packer_state"]["step"] == 1
    assert process._process.poll() is None


def test_a_dead_process_is_an_error_that_names_the_rank(process: ProcessSource) -> None:
    process.next_step()
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(PlannerProcessError, match="rank 3: the planning process ended"):
        _plan_to_the_end(process)


def test_a_stuck_process_is_an_error_and_no_hang(process: ProcessSource) -> None:
    process.next_step()
    os.kill(process._process.pid, signal.SIGSTOP)
    process._timeout_s = 0.3
    with pytest.raises(PlannerProcessError, match="rank 3: planning must answer within"):
        _plan_to_the_end(process)
    os.kill(process._process.pid, signal.SIGCONT)


def test_closing_leaves_no_process(rows: tuple[IndexRows, ...]) -> None:
    source = ProcessSource(_spec(rows), steps_ahead=1, rank=0, timeout_s=20)
    source.close()
    assert source._process.poll() == 0


def test_what_attention_looks_up_comes_with_the_step(rows: tuple[IndexRows, ...]) -> None:
    """Made where the step is planned, for this rank and the layers' kinds, with either source."""
    uses: Any = (("all_gather", None), ("p2p", None), ("all_gather", 5))
    spec = _spec(rows, sharding=Sharding(name="hybrid", cp_size=4), cp_rank=2, index_uses=uses)
    process = ProcessSource(spec, steps_ahead=1, rank=0, timeout_s=20)
    try:
        steps = [source.next_step() for source in (process, InlineSource(spec))]
    finally:
        process.close()
    for one, two in zip(*(step.shard_plans for step in steps), strict=True):
        assert one == two
        assert prepared(one).keys() == prepared(two).keys()
        longest = max(one.lengths)
        assert {key[1:] for key in prepared(one)} == {(2, None), (2, 5)} if longest > 5 else {(2, None)}
        places = [gather_index(plan, 2, None).places.numbers.tolist() for plan in (one, two)]
        assert places[0] == places[1]
    assert any(len(gather_index(plan, 2, None).places) for plan in steps[0].shard_plans)
