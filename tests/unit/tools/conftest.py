import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from wlb.command_line import run_tool

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture
def run(monkeypatch):
    """run("preprocess_data", "--input", ...) -> exit code, in this process: Megatron is imported once."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run_in_process(name, *argv):
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        tool = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tool)
        return run_tool(tool.main, [str(a) for a in argv])

    return run_in_process


@pytest.fixture
def write_lines():
    def write(path, records):
        path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
        return path

    return write


@pytest.fixture
def read_index():
    """prefix -> (list of documents as lists of ids, dtype), with Megatron's own reader."""

    def read(prefix):
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        dataset = IndexedDataset(str(prefix))
        assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
        return [dataset[i].tolist() for i in range(len(dataset))], np.dtype(dataset.index.dtype)

    return read


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """60 small sources, one of them long."""
    folder = tmp_path_factory.mktemp("sources")
    for i in range(60):
        body = "".join(f"    total_{i} = compute(value_{j}, {i * j})\n" for j in range(2 + (300 if i == 7 else i % 9)))
        (folder / f"part_{i:02}.py").write_text(f"def function_{i}():\n{body}    return total_{i}\n")
    return folder


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory, text_folder):
    from megatron.wlb.preprocess_sentencepiece import SentencePieceConfig, train_sentencepiece
    from wlb.data.json_lines import write_json_lines

    folder = tmp_path_factory.mktemp("model")
    path = folder / "text.jsonl"
    write_json_lines(path, ({"text": f.read_text()} for f in sorted(text_folder.iterdir())))
    train_sentencepiece(SentencePieceConfig(inputs=(path,), model=folder / "tiny.model", vocab_size=330))
    return folder / "tiny.model"
