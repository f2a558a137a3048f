"""Reading traces of lengths."""

import pytest

from wlb.errors import DataError
from wlb.simulate import load_lengths


def test_json_and_text_give_the_same_lengths(tmp_path):
    (tmp_path / "a.json").write_text("[3, 1, 4]")
    (tmp_path / "a.txt").write_text("3\n1\n\n 4 \n")
    for name in ("a.json", "a.txt"):
        lengths = load_lengths(tmp_path / name)
        assert lengths.tolist() == [3, 1, 4]
        assert lengths.dtype == "int64"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[1, 2", "must be JSON"),
        ("a.json", '{"a": 1}', "must be a list of lengths, got dict"),
        ("a.json", "[5, 0]", "entry 1 must be a whole number > 0, got 0"),
        ("a.json", "[5, 2.5]", r"entry 1 must be a whole number > 0, got 2\.5"),
        ("a.json", "[true]", "entry 0 must be a whole number > 0, got True"),
        ("a.json", "[]", "must hold at least one length, got none"),
        ("a.txt", "\n", "must hold at least one length, got none"),
        ("a.txt", "5\n\nseven\n", "line 3 must be a whole number > 0, got 'seven'"),
        ("a.txt", "5\n-2\n", "line 2 must be a whole number > 0, got '-2'"),
        ("a.txt", "0\n", "line 1 must be a whole number > 0, got '0'"),
        ("a.txt", "99999999999999999999\n", "lengths must fit 64 bits, got 99999999999999999999"),
    ],
)
def test_bad_files_say_file_place_and_value(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"lengths file .*{name}: {message}"):
        load_lengths(tmp_path / name)


def test_unreadable_files(tmp_path):
    with pytest.raises(DataError, match=r"absent\.json: cannot be read: No such file"):
        load_lengths(tmp_path / "absent.json")
    (tmp_path / "binary.txt").write_bytes(b"12\xff")
    with pytest.raises(DataError, match=r"must be UTF-8 text, got a byte that is not at 2"):
        load_lengths(tmp_path / "binary.txt")
