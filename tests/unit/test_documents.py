"""Document, MicroBatch, StepPlan: literals checkable by eye."""

import numpy as np
import pytest

from wlb.documents import Document, MicroBatch, StepPlan, documents_from_lengths, total_tokens


def test_documents_from_lengths_numbers_them_in_order():
    documents = documents_from_lengths([5, 2], arrival=3, first_id=10)
    assert [(d.doc_id, d.length, d.arrival, d.sequence, d.start) for d in documents] == [
        (10, 5, 3, 10, 0),
        (11, 2, 3, 11, 0),
    ]
    assert total_tokens(documents) == 7


@pytest.mark.parametrize("length", [0, -1])
def test_a_document_without_positions_is_refused(length):
    with pytest.raises(ValueError, match=rf"length must be > 0, got {length} \(document 7\)"):
        Document(doc_id=7, length=length, arrival=0, sequence=0, start=0)


def test_micro_batch_offsets():
    batch = MicroBatch(documents=documents_from_lengths([5, 2, 9]))
    assert batch.num_tokens == 16
    assert batch.max_seqlen == 9
    assert batch.lengths == (5, 2, 9)
    assert batch.cu_seqlens.dtype == np.int32
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 16]


def test_an_empty_micro_batch_is_legal():
    batch = MicroBatch(documents=())
    assert (batch.num_tokens, batch.max_seqlen, batch.cu_seqlens.tolist()) == (0, 0, [0])


def _plan(*replicas, step=2):
    return StepPlan(
        step=step, replicas=tuple(tuple(MicroBatch(documents=m) for m in replica) for replica in replicas), waiting=()
    )


def test_step_plan_counts_tokens_and_delay():
    old = documents_from_lengths([3], arrival=0, first_id=0)
    new = documents_from_lengths([1], arrival=2, first_id=1)
    plan = _plan([old], [new])
    assert plan.num_tokens == 4
    assert [m.num_tokens for m in plan.micro_batches] == [3, 1]
    assert plan.mean_delay_steps() == 1.5  # 3 tokens waited 2 steps, 1 token none
    assert _plan([()]).mean_delay_steps() == 0.0


def test_fingerprint_tells_plans_apart():
    a, b = documents_from_lengths([4, 4])
    base = _plan([(a, b)])
    assert base.fingerprint == _plan([(a, b)]).fingerprint
    assert 0 <= base.fingerprint < 2**63
    others = [
        _plan([(b, a)]),
        _plan([(a,), (b,)]),
        _plan([(a,)], [(b,)]),
        _plan([(a, b)], step=3),
        _plan([(a, Document(doc_id=1, length=4, arrival=0, sequence=1, start=8))]),
    ]
    assert len({base.fingerprint, *(p.fingerprint for p in others)}) == 6
