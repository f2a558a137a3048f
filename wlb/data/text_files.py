"""Folders of text files as documents: one document a file, any common encoding, no binary and no double."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wlb.errors import DataError

# utf-32-le begins with utf-16-le's mark, so the longer marks come first.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Control characters that text does not use; tab, line feed, form feed, carriage return, backspace and escape do occur.
_BINARY_BYTES = bytes(b for b in range(32) if b not in b"\t\n\f\r\b\x1b\x0b\x1a") + b"\x7f"
_MAX_BINARY_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A file to read and the name it goes by: its path relative to the folder it was found in, `/`-separated."""

    path: Path
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDocument:
    text: str
    source: str

    def record(self) -> dict[str, object]:
        """The JSON-lines object."""
        return {"text": self.text, "source": self.source}


@dataclass(slots=True, kw_only=True)
class ReadCounts:
    """What became of the files, filled in while `read_documents` runs.

    encodings: documents by the encoding that read them.
    skipped: files by reason: binary, duplicate, empty, too large, unreadable.
    """

    encodings: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    text_bytes: int = 0

    @property
    def documents(self) -> int:
        return self.encodings.total()


def find_text_files(folders: Sequence[Path], *, suffixes: Sequence[str] = ()) -> list[TextFile]:
    """Regular files under `folders`, in the order of the folders and sorted by name inside each.

    suffixes: keep only names that end with one of them (compared in lower case); all, if empty.
    Symbolic links are followed nowhere: neither to a file (it would be read twice) nor into a folder (it may be a
    cycle). DataError if a folder is missing.
    """
    wanted = tuple(s.lower() for s in suffixes)
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"folder must be an existing folder, got {str(folder)!r}")
        for parent, names, files in os.walk(folder):
            names.sort()
            for name in sorted(files):
                path = Path(parent, name)
                if (not wanted or name.lower().endswith(wanted)) and path.is_file() and not path.is_symlink():
                    relative = os.fsencode(path.relative_to(folder).as_posix())  # a name may hold any bytes
                    found.append(TextFile(path=path, source=relative.decode("utf-8", "replace")))
    return found


def decode_text(data: bytes) -> tuple[str, str] | None:
    """(text, encoding) of a file's bytes, or None if they are not text.

    A byte-order mark decides; without one UTF-8 is tried, then Latin-1, which reads anything. So a file without a
    mark is called binary first: if it has a NUL byte, or more than 1 % of control characters.
    """
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            try:
                return data.decode(encoding), encoding.removesuffix("-sig")
            except UnicodeDecodeError:
                return None
    if b"\0" in data:
        return None
    if len(data) - len(data.translate(None, _BINARY_BYTES)) > len(data) * _MAX_BINARY_SHARE:
        return None
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        return data.decode("latin-1"), "latin-1"


def read_documents(
    files: Sequence[TextFile], *, counts: ReadCounts, max_file_bytes: int | None = None
) -> Iterator[TextDocument]:
    """The text of each file, in order; what is left out is counted in `counts`.

    Left out: files larger than `max_file_bytes`, binaries, files of white space only, and any file whose text is
    equal to an earlier one's, whatever its encoding.
    """
    seen: set[bytes] = set()
    for file in files:
        try:
            if max_file_bytes is not None and file.path.stat().st_size > max_file_bytes:
                counts.skipped["too large"] += 1
                continue
            data = file.path.read_bytes()
        except OSError:
            counts.skipped["unreadable"] += 1
            continue
        decoded = decode_text(data)
        if decoded is None:
            counts.skipped["binary"] += 1
            continue
        text, encoding = decoded
        if not text or text.isspace():
            counts.skipped["empty"] += 1
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in seen:
            counts.skipped["duplicate"] += 1
            continue
        seen.add(digest)
        counts.encodings[encoding] += 1
        counts.text_bytes += len(data)
        yield TextDocument(text=text, source=file.source)
