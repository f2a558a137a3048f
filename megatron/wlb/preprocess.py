"""JSON lines -> Megatron's `.bin/.idx`: tokenized by several processes, written in the order of the input.

blocks of lines -> encode_block (in the workers) -> one IndexedDatasetBuilder per JSON key (in this process)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.wlb.preprocess_progress import Progress
from megatron.wlb.preprocess_tokenizer import TextTokenizer, quiet_imports
from wlb.data.atomic_files import AtomicFiles
from wlb.data.json_lines import BadLine, Block, LineError, read_blocks, texts_of_line
from wlb.data.ordered_workers import ordered_workers
from wlb.errors import ConfigError, DataError

BLOCK_BYTES = 1 << 18
_LISTED_BAD_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessConfig:
    """What to read and where to write; the fields carry the names of Megatron's flags.

    inputs: JSON-lines files, in the order of the corpus.
    output_prefix: `<output_prefix>_<key>_document.bin` and `.idx` are written for every key.
    json_keys: the strings of a line that are documents.
    append_eod: end each document with the tokenizer's end-of-document token.
    workers: processes that tokenize; the output does not depend on it.
    log_interval: documents between two progress lines.
    skip_bad_lines: leave out lines that hold no document instead of refusing the input.
    block_bytes: text handed to a worker at a time.
    """

    inputs: tuple[Path, ...]
    output_prefix: str
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    log_interval: int = 1000
    skip_bad_lines: bool = False
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        for name in ("workers", "log_interval", "block_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not self.json_keys or len(set(self.json_keys)) < len(self.json_keys):
            raise ConfigError(f"json_keys must be one or more different keys, got {list(self.json_keys)}")
        for key in self.json_keys:
            if "/" in key:
                raise ConfigError(f"json_keys become parts of file names and must not contain '/', got {key!r}")
        if not Path(self.output_prefix).name:
            raise ConfigError(f"output_prefix must end with a name, got {self.output_prefix!r}")

    def path_prefix(self, key: str) -> str:
        """What `--data-path` takes."""
        return f"{self.output_prefix}_{key}_document"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBlock:
    """A block's documents as tokens; index k of a tuple belongs to JSON key k.

    tokens: all documents back to back. lengths: tokens of each document, int32.
    num_empty: documents without text, left out.
    num_lines: lines that are not blank, bad ones included.
    """

    path: str
    read_bytes: int
    num_lines: int
    tokens: tuple[np.ndarray, ...]
    lengths: tuple[np.ndarray, ...]
    num_empty: tuple[int, ...]
    bad: tuple[BadLine, ...]


@dataclass(slots=True, kw_only=True)
class PreprocessReport:
    """What a run did. documents, tokens, empty: per JSON key. bad_lines: the first few of `num_bad_lines`."""

    documents: dict[str, int]
    tokens: dict[str, int]
    empty: dict[str, int]
    dtype: str
    num_lines: int = 0
    num_bad_lines: int = 0
    bad_lines: list[BadLine] = field(default_factory=list)
    seconds: float = 0.0

    def bad_lines_text(self) -> str:
        """`file:line: reason` of the first few."""
        more = self.num_bad_lines - len(self.bad_lines)
        return "; ".join(map(str, self.bad_lines)) + (f"; and {more} more" if more else "")


def encode_block(
    work: tuple[Block, bool], *, tokenizer: TextTokenizer, json_keys: tuple[str, ...], append_eod: bool
) -> EncodedBlock:
    """Parse and tokenize one block; with `work[1]` only parse it, to count the bad lines of a run that is lost.

    DataError names the line in which the tokenizer gives an id outside of its own vocabulary.
    """
    block, parse_only = work
    eod = tokenizer.eod if append_eod else None
    dtype = np.dtype(tokenizer.dtype)
    arrays: tuple[list[np.ndarray], ...] = tuple([] for _ in json_keys)
    num_empty = [0] * len(json_keys)
    bad = []
    num_lines = 0
    for number, line in enumerate(block.data.removesuffix(b"\n").split(b"\n"), start=block.first_line):
        if not line or line.isspace():
            continue
        num_lines += 1
        try:
            texts = texts_of_line(line, json_keys)
            if parse_only:
                continue
            encoded = [_ids(text, tokenizer) for text in texts]
        except LineError as error:
            bad.append(BadLine(path=block.path, line=number, reason=str(error)))
            continue
        for k, ids in enumerate(encoded):
            if not ids:
                num_empty[k] += 1
                continue
            if eod is not None:
                ids.append(eod)
            array = np.array(ids)
            if array.min() < 0 or array.max() >= tokenizer.vocab_size:
                wrong = next(i for i in ids if not 0 <= i < tokenizer.vocab_size)
                raise DataError(
                    f"{block.path}:{number}: token ids must be in [0, {tokenizer.vocab_size}), the vocabulary of "
                    f"{tokenizer.name}, got {wrong}"
                )
            arrays[k].append(array.astype(dtype))
    empty = np.empty(0, dtype)
    return EncodedBlock(
        path=block.path,
        read_bytes=block.read_bytes,
        num_lines=num_lines,
        tokens=tuple(np.concatenate(a) if a else empty for a in arrays),
        lengths=tuple(np.fromiter(map(len, a), np.int32, len(a)) for a in arrays),
        num_empty=tuple(num_empty),
        bad=tuple(bad),
    )


def preprocess(config: PreprocessConfig, tokenizer: TextTokenizer) -> PreprocessReport:
    """Write the index of every JSON key; all of them appear, complete, or none does.

    ConfigError if the tokenizer has no end-of-document token to append. DataError if lines are bad (after all were
    parsed, so that the count is the whole file's), if a key has no document, or as `encode_block` raises it.
    """
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    if config.append_eod and tokenizer.eod is None:
        raise ConfigError(f"append_eod needs an end-of-document token, which {tokenizer.name} does not have")
    begin_s = time.monotonic()
    keys = config.json_keys
    report = PreprocessReport(
        documents=dict.fromkeys(keys, 0),
        tokens=dict.fromkeys(keys, 0),
        empty=dict.fromkeys(keys, 0),
        dtype=np.dtype(tokenizer.dtype).name,
    )
    encode = partial(encode_block, tokenizer=tokenizer, json_keys=keys, append_eod=config.append_eod)

    def is_lost() -> bool:
        return report.num_bad_lines > 0 and not config.skip_bad_lines

    with ExitStack() as stack:
        files = stack.enter_context(AtomicFiles())
        builders, index_paths = {}, {}
        for key in keys:
            prefix = config.path_prefix(key)
            builders[key] = IndexedDatasetBuilder(str(files.path_for(Path(f"{prefix}.bin"))), dtype=tokenizer.dtype)
            stack.callback(builders[key].data_file.close)
            index_paths[key] = files.path_for(Path(f"{prefix}.idx"))
        map_blocks = stack.enter_context(ordered_workers(encode, workers=config.workers))
        total_bytes = sum(os.path.getsize(path) for path in config.inputs)
        progress = stack.enter_context(
            Progress("tokenizing", total_bytes=total_bytes, log_interval=config.log_interval)
        )
        done_bytes: dict[str, int] = {}
        for encoded in map_blocks((block, is_lost()) for block in _blocks(config)):
            _count_lines(report, encoded)
            for key, tokens, lengths, num_empty in zip(
                keys, encoded.tokens, encoded.lengths, encoded.num_empty, strict=True
            ):
                _add_documents(builders[key], tokens, lengths)
                report.documents[key] += len(lengths)
                report.tokens[key] += len(tokens)
                report.empty[key] += num_empty
            progress.update(num_bytes=encoded.read_bytes - done_bytes.get(encoded.path, 0), documents=encoded.num_lines)
            done_bytes[encoded.path] = encoded.read_bytes
        if is_lost():
            raise DataError(
                f"{report.num_bad_lines} of {report.num_lines} lines hold no document: {report.bad_lines_text()} "
                "(--skip-bad-lines leaves them out)"
            )
        for key in keys:
            if report.documents[key] == 0:
                raise DataError(
                    f"key {key!r} must hold at least one document with text, got none in {report.num_lines} lines"
                )
            builders[key].finalize(str(index_paths[key]))
    report.seconds = time.monotonic() - begin_s
    return report


def _blocks(config: PreprocessConfig) -> Iterator[Block]:
    for path in config.inputs:
        yield from read_blocks(path, block_bytes=config.block_bytes)


def _ids(text: str, tokenizer: TextTokenizer) -> list[int]:
    # Tokenizers disagree about white space (one gives tokens, one none, one raises): no text, no document.
    if not text or text.isspace():
        return []
    try:
        return tokenizer.ids(text)
    except Exception as error:  # whatever a tokenizer library raises, it is this line that it cannot take
        raise LineError(f"{tokenizer.name} cannot encode the text: {error}") from error


def _count_lines(report: PreprocessReport, encoded: EncodedBlock) -> None:
    report.num_lines += encoded.num_lines
    report.num_bad_lines += len(encoded.bad)
    report.bad_lines.extend(encoded.bad[: _LISTED_BAD_LINES - len(report.bad_lines)])


def _add_documents(builder: Any, tokens: np.ndarray, lengths: np.ndarray) -> None:
    stop = 0
    for length in lengths.tolist():
        start, stop = stop, stop + length
        builder.add_document(tokens[start:stop], [length])
