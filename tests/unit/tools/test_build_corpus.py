import json

import numpy as np


def test_a_small_corpus_is_built_once(run, read_index, text_folder, tmp_path, capsys):
    folder = tmp_path / "corpus"
    argv = (folder, "--folders", text_folder, "--max-documents", "40", "--vocab-size", "330", "--workers", "1")
    assert run("build_corpus", *argv) == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    documents, dtype = read_index(folder / manifest["data_path"])
    lengths = [len(d) for d in documents]
    assert dtype == np.uint16
    assert manifest["documents"] == len(documents) == 40
    assert (manifest["tokens"], manifest["max"]) == (sum(lengths), max(lengths))
    assert manifest["p50"] <= manifest["p99"] <= manifest["max"]
    assert manifest["tokenizer"]["vocab_size"] == 330
    assert (folder / manifest["tokenizer"]["model"]).is_file()
    sources = [json.loads(line)["source"] for line in (folder / "documents.jsonl").read_text().splitlines()]
    assert sources != sorted(sources)

    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert run("build_corpus", *argv) == 0
    assert "complete, kept" in capsys.readouterr().out
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before

    index = folder / "corpus_text_document.idx"
    whole = index.read_bytes()
    index.write_bytes(whole[:-1])  # a file that lost its end: the manifest no longer vouches for it
    assert run("build_corpus", *argv) == 0
    assert index.read_bytes() == whole  # the same seed chose the same documents
    assert run("build_corpus", *argv, "--seed", "2") == 0
    assert [json.loads(line)["source"] for line in (folder / "documents.jsonl").read_text().splitlines()] != sources


def test_an_empty_folder_is_an_error(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert run("build_corpus", tmp_path / "corpus", "--folders", tmp_path / "empty") == 1
    assert "folders must hold at least one text file" in capsys.readouterr().err
    assert list((tmp_path / "corpus").iterdir()) == []


def test_the_installation_has_files_of_library_and_packages():
    from megatron.wlb.preprocess_corpus import installation_files

    files = installation_files()
    sources = [f.source for f in files]
    assert "argparse.py" in sources
    assert "numpy/__init__.py" in sources
    assert len({f.path for f in files}) == len(files)
