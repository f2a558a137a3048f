"""The tool that shows a plan, run as its user runs it, on packs of a few tokens."""

import importlib
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from wlb.data.stream import DocumentSource, DocumentStream
from wlb.sharding import SHARDERS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def show(run, capsys):
    """show("--lengths", ...) -> lines that were printed, in words."""

    def shown(*argv):
        assert run("show_plan", *argv) == 0
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return shown


@pytest.fixture
def refusal(run, capsys):
    """refusal("--cp", ...) -> the sentence; nothing else may have been printed."""

    def refused(*argv):
        assert run("show_plan", *argv) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err.strip()

    return refused


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text("[6, 4, 13, 1]")
    return path


@pytest.fixture
def data_prefix(tmp_path):
    """Documents of 7, 1, 5 and 14 stored tokens: 6, 0, 4 and 13 positions."""
    stored = [7, 1, 5, 14]
    offsets = [2 * sum(stored[:i]) for i in range(4)]
    index = struct.pack("<9sQBQQ4i4q5q", b"MMIDIDX\x00\x00", 1, 8, 4, 5, *stored, *offsets, *range(5))
    (tmp_path / "corpus.idx").write_bytes(index)
    (tmp_path / "corpus.bin").write_bytes(bytes(2 * sum(stored)))
    return tmp_path / "corpus"


def rows(lines, sharder):
    """The printed rows of the sharder's ranks."""
    below = lines[lines.index(sharder) + 3 :]
    return below[: below.index("")]


def holds(lines, sharder="per_sequence"):
    """What each rank holds, printed with --spans."""
    return [row.split("MiB ")[1] for row in rows(lines, sharder)]


def whole_documents(lengths):
    return " ".join(f"{i}:[0, {n})" for i, n in enumerate(lengths))


def test_shows_who_holds_what_for_every_sharder(show):
    """A command of its own, from any folder."""
    command = [sys.executable, ROOT / "tools" / "show_plan.py", "--lengths", "5", "3", "--cp", "2", "--spans"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/", check=True)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines == show(*command[2:])
    assert lines[1] == "pack: 2 documents, 8 tokens; longest document 5; 2 ranks of 4"
    assert lines[2] == (
        "one attention layer, forward: 21 causal pairs, 3.44e-07 TFLOP; a token's key and value are 16,384 bytes"
    )
    assert [line for line in lines if line in SHARDERS] == list(SHARDERS)
    assert all(len(rows(lines, name)) == 2 for name in SHARDERS)
    assert holds(lines, "per_sequence") == ["0:[0, 2) 1:[1, 3)", "0:[2, 5) 1:[0, 1)"]
    assert holds(lines, "per_document") == ["0:[0, 2) 0:[4, 5) 1:[2, 3)", "0:[2, 4) 1:[0, 2)"]


def test_pads_the_tail_and_says_so(show):
    lines = show("--lengths", 5, "--cp", 3, "--sharder", "per_sequence", "--spans")
    assert lines[1] == ("pack: 1 document, 6 tokens, 1 of them padding at the tail; longest document 5; 3 ranks of 2")
    # Chunks of one token; the last is the padding, document 1.
    assert holds(lines) == ["0:[0, 1) 1:[0, 1)", "0:[1, 2) 0:[4, 5)", "0:[2, 4)"]
    # Padding is no document: rank 0 holds a part of one.
    assert rows(lines, "per_sequence")[0].startswith("0 2 0 1 ")


def test_only_the_sharders_named_in_their_order(show):
    named = ["--sharder", "per_document", "per_sequence"]
    lines = show("--lengths", 5, 3, "--cp", 2, *named, "--tile-tokens", 1, "--operations-per-byte", 0)
    assert lines.index("per_document") < lines.index("per_sequence")
    (head,) = [line for line in lines if line.startswith("sharder ")]
    assert head.endswith("speed, per_document = 1")
    # The slowest ranks compute 11 and 13 pairs.
    assert lines[lines.index(head) + 2].endswith("1.00")
    assert lines[lines.index(head) + 3].endswith(f"{11 / 13:.2f}")


def test_bytes_follow_from_the_layer(show):
    layer = ["--num-attention-heads", 8, "--num-query-groups", 2, "--kv-channels", 64, "--bytes-per-number", 4]
    lines = show("--lengths", 4096, 4096, "--cp", 2, "--sharder", "per_document", *layer)
    assert lines[2].endswith("a token's key and value are 1,024 bytes")  # 2 x 2 x 64 x 4
    # Rank 0 needs the middle half of both documents, rank 1 their first quarters.
    zero, one = rows(lines, "per_document")
    assert " 4,096 = 4 MiB " in zero
    assert " 2,048 = 2 MiB " in one


@pytest.mark.parametrize(("pack", "lengths"), [(0, [6, 2]), (1, [2, 6]), (2, [7, 1])])
def test_packs_of_a_file_are_those_that_plain_fills(show, lengths_file, pack, lengths):
    """Documents of 6, 4, 13 and 1 cut at every multiple of 8."""
    argv = ["--lengths-file", lengths_file, "--window", 8, "--pack", pack, "--cp", 1, "--spans"]
    lines = show(*argv, "--sharder", "per_sequence")
    assert lines[0] == f"lengths.json, pack {pack}"
    assert holds(lines) == [whole_documents(lengths)]


def test_a_seed_shuffles_as_the_training_stream(show, tmp_path):
    trace = list(range(1, 31))
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, trace)))
    source = DocumentSource(lengths=np.array(trace), label_tokens=0)
    stream = DocumentStream([source], window_tokens=60, cut="stream", seed=7)
    stream.take(60, arrival=0)
    expected = [d.length for d in stream.take(60, arrival=0)]
    argv = ["--lengths-file", tmp_path / "lengths.txt", "--window", 60, "--pack", 1, "--cp", 1, "--spans"]
    lines = show(*argv, "--seed", 7, "--sharder", "per_sequence")
    assert lines[0] == "lengths.txt, pack 1, seed 7"
    assert holds(lines) == [whole_documents(expected)]
    assert holds(show(*argv, "--sharder", "per_sequence")) != holds(lines)


