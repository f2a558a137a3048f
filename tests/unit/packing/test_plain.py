"""Plain packing by hand."""

import pytest

from wlb.documents import documents_from_lengths
from wlb.errors import PackingError
from wlb.packing import StepShape
from wlb.packing.plain import PlainPacker, next_fit, split_to_count


def _packer(replicas=1, per_replica=2, window=8):
    return PlainPacker(
        shape=StepShape(window_tokens=window, micro_batches_per_replica=per_replica, num_replicas=replicas)
    )


def _lengths(plan):
    return [[list(m.lengths) for m in replica] for replica in plan.replicas]


def test_pieces_of_the_stream_fill_windows_exactly():
    packer = _packer(replicas=2)
    plan, state = packer.plan_step(packer.initial_state(), documents_from_lengths([6, 2, 8, 3, 5, 1, 7]))
    assert _lengths(plan) == [[[6, 2], [3, 5]], [[8], [1, 7]]]
    assert (plan.waiting, state.step, state.drawn_tokens) == ((), 1, 32)
    assert packer.wanted_tokens(state) == 32


def test_whole_documents_leave_gaps_and_the_rest_waits():
    packer = _packer()
    plan, state = packer.plan_step(packer.initial_state(), documents_from_lengths([6, 3, 4, 7, 2]))
    assert _lengths(plan) == [[[6], [3, 4]]]
    assert [d.length for d in plan.waiting] == [7, 2]
    assert packer.wanted_tokens(state) == 16 - 9
    plan, _ = packer.plan_step(state, documents_from_lengths([5, 2], arrival=1, first_id=5))
    assert _lengths(plan) == [[[7], [2, 5]]]
    assert [d.length for d in plan.waiting] == [2]


def test_the_last_step_trains_everything():
    packer = _packer(replicas=2, per_replica=1)
    plan, state = packer.plan_step(packer.initial_state(), documents_from_lengths([6, 6, 6]), steps_left=1)
    assert _lengths(plan) == [[[6], [6]], [[6], []]]
    assert state.waiting == ()


def test_few_documents_are_spread_over_all_micro_batches():
    packer = _packer(per_replica=4)
    plan, _ = packer.plan_step(packer.initial_state(), documents_from_lengths([1, 2, 3, 1]))
    assert _lengths(plan) == [[[1], [2], [3], [1]]]
    plan, _ = packer.plan_step(packer.initial_state(), documents_from_lengths([1, 2]))
    assert _lengths(plan) == [[[1], [2], [], []]]


def test_a_document_over_the_window_is_refused():
    packer = _packer()
    with pytest.raises(PackingError, match=r"length must be <= 8, .* got 9 \(document 0\)"):
        packer.plan_step(packer.initial_state(), documents_from_lengths([9]))


def test_next_fit_and_splitting():
    documents = documents_from_lengths([4, 4, 1, 8])
    packs = next_fit(documents, window_tokens=8)
    assert [[d.length for d in p] for p in packs] == [[4, 4], [1], [8]]
    assert [[d.length for d in p] for p in split_to_count(packs, 5)] == [[4], [4], [1], [8], []]
    assert split_to_count([], 2) == [(), ()]
