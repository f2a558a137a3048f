"""Index checks on small files written by Megatron's own builder, then damaged."""

import struct

import numpy as np
import pytest

from wlb.data.index_file import check_index
from wlb.errors import DataError

indexed_dataset = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="megatron-core is missing: the file format is not checked"
)


def write(prefix, documents, dtype=np.int32):
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "corpus", [[1, 2, 3], [4, 5], [6, 7, 8, 9]])


def edit(path, offset, replacement):
    data = bytearray(path.read_bytes())
    data[offset : offset + len(replacement)] = replacement
    path.write_bytes(data)


@pytest.mark.parametrize("dtype", [t.name for t in indexed_dataset.DType])
def test_every_token_type_of_the_builder_is_read(tmp_path, dtype):
    summary = check_index(write(tmp_path / "corpus", [[1, 2, 3], [4, 5]], getattr(np, dtype)))
    assert (summary.num_sequences, summary.num_tokens, summary.token_dtype) == (2, 5, dtype)


def test_an_empty_last_sequence_and_a_prefix_with_a_dot_are_fine(tmp_path):
    assert check_index(str(write(tmp_path / "v1.5", [[1, 2, 3], []]))).num_tokens == 3


def test_layout_is_34_bytes_and_20_per_sequence(prefix):
    # One document boundary more than documents: 34 + 3 * (4 + 8) + 4 * 8.
    assert (prefix.with_suffix(".idx")).stat().st_size == 102


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_missing_file(prefix, suffix):
    prefix.with_suffix(suffix).unlink()
    with pytest.raises(DataError, match=rf"must name an .idx and a .bin file, but .*corpus\{suffix} is not a file"):
        check_index(prefix)


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [
        (0, "must start with"),
        (5, "must start with"),
        (33, "must have a header of 34 bytes, got 33: it is truncated"),
        (34, "must have 102 bytes for 3 sequences and 4 document boundaries, got 34: it is truncated"),
        (101, "must have 102 bytes .* got 101"),
    ],
)
def test_truncated_index(prefix, num_bytes, message):
    path = prefix.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(DataError, match=message):
        check_index(prefix)


@pytest.mark.parametrize(
    ("offset", "replacement", "message"),
    [
        (0, b"PK", "must start with b'MMIDIDX"),
        (9, struct.pack("<Q", 2), "must have version 1, got 2"),
        (17, b"\x09", "must have a dtype code of 1 to 8, got 9"),
        (42, struct.pack("<i", -1), "got length -1 and offset 20"),
        (62, struct.pack("<q", 21), "multiple of 4 bytes, got length 4 and offset 21"),
    ],
)
def test_damaged_index(prefix, offset, replacement, message):
    edit(prefix.with_suffix(".idx"), offset, replacement)
    with pytest.raises(DataError, match=message):
        check_index(prefix)


def test_an_index_without_sequences(tmp_path):
    with pytest.raises(DataError, match="must hold at least one sequence, got 0"):
        check_index(write(tmp_path / "corpus", []))


def test_tokens_shorter_than_the_index_says(prefix):
    path = prefix.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"corpus.bin must have 36 bytes as corpus.idx says, got 32: it is truncated"):
        check_index(prefix)
