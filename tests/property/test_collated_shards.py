"""Labels, positions and mask of every token, whatever documents are packed and however ranks divide them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity.sharded_cases import plan_named
from wlb.data.collate import collate, padded_lengths
from wlb.documents import Document, MicroBatch
from wlb.sharding import SHARDERS

PADDING = 9
# Every stored token says where it is: sequence s has s * 1000, s * 1000 + 1, ...; none is the padding token.
SEQUENCE_STEP = 1000


def _read(sequence: int, start: int, count: int) -> np.ndarray:
    return np.arange(start, start + count) + SEQUENCE_STEP * sequence


@st.composite
def _micro_batches(draw: st.DrawFn) -> MicroBatch:
    length = st.one_of(st.integers(1, 9), st.sampled_from([1, 2, 3, 5, 7, 31, 64, 97]))
    pieces = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 300), length), min_size=0, max_size=9))
    return MicroBatch(
        documents=tuple(
            Document(doc_id=i, length=n, arrival=0, sequence=sequence, start=start)
            for i, (sequence, start, n) in enumerate(pieces)
        )
    )


@settings(deadline=None, max_examples=150)
@given(
    micro_batch=_micro_batches(),
    cp_size=st.sampled_from([1, 2, 3, 4, 8]),
    unit=st.sampled_from([1, 2, 16]),
    name=st.sampled_from([*SHARDERS, "random"]),
    seed=st.integers(0, 1000),
)
def test_every_token_has_the_label_and_position_of_its_document(
    micro_batch: MicroBatch, cp_size: int, unit: int, name: str, seed: int
) -> None:
    """Token i is taught token i + 1 of its document; the last stored one is a label only; padding teaches nothing."""
    lengths = padded_lengths(micro_batch, cp_size * unit)
    plan = plan_named(name, lengths, cp_size, seed=seed)
    seen = []
    for rank in range(cp_size):
        packed = collate(micro_batch, _read, plan=plan, rank=rank, padding_token=PADDING)
        assert packed.cu_seqlens.tolist() == np.cumsum([0, *lengths]).tolist()
        assert len(packed.tokens) == sum(lengths) // cp_size
        columns = (packed.tokens, packed.labels, packed.position_ids, packed.loss_mask)
        seen += list(zip(*(c.tolist() for c in columns), strict=True))
    wanted = [
        (SEQUENCE_STEP * d.sequence + d.start + i, SEQUENCE_STEP * d.sequence + d.start + i + 1, i, 1.0)
        for d in micro_batch.documents
        for i in range(d.length)
    ]
    wanted += [(PADDING, PADDING, i, 0.0) for i in range(sum(lengths) - len(wanted))]
    assert sorted(seen) == sorted(wanted)
    assert [seen[i] for i in plan.restore] == wanted


@pytest.mark.parametrize(
    ("name", "tokens", "positions"),
    [
        ("per_document", ([0, 3, 4, 7], [1, 2, 5, 6]), ([0, 3, 0, 3], [1, 2, 1, 2])),
        ("per_sequence", ([0, 1, 6, 7], [2, 3, 4, 5]), ([0, 1, 2, 3], [2, 3, 0, 1])),
    ],
)
def test_two_documents_of_four_on_two_ranks(name: str, tokens: tuple[list[int]], positions: tuple[list[int]]) -> None:
    """The report's own numbers: cu_seqlens [0, 4, 8]."""
    plan = plan_named(name, (4, 4), 2)
    assert [plan.pack_indices(rank).tolist() for rank in (0, 1)] == list(tokens)
    assert [plan.position_ids(rank).tolist() for rank in (0, 1)] == list(positions)
