"""JSON lines, plain or gzip: found, read in blocks of whole lines, checked, written.

A block is the unit of work of every tool that reads a corpus. It carries the number of its first line, so that
whoever parses it, in whichever process, can name the line that is wrong.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wlb.data.atomic_files import atomic_path
from wlb.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Whole lines of one file.

    first_line: number of the first of them, counting from 1.
    data: the bytes, line ends included; only the last line of a file may lack its own.
    read_bytes: bytes of the file on disk (compressed, if it is) consumed to get here; for progress.
    """

    path: str
    first_line: int
    data: bytes
    read_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that holds no document: `str()` gives `file:line: reason`."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


class LineError(ValueError):
    """Why a line cannot be used; the caller knows the file and the number."""


def find_inputs(pattern: str) -> tuple[Path, ...]:
    """The files that `pattern` (a path, or a glob with `**`) names, sorted: their order is the corpus's order.

    A path that exists is taken as it is, even with `[` or `*` in its name.
    DataError if there is none, or if a path that is named is a folder.
    """
    found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    files = tuple(Path(f) for f in found if not os.path.isdir(f))
    if not files:
        kind = "a folder" if os.path.isdir(pattern) else "no file"
        raise DataError(f"input must name JSON-lines files by path or glob, got {pattern!r}, which is {kind}")
    return files


def read_blocks(path: Path, *, block_bytes: int) -> Iterator[Block]:
    """The file in blocks of about `block_bytes` (more, if one line is longer), without a copy of the whole.

    gzip is told by its first two bytes, not by the name. DataError names file and line where gzip data ends early.
    """
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be >= 1, got {block_bytes}")
    line = 1
    begun: list[bytes] = []  # a line that no piece has ended yet
    with open(path, "rb") as raw:
        packed = raw.peek(2)[:2] == _GZIP_MAGIC
        # read1: a pipe gives what it has. read would wait for a full block, deaf to Ctrl-C between its system calls.
        read = gzip.GzipFile(fileobj=raw).read if packed else raw.read1
        while True:
            try:
                piece = read(block_bytes)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise DataError(f"{path}: gzip data is damaged after line {line}: {error}") from error
            if not piece:
                break
            cut = piece.rfind(b"\n") + 1
            if cut == 0:
                begun.append(piece)
                continue
            data = b"".join([*begun, piece[:cut]])
            begun = [piece[cut:]] if cut < len(piece) else []
            yield Block(path=str(path), first_line=line, data=data, read_bytes=_position(raw))
            line += data.count(b"\n")
        if begun:
            yield Block(path=str(path), first_line=line, data=b"".join(begun), read_bytes=_position(raw))


def texts_of_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """The strings under `keys` of one JSON object, in the order of `keys`. LineError says what is wrong."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise LineError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise LineError("not usable JSON: nested too deep") from error
    if type(record) is not dict:
        raise LineError(f"must be a JSON object, got {_json_type(record)}")
    texts = []
    for key in keys:
        if key not in record:
            raise LineError(f"key {key!r} is missing")
        text = record[key]
        if type(text) is not str:
            raise LineError(f"key {key!r} must hold a string, got {_json_type(text)}")
        texts.append(text)
    return texts


def write_json_lines(path: Path, records: Iterable[dict[str, object]]) -> int:
    """Write one object a line, gzip if the name ends with `.gz`; returns how many. Equal records give equal bytes."""
    count = 0
    with atomic_path(path) as temporary, open(temporary, "wb") as raw:
        # mtime=0 and no file name: the gzip header must not depend on when or under which name it was written.
        packer = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) if path.suffix == ".gz" else None
        with io.BufferedWriter(packer or raw, 1 << 20) as out:
            for record in records:
                out.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                count += 1
    return count


def _position(raw: io.BufferedReader) -> int:
    """Bytes consumed; 0 where the input cannot tell (a pipe)."""
    return raw.tell() if raw.seekable() else 0


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
