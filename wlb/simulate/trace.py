"""Reads a trace of document lengths."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wlb.errors import DataError


def load_lengths(path: Path | str) -> NDArray[np.int64]:
    """Document lengths in tokens, (num_documents,), each > 0, in the order of the file.

    path: a JSON list of integers (.json), or text with one integer a line; empty lines are passed over.
    Raises DataError naming the file, and the entry or line, if it cannot be read or holds anything else.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"lengths file {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"lengths file {path}: must be UTF-8 text, got a byte that is not at {error.start}") from error
    lengths = _from_json(text, path) if path.suffix == ".json" else _from_lines(text, path)
    if not lengths:
        raise DataError(f"lengths file {path}: must hold at least one length, got none")
    if max(lengths) > np.iinfo(np.int64).max:
        raise DataError(f"lengths file {path}: lengths must fit 64 bits, got {max(lengths)}")
    return np.array(lengths, dtype=np.int64)


def _from_json(text: str, path: Path) -> list[int]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise DataError(f"lengths file {path}: must be JSON: {error}") from error
    if not isinstance(values, list):
        raise DataError(f"lengths file {path}: must be a list of lengths, got {type(values).__name__}")
    for i, value in enumerate(values):
        if type(value) is not int or value <= 0:
            raise DataError(f"lengths file {path}: entry {i} must be a whole number > 0, got {value!r}")
    return values


def _from_lines(text: str, path: Path) -> list[int]:
    lengths = []
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry:
            continue
        if not (entry.isascii() and entry.isdigit()) or int(entry) == 0:
            raise DataError(f"lengths file {path}: line {number} must be a whole number > 0, got {entry[:40]!r}")
        lengths.append(int(entry))
    return lengths
