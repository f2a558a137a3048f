"""A corpus of real documents from what every machine with Python has: its own sources and documentation.

    files of the installation -> documents.jsonl -> tokenizer.model -> corpus_text_document.bin/.idx -> manifest.json

File lengths have a natural long tail (a median of a few KB, a maximum of hundreds), which is what this
project is about. The manifest is written last and vouches for the rest.
"""

from __future__ import annotations

import json
import random
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.wlb.preprocess import PreprocessConfig, preprocess
from megatron.wlb.preprocess_progress import Progress
from megatron.wlb.preprocess_sentencepiece import SentencePieceConfig, train_sentencepiece
from megatron.wlb.preprocess_tokenizer import quiet_imports, sentencepiece_tokenizer
from wlb.data.atomic_files import atomic_path
from wlb.data.json_lines import write_json_lines
from wlb.data.text_files import ReadCounts, TextFile, find_text_files, read_documents
from wlb.errors import ConfigError, DataError

SUFFIXES = (".py", ".pyi", ".pyx", ".pxd", ".c", ".h", ".cpp", ".hpp", ".cuh", ".rst", ".md", ".txt")
_MANIFEST_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusConfig:
    """folder: where everything goes. folders: where documents come from; the Python installation, if empty.

    max_documents, max_bytes: documents are drawn in a seeded random order until either is reached.
    max_document_bytes: larger files are left out; those over the default are generated (tables, bundled code).
    """

    folder: Path
    folders: tuple[Path, ...] = ()
    seed: int = 1
    max_documents: int = 20_000
    max_bytes: int = 32_000_000
    max_document_bytes: int = 1_000_000
    vocab_size: int = 4096
    workers: int = 1

    def __post_init__(self) -> None:
        for name in ("max_documents", "max_bytes", "max_document_bytes", "vocab_size", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def data_prefix(self) -> str:
        """What `--data-path` takes."""
        return str(self.folder / "corpus_text_document")

    def request(self) -> dict[str, Any]:
        """What an earlier build must have been asked for to be used again."""
        return {
            "version": _MANIFEST_VERSION,
            "seed": self.seed,
            "max_documents": self.max_documents,
            "max_bytes": self.max_bytes,
            "max_document_bytes": self.max_document_bytes,
            "vocab_size": self.vocab_size,
            "folders": [str(f) for f in self.folders],
        }


def build_corpus(config: CorpusConfig) -> tuple[dict[str, Any], bool]:
    """(manifest, built): the corpus in `config.folder`, built unless a complete one of the same request is there.

    The manifest holds the request, documents, tokens, p50, p99 and max (tokens of a document, the end-of-document token
    included), the tokenizer's flags, and the size of every file. Its paths are relative to the folder.
    """
    earlier = read_manifest(config)
    if earlier is not None:
        return earlier, False
    begin_s = time.monotonic()
    config.manifest.unlink(missing_ok=True)  # from here on the folder is not complete
    text = config.folder / "documents.jsonl"
    model = config.folder / "tokenizer.model"
    counts = ReadCounts()
    write_json_lines(text, _records(config, counts))
    train_sentencepiece(
        SentencePieceConfig(inputs=(text,), model=model, vocab_size=config.vocab_size, seed=config.seed)
    )
    preprocess(
        PreprocessConfig(
            inputs=(text,), output_prefix=str(config.folder / "corpus"), append_eod=True, workers=config.workers
        ),
        sentencepiece_tokenizer(str(model)),
    )
    lengths = _document_lengths(config.data_prefix)
    files = [text, model, *(Path(f"{config.data_prefix}{suffix}") for suffix in (".bin", ".idx"))]
    manifest = {
        "request": config.request(),
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "p50": int(np.percentile(lengths, 50)),
        "p99": int(np.percentile(lengths, 99)),
        "max": int(lengths.max()),
        "text_bytes": counts.text_bytes,
        "left_out": dict(counts.skipped),
        "data_path": Path(config.data_prefix).name,
        "tokenizer": {"type": "SentencePieceTokenizer", "model": model.name, "vocab_size": config.vocab_size},
        "seed": config.seed,
        "build_s": round(time.monotonic() - begin_s, 2),
        "file_bytes": {f.name: f.stat().st_size for f in files},
    }
    with atomic_path(config.manifest) as temporary:
        temporary.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest, True


def read_manifest(config: CorpusConfig) -> dict[str, Any] | None:
    """The manifest of a complete build of this request, or None if there is none."""
    try:
        manifest = json.loads(config.manifest.read_text(encoding="utf-8"))
        sizes = {name: (config.folder / name).stat().st_size for name in manifest["file_bytes"]}
        complete = manifest["request"] == config.request() and sizes == manifest["file_bytes"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if complete else None


def installation_files() -> list[TextFile]:
    """Text files of the standard library and of the installed packages, each once, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    packages = sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})
    # Outside of a virtual environment the packages lie inside the library.
    own = [f for f in find_text_files([library], suffixes=SUFFIXES) if "site-packages" not in Path(f.source).parts]
    return own + find_text_files([p for p in packages if p.is_dir()], suffixes=SUFFIXES)


def _records(config: CorpusConfig, counts: ReadCounts) -> Iterator[dict[str, object]]:
    files = find_text_files(config.folders, suffixes=SUFFIXES) if config.folders else installation_files()
    random.Random(config.seed).shuffle(files)
    done_bytes = 0
    with Progress("reading", total_bytes=_readable_bytes(files, config), log_interval=1000) as progress:
        for document in read_documents(files, counts=counts, max_file_bytes=config.max_document_bytes):
            yield document.record()
            progress.update(num_bytes=counts.text_bytes - done_bytes, documents=1)
            done_bytes = counts.text_bytes
            if counts.documents >= config.max_documents or counts.text_bytes >= config.max_bytes:
                return
    if counts.documents == 0:
        raise DataError(f"folders must hold at least one text file ({' '.join(SUFFIXES)}), got none")


def _readable_bytes(files: Sequence[TextFile], config: CorpusConfig) -> int:
    """For the progress bar: the limit, or less if the files hold less."""
    return min(config.max_bytes, sum(f.path.stat().st_size for f in files)) if config.folders else config.max_bytes


def _document_lengths(prefix: str) -> np.ndarray:
    """(documents,) int: tokens of each."""
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        dataset = IndexedDataset(prefix)
    # Its arrays are views of a file that it unmaps when it goes: copy while it is alive.
    return dataset.sequence_lengths.astype(np.int64)
