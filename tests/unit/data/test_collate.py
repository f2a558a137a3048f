"""Packed token arrays written out by hand."""

import numpy as np
import pytest

from wlb.data.collate import collate, padded_lengths, padded_num_tokens
from wlb.documents import Document, MicroBatch, documents_from_lengths
from wlb.errors import ConfigError, DataError, ShardingError
from wlb.sharding import SHARDERS, Sharding
from wlb.sharding.plan import plan_of_chunks, unsharded

STORED = {0: [5, 6, 7, 8], 1: [9, 4, 3], 2: [11, 12, 13, 14, 15, 16]}


class Reader:
    """Token files in a dictionary; remembers what was read."""

    def __init__(self, stored=STORED):
        self.stored = stored
        self.reads = []

    def __call__(self, sequence, start, count):
        self.reads.append((sequence, start, count))
        return np.array(self.stored[sequence][start : start + count], dtype=np.uint16)


def micro_batch(*pieces):
    """Of (sequence, start, length)."""
    return MicroBatch(
        documents=tuple(
            Document(doc_id=i, length=length, arrival=0, sequence=sequence, start=start)
            for i, (sequence, start, length) in enumerate(pieces)
        )
    )


def packed(batch, **kwargs):
    options = {"padding_token": 0, **kwargs}
    lengths = padded_lengths(batch, options.pop("pad_to_multiple", 1))
    plan = options.pop("plan", None) or unsharded(lengths)
    return collate(batch, options.pop("read", Reader()), plan=plan, **options)


def test_two_documents_and_a_padded_tail():
    out = packed(micro_batch((0, 0, 3), (1, 0, 2)), pad_to_multiple=4)
    assert out.tokens.tolist() == [5, 6, 7, 9, 4, 0, 0, 0]
    assert out.labels.tolist() == [6, 7, 8, 4, 3, 0, 0, 0]
    assert out.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert out.loss_mask.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert out.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert [a.dtype for a in (out.tokens, out.labels, out.position_ids)] == [np.int64] * 3
    assert (out.loss_mask.dtype, out.cu_seqlens.dtype) == (np.float32, np.int32)


def test_no_padding_where_the_total_already_divides():
    out = packed(micro_batch((0, 0, 3), (1, 0, 2)), pad_to_multiple=5)
    assert out.cu_seqlens.tolist() == [0, 3, 5]
    assert out.loss_mask.tolist() == [1, 1, 1, 1, 1]


def test_the_padding_may_be_the_longest_segment():
    out = packed(micro_batch((0, 0, 2)), pad_to_multiple=7)
    assert out.cu_seqlens.tolist() == [0, 2, 7]


def test_a_cut_document_takes_the_label_across_the_cut_from_itself():
    # [11 .. 16] has 5 positions, cut in 3 and 2: the label of the third is the fourth token.
    out = packed(micro_batch((2, 3, 2), (2, 0, 3)))
    assert out.tokens.tolist() == [14, 15, 11, 12, 13]
    assert out.labels.tolist() == [15, 16, 12, 13, 14]
    assert out.position_ids.tolist() == [0, 1, 0, 1, 2]


def test_an_empty_micro_batch_is_padding_only():
    out = packed(MicroBatch(documents=()), pad_to_multiple=4, padding_token=99)
    assert out.tokens.tolist() == [99, 99, 99, 99]
    assert out.labels.tolist() == [99, 99, 99, 99]
    assert out.loss_mask.tolist() == [0, 0, 0, 0]
    assert out.position_ids.tolist() == [0, 1, 2, 3]
    assert out.cu_seqlens.tolist() == [0, 4]


def test_one_read_per_document():
    read = Reader()
    packed(micro_batch((2, 1, 3), (0, 0, 3)), read=read)
    assert read.reads == [(2, 1, 4), (0, 0, 4)]


@pytest.mark.parametrize(("lengths", "multiple", "wanted"), [([3, 2], 4, 8), ([8], 4, 8), ([], 4, 4), ([1], 1, 1)])
def test_shapes_are_known_without_reading(lengths, multiple, wanted):
    batch = MicroBatch(documents=documents_from_lengths(lengths))
    assert padded_num_tokens(batch, multiple) == wanted
    stored = {i: [1] * (n + 1) for i, n in enumerate(lengths)}
    assert len(packed(batch, read=Reader(stored), pad_to_multiple=multiple).tokens) == wanted


def test_a_token_beyond_the_vocabulary_is_named():
    assert packed(micro_batch((2, 0, 5)), vocab_size=17).labels.tolist() == [12, 13, 14, 15, 16]
    message = "below the vocabulary size 16, got 16 at position 5 of sequence 2"  # only ever a label
    with pytest.raises(DataError, match=message):
        packed(micro_batch((2, 2, 3)), vocab_size=16)
    with pytest.raises(DataError, match="got -3 at position 1 of sequence 0"):
        packed(micro_batch((0, 0, 2)), read=lambda *_: np.array([1, -3, 2]), vocab_size=16)


def test_a_sequence_shorter_than_the_index_said_is_named():
    with pytest.raises(DataError, match="sequence 1 must hold 4 tokens from position 0, got 3"):
        packed(micro_batch((1, 0, 3)))


def test_bad_multiple_is_named():
    with pytest.raises(ConfigError, match="pad_to_multiple must be >= 1, got 0"):
        padded_num_tokens(micro_batch((0, 0, 3)), 0)


def test_a_rank_reads_and_holds_its_spans_only():
    batch = micro_batch((0, 0, 3), (1, 0, 2))
    plan = plan_of_chunks((3, 2, 3), 2, [(0, 0, 0, 1), (1, 0, 1, 3), (0, 1, 0, 2), (1, 2, 0, 2), (0, 2, 2, 3)])
    readers = [Reader(), Reader()]
    ranks = [packed(batch, plan=plan, rank=r, read=readers[r], pad_to_multiple=8) for r in range(2)]
    assert [readers[r].reads for r in range(2)] == [[(0, 0, 2), (1, 0, 3)], [(0, 1, 3)]]
    assert [out.tokens.tolist() for out in ranks] == [[5, 9, 4, 0], [6, 7, 0, 0]]
    assert [out.labels.tolist() for out in ranks] == [[6, 4, 3, 0], [7, 8, 0, 0]]
    assert [out.position_ids.tolist() for out in ranks] == [[0, 0, 1, 2], [1, 2, 0, 1]]
    assert [out.loss_mask.tolist() for out in ranks] == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert [out.cu_seqlens.tolist() for out in ranks] == [[0, 3, 5, 8]] * 2


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SHARDERS)
def test_ranks_together_hold_the_pack(name, cp_size):
    batch = micro_batch((2, 3, 2), (0, 0, 3), (2, 0, 3), (1, 0, 2))
    lengths = padded_lengths(batch, 12)
    plan = Sharding(name=name, cp_size=cp_size).plan(lengths)
    whole = packed(batch, pad_to_multiple=12)
    ranks = [packed(batch, plan=plan, rank=r) for r in range(cp_size)]
    for field in ("tokens", "labels", "position_ids", "loss_mask"):
        together = np.concatenate([getattr(out, field) for out in ranks])
        assert together[plan.restore].tolist() == getattr(whole, field).tolist()


def test_a_plan_of_other_documents_is_named():
    with pytest.raises(ShardingError, match=r"rank 1: .* document 1 has 2 tokens and the plan divides 3"):
        packed(micro_batch((0, 0, 3), (1, 0, 2)), plan=Sharding(cp_size=2).plan((3, 3)), rank=1)
