import gzip
import json

import pytest

from wlb.data.atomic_files import AtomicFiles
from wlb.data.json_lines import LineError, find_inputs, read_blocks, texts_of_line, write_json_lines
from wlb.errors import DataError


@pytest.mark.parametrize("block_bytes", [1, 4, 7, 1000])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_are_whole_lines_and_know_their_number(tmp_path, block_bytes, packed):
    data = b"1\n22\n\n4444444444\n5"
    path = tmp_path / "lines"  # gzip is told by content: the name has no suffix
    path.write_bytes(gzip.compress(data) if packed else data)
    blocks = list(read_blocks(path, block_bytes=block_bytes))
    assert b"".join(b.data for b in blocks) == data
    for block in blocks:
        assert data.split(b"\n")[block.first_line - 1 :][0] == block.data.split(b"\n")[0]
        assert block.data.endswith(b"\n") or block is blocks[-1]
    assert blocks[-1].read_bytes == path.stat().st_size


def test_a_gzip_file_that_was_cut_is_an_error(tmp_path):
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d\n" % i for i in range(20_000)))[:-40])
    with pytest.raises(DataError, match=r"cut\.gz: gzip data is damaged after line \d+"):
        list(read_blocks(path, block_bytes=1000))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
        (b"[1]", "must be a JSON object, got a list"),
        (b"{}", "key 'text' is missing"),
        (b'{"text": null}', "key 'text' must hold a string, got null"),
        (b'{"text": 3}', "key 'text' must hold a string, got a number"),
        (b"[" * 100_000, "not usable JSON: nested too deep"),
    ],
)
def test_texts_of_line_says_what_is_wrong(line, reason):
    with pytest.raises(LineError) as error:
        texts_of_line(line, ("text",))
    assert str(error.value).startswith(reason)


def test_texts_of_line_keeps_the_order_of_the_keys():
    assert texts_of_line(b'\xef\xbb\xbf{"a": "1", "b": "2", "c": 3}\r', ("b", "a")) == ["2", "1"]


def test_find_inputs(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "odd[1].jsonl"):
        (tmp_path / name).touch()
    assert [p.name for p in find_inputs(f"{tmp_path}/?.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert [p.name for p in find_inputs(f"{tmp_path}/odd[1].jsonl")] == ["odd[1].jsonl"]
    with pytest.raises(DataError, match="which is no file"):
        find_inputs(f"{tmp_path}/*.gone")
    with pytest.raises(DataError, match="which is a folder"):
        find_inputs(str(tmp_path))


def test_written_lines_are_equal_for_equal_records_under_any_name(tmp_path):
    records = [{"text": "a\nb"}, {"text": "日本"}]
    assert write_json_lines(tmp_path / "x.jsonl.gz", records) == 2
    write_json_lines(tmp_path / "new" / "y.jsonl.gz", records)
    packed = (tmp_path / "x.jsonl.gz").read_bytes()
    assert packed == (tmp_path / "new" / "y.jsonl.gz").read_bytes()
    assert [json.loads(line) for line in gzip.decompress(packed).splitlines()] == records


def test_a_failure_leaves_earlier_files_and_no_temporary_ones(tmp_path):
    (tmp_path / "a.bin").write_text("old")

    def records():
        yield {"text": "1"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_json_lines(tmp_path / "a.bin", records())
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.bin": "old"}
    with AtomicFiles() as files:
        files.path_for(tmp_path / "a.bin").write_text("new")
        files.path_for(tmp_path / "a.idx").write_text("index")
        assert (tmp_path / "a.bin").read_text() == "old"
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.bin": "new", "a.idx": "index"}
