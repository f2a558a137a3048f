import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.wlb.preprocess import PreprocessConfig, preprocess
from megatron.wlb.preprocess_tokenizer import TextTokenizer

TOOLS = Path(__file__).resolve().parents[3] / "tools"
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")


def number_tokenizer(vocab_size=100):
    return TextTokenizer(
        name="numbers", ids=lambda s: [int(x) for x in s.split()], vocab_size=vocab_size, eod=None, dtype=np.uint16
    )


def test_golden_round_trip(run, write_lines, read_index, tmp_path, capsys):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1 2 3"}, {"text": ""}, "", {"text": "  "}, {"text": "98"}])
    out = tmp_path / "new" / "out"
    assert run("preprocess_data", "--input", path, "--output-prefix", out, "--append-eod", *NULL) == 0
    assert read_index(f"{out}_text_document") == ([[1, 2, 3, 99], [98, 99]], np.uint16)
    assert "2 documents, 6 tokens (uint16), 2 empty documents left out" in capsys.readouterr().out
    assert sorted(p.name for p in out.parent.iterdir()) == ["out_text_document.bin", "out_text_document.idx"]


def test_a_large_vocabulary_is_stored_wide(run, write_lines, read_index, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "70000 0"}])
    argv = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "70001")
    assert run("preprocess_data", "--input", path, "--output-prefix", tmp_path / "o", *argv) == 0
    assert read_index(tmp_path / "o_text_document") == ([[70000, 0]], np.int32)


def test_several_keys_files_and_gzip(run, read_index, tmp_path):
    for name, number in (("b.jsonl.gz", 2), ("a.jsonl", 1)):
        data = json.dumps({"x": f"{number}", "y": f"{number}{number} 7", "z": None}).encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    argv = ("--json-keys", "x", "y", "--input", f"{tmp_path}/*.jsonl*", "--output-prefix", tmp_path / "o", *NULL)
    assert run("preprocess_data", *argv) == 0
    assert read_index(tmp_path / "o_x_document")[0] == [[1], [2]]
    assert read_index(tmp_path / "o_y_document")[0] == [[11, 7], [22, 7]]


def test_sentencepiece_text_comes_back(run, write_lines, read_index, sentencepiece_model, text_folder, tmp_path):
    texts = [f.read_text() for f in sorted(text_folder.iterdir())] + ["\ttabs \n\n  Grüße 日本 "]
    path = write_lines(tmp_path / "in.jsonl", [{"text": t} for t in texts])
    argv = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", sentencepiece_model, "--append-eod")
    assert run("preprocess_data", "--input", path, "--output-prefix", tmp_path / "o", *argv) == 0
    documents, _ = read_index(tmp_path / "o_text_document")
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    assert {d[-1] for d in documents} == {processor.eos_id()}
    assert [processor.decode(d[:-1]) for d in documents] == texts


def test_output_does_not_depend_on_the_number_of_workers(write_lines, tmp_path):
    records = [{"text": " ".join(str((i * j) % 97) for j in range(i % 50))} for i in range(1, 400)]
    path = write_lines(tmp_path / "in.jsonl", [*records[:200], "{bad", *records[200:]])
    written = {}
    for workers in (1, 3):
        prefix = str(tmp_path / f"o{workers}")
        config = PreprocessConfig(
            inputs=(path,), output_prefix=prefix, workers=workers, block_bytes=500, skip_bad_lines=True
        )
        report = preprocess(config, number_tokenizer())
        assert (report.num_bad_lines, report.bad_lines[0].line) == (1, 201)
        written[workers] = [(tmp_path / f"o{workers}_text_document.{s}").read_bytes() for s in ("bin", "idx")]
    assert written[1] == written[3]
    assert len(written[1][0]) == 2 * sum(len(r["text"].split()) for r in records)


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_are_all_counted_and_fatal(run, write_lines, tmp_path, capsys, workers):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1"}, "{oops", {"no": 1}, {"text": "5"}, {"text": ["x"]}])
    argv = ("--input", path, "--output-prefix", tmp_path / "o", "--workers", workers, *NULL)
    assert run("preprocess_data", *argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: 3 of 5 lines hold no document: ")
    for expected in (f"{path}:2: not JSON", f"{path}:3: key 'text' is missing", f"{path}:5: key 'text' must hold"):
        assert expected in error
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_skip_bad_lines_lists_the_first(run, write_lines, read_index, tmp_path, capsys):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1"}, *["{"] * 7, {"text": "a word"}, {"text": "2"}])
    assert run("preprocess_data", "--input", path, "--output-prefix", tmp_path / "o", "--skip-bad-lines", *NULL) == 0
    assert read_index(tmp_path / "o_text_document")[0] == [[1], [2]]
    assert "8 bad lines left out" in (text := capsys.readouterr().out)
    assert "in.jsonl:2: not JSON" in text
    assert "in.jsonl:6: not JSON" in text
    assert text.rstrip().endswith("and 3 more")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (NULL, "in.jsonl:2: token ids must be in [0, 100), the vocabulary of NullTokenizer, got 100"),
        (("--tokenizer-type", "NullTokenizer"), "--tokenizer-type NullTokenizer needs --vocab-size"),
        ((), "--tokenizer-type must be given"),
        (("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "gone"), "cannot be built: tokenizer_path: gone"),
        ((*NULL, "--workers", "3", "--partitions", "2"), "--partitions must divide --workers (3), got 2"),
        ((*NULL, "--workers", "0"), "workers must be >= 1, got 0"),
        ((*NULL, "--json-keys", "text", "text"), "json_keys must be one or more different keys"),
    ],
)
def test_errors_are_one_sentence_and_leave_earlier_output(run, write_lines, tmp_path, capsys, argv, sentence):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1"}, {"text": "5 100"}])
    (tmp_path / "o_text_document.bin").write_text("earlier")
    assert run("preprocess_data", "--input", path, "--output-prefix", tmp_path / "o", *argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert {p.name for p in tmp_path.iterdir()} == {"in.jsonl", "o_text_document.bin"}
    assert (tmp_path / "o_text_document.bin").read_text() == "earlier"


@pytest.mark.parametrize(
    ("stop_signal", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_an_interrupt_leaves_nothing(tmp_path, stop_signal, code, word):
    # A pipe that stays open is an input without end: the tool has written documents and waits for more.
    os.mkfifo(tmp_path / "in.jsonl")
    # Where the tests run in the background SIGINT may be ignored, which a child would inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    out = tmp_path / "out"
    argv = ("--input", tmp_path / "in.jsonl", "--output-prefix", out / "o", "--workers", "2", *NULL)
    process = subprocess.Popen(
        [sys.executable, TOOLS / "preprocess_data.py", *argv],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, before)
    try:
        with open(tmp_path / "in.jsonl", "wb") as pipe:
            pipe.write(b'{"text": "%s"}\n' % (b"12 " * 500 + b"7") * 3000)
            pipe.flush()
            deadline_s = time.monotonic() + 60
            while not any(p.stat().st_size for p in out.iterdir()):
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            workers = _children(process.pid)
            assert len(workers) == 2
            time.sleep(0.2)  # all that was written is tokenized: it waits in a read
            process.send_signal(stop_signal)
            _, error = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code
    assert error.rstrip().endswith(f"error: {word}")
    assert "Traceback" not in error
    assert list(out.iterdir()) == []
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]
