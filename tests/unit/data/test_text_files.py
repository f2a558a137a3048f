import pytest

from wlb.data.text_files import ReadCounts, decode_text, find_text_files, read_documents
from wlb.errors import DataError

GREETING = "Grüße, κόσμε\n"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (GREETING.encode(), (GREETING, "utf-8")),
        (b"\xef\xbb\xbf" + GREETING.encode(), (GREETING, "utf-8")),
        (b"\xff\xfe" + GREETING.encode("utf-16-le"), (GREETING, "utf-16")),
        (b"\xfe\xff" + GREETING.encode("utf-16-be"), (GREETING, "utf-16")),
        (b"\xff\xfe\0\0" + GREETING.encode("utf-32-le"), (GREETING, "utf-32")),
        ("Grüße".encode("latin-1"), ("Grüße", "latin-1")),
        (b"", ("", "utf-8")),
        (b"\x1b[1mbold\x1b[0m\ttab\f", ("\x1b[1mbold\x1b[0m\ttab\f", "utf-8")),
        (b"\x7fELF\x02\x01\x01\0\0\0", None),
        (bytes(range(1, 32)) * 4, None),
        (b"\xff\xfe\x00\xd8", None),  # says UTF-16 and ends in half a surrogate pair
    ],
)
def test_decode_text(data, expected):
    assert decode_text(data) == expected


def test_files_are_sorted_filtered_and_links_are_not_followed(tmp_path):
    for name in ("b/z.py", "b/a.PY", "a.py", "a.md", "c/deep/er.py"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    (tmp_path / "in" / "link.py").symlink_to(tmp_path / "in" / "a.py")
    (tmp_path / "in" / "c" / "cycle").symlink_to(tmp_path / "in")
    found = find_text_files([tmp_path / "in"], suffixes=[".py"])
    assert [f.source for f in found] == ["a.py", "b/a.PY", "b/z.py", "c/deep/er.py"]
    assert len(find_text_files([tmp_path / "in"])) == 5
    with pytest.raises(DataError, match=r"folder must be an existing folder, got '.*gone'"):
        find_text_files([tmp_path / "gone"])


def test_read_documents_counts_what_it_leaves_out(tmp_path):
    contents = {
        "1.txt": b"one",
        "2.txt": "one".encode("utf-16"),  # the same text in another encoding
        "3.txt": b" \n",
        "4.txt": b"\0\1\2",
        "5.txt": b"x" * 101,
        "6.txt": b"caf\xe9",
        "7.txt": b"seven",
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    files = find_text_files([tmp_path])
    (tmp_path / "7.txt").unlink()
    counts = ReadCounts()
    documents = list(read_documents(files, counts=counts, max_file_bytes=100))
    assert [(d.source, d.text) for d in documents] == [("1.txt", "one"), ("6.txt", "café")]
    assert counts.encodings == {"utf-8": 1, "latin-1": 1}
    assert counts.skipped == {"duplicate": 1, "empty": 1, "binary": 1, "too large": 1, "unreadable": 1}
    assert (counts.documents, counts.text_bytes) == (2, 7)