def test_reads_a_data_set(show, data_prefix):
    """The last pack is what is left of the data set; a document's last token is only a label."""
    argv = ["--data-prefix", data_prefix, "--window", 20, "--cp", 1, "--sharder", "per_sequence", "--spans"]
    lines = show(*argv)
    assert lines[0] == "corpus, pack 0"
    assert holds(lines) == [whole_documents([6, 4, 10])]
    assert holds(show(*argv, "--pack", 1)) == [whole_documents([3])]


@pytest.mark.parametrize(("name", "start"), [("plan.png", b"\x89PNG"), ("plan.SVG", b"<?xml")])
def test_draws_into_a_folder_that_is_made(show, tmp_path, name, start):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: the tool's picture is not checked")
    out = tmp_path / "a folder" / name
    assert show("--lengths", 50, 30, "--cp", 2, "--out", out)[-1] == f"picture: {out}"
    assert out.read_bytes().startswith(start)
    assert [p.name for p in out.parent.iterdir()] == [name]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--lengths", "5", "--cp", "0"], "--cp must be >= 1, got 0"),
        (["--lengths", "5", "0", "--cp", "2"], "--lengths must be >= 1, got 0"),
        (["--lengths", "5", "--cp", "2", "--sharder", "zigzag"], "--sharder must be of per_sequence"),
        (["--lengths", "5", "--cp", "2", "--out", "plan.pdf"], "--out must end in .png or .svg, got plan.pdf"),
        (["--lengths", "5", "--cp", "2", "--seed", "1"], "--seed must be left out with --lengths"),
        (["--lengths", "5", "--cp", "2", "--window", "8"], "--window must be left out with --lengths"),
        (["--lengths", "5", "--cp", "2", "--pack", "1"], "--pack must be left out with --lengths"),
        (
            ["--lengths", "5", "--cp", "2", "--num-query-groups", "5"],
            "num_query_groups must divide num_attention_heads = 32, got 5",
        ),
        (["--lengths", "5", "--cp", "2", "--tile-tokens", "0"], "tile_tokens must be >= 1, got 0"),
        (
            ["--lengths", "5", "--cp", "2", "--operations-per-byte", "-1"],
            "operations_per_byte must be >= 0 and finite, got -1",
        ),
        (["--lengths-file", "nowhere.json", "--cp", "2"], "lengths file nowhere.json: cannot be read"),
        (["--data-prefix", "nowhere", "--cp", "2"], "data prefix nowhere must name an .idx and a .bin file"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(refusal, argv, sentence):
    assert refusal(*argv).startswith(f"error: {sentence}")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--window", 0], "--window must be >= 1, got 0"),
        (["--pack", -1], "--pack must be >= 0, got -1"),
        (["--window", 8, "--pack", 3], "--pack must be below 3, the packs of 8 tokens in lengths.json, got 3"),
    ],
)
def test_a_pack_that_is_not_there(refusal, lengths_file, argv, sentence):
    assert refusal("--lengths-file", lengths_file, "--cp", 2, *argv) == f"error: {sentence}"


def test_a_picture_without_matplotlib_is_refused_before_the_work(refusal, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    assert refusal("--lengths", 5, "--cp", 2, "--out", "plan.png") == (
        "error: --out needs matplotlib to draw plan.png: install the extra wlb-megatron[report]"
    )
