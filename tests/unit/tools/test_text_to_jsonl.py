import gzip
import json


def test_folders_become_one_document_a_file(run, tmp_path, capsys):
    for name, data in {
        "one/b.txt": b"second",
        "one/a/deep.txt": b"caf\xe9",
        "one/copy.txt": b"second",
        "one/image.png": b"\x89PNG\r\n\x1a\n\0\0",
        "two/c.txt": "weit".encode("utf-16"),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    output = tmp_path / "two" / "out.jsonl.gz"  # inside an input folder: a second run must not read it
    for _ in range(2):
        assert run("text_to_jsonl", tmp_path / "one", tmp_path / "two", "--output", output) == 0
        lines = gzip.decompress(output.read_bytes()).splitlines()
        assert [json.loads(line) for line in lines] == [
            {"text": "second", "source": "b.txt"},
            {"text": "café", "source": "a/deep.txt"},
            {"text": "weit", "source": "c.txt"},
        ]
    printed = capsys.readouterr().out
    assert "3 documents, 20 bytes (1 utf-8, 1 latin-1, 1 utf-16)" in printed
    assert "left out: 1 duplicate, 1 binary" in printed


def test_suffixes_and_largest_size(run, tmp_path):
    for name, text in (("a.md", "a"), ("b.py", "b"), ("c.md", "c" * 50)):
        (tmp_path / name).write_text(text)
    output = tmp_path / "out.jsonl"
    assert run("text_to_jsonl", tmp_path, "--output", output, "--suffixes", ".md", "--max-bytes", "10") == 0
    assert [json.loads(line)["source"] for line in output.read_text().splitlines()] == ["a.md"]


def test_nothing_to_read_is_an_error(run, tmp_path, capsys):
    assert run("text_to_jsonl", tmp_path, "--output", tmp_path / "out.jsonl") == 1
    assert "folders must hold at least one text file" in capsys.readouterr().err
    assert run("text_to_jsonl", tmp_path, "--output", tmp_path / "out.jsonl", "--max-bytes", "0") == 1
    assert "--max-bytes must be >= 1, got 0" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
