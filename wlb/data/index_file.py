"""Checks of a `<prefix>.idx` / `<prefix>.bin` pair before training starts.

Layout of the index, little-endian: 9 bytes of magic, version (uint64, 1), dtype code (uint8), number of
sequences and of document boundaries (uint64 each), then per sequence its length (int32) and the byte
offset of its tokens in the .bin (int64), then the document boundaries (int64). Multimodal data sets append
one int8 per sequence.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.data.source import DocumentSource
from wlb.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES = {  # code in the header -> (name, bytes)
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    6: ("float64", 8),
    7: ("float32", 4),
    8: ("uint16", 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSummary:
    """What an index says it holds.

    num_sequences: sequences. num_tokens: stored tokens of all of them. token_dtype: numpy name of a token's type.
    """

    num_sequences: int
    num_tokens: int
    token_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRows:
    """The sequences [first, stop) of one index file as a document source, by name: cheap to hand to a process.

    prefix: path without `.idx`. weight, sequence_base: see `DocumentSource`.
    """

    prefix: str
    first: int
    stop: int
    weight: float
    sequence_base: int

    def lengths(self) -> NDArray[Any]:
        """Stored tokens of every sequence of the index: see `index_lengths`."""
        return index_lengths(self.prefix)

    def source(self) -> DocumentSource:
        """Open the index. A stored sequence's last token is only ever a label."""
        return DocumentSource(
            lengths=self.lengths(),
            label_tokens=1,
            first=self.first,
            stop=self.stop,
            weight=self.weight,
            sequence_base=self.sequence_base,
        )


def index_lengths(prefix: str | Path) -> NDArray[Any]:
    """Stored tokens of each sequence, (num_sequences,) int32, a read-only memory map of `<prefix>.idx`."""
    with Path(f"{prefix}.idx").open("rb") as file:
        _, _, _, num_sequences, _ = _HEADER.unpack(file.read(_HEADER.size))
    return np.memmap(f"{prefix}.idx", dtype="<i4", mode="r", offset=_HEADER.size, shape=(num_sequences,))


def check_index(prefix: str | Path) -> IndexSummary:
    """Check that `<prefix>.idx` is whole and that `<prefix>.bin` holds what it points to; reads a few bytes.

    Raises DataError naming the file, the rule and the value found.
    """
    idx, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (idx, tokens):
        if not path.is_file():
            suffix = Path(prefix).suffix
            advice = f": give the prefix without {suffix}" if suffix in (".idx", ".bin") else ""
            raise DataError(f"data prefix {prefix} must name an .idx and a .bin file, but {path} is not a file{advice}")
    idx_bytes, bin_bytes = idx.stat().st_size, tokens.stat().st_size
    with idx.open("rb") as file:
        header = file.read(_HEADER.size)
        if header[: len(_MAGIC)] != _MAGIC:
            raise DataError(f"{idx} must start with {_MAGIC!r}, got {header[: len(_MAGIC)]!r}")
        if len(header) < _HEADER.size:
            raise DataError(f"{idx} must have a header of {_HEADER.size} bytes, got {len(header)}: it is truncated")
        _, version, code, num_sequences, num_boundaries = _HEADER.unpack(header)
        if version != 1:
            raise DataError(f"{idx} must have version 1, got {version}")
        if code not in _TOKEN_TYPES:
            raise DataError(f"{idx} must have a dtype code of {min(_TOKEN_TYPES)} to {max(_TOKEN_TYPES)}, got {code}")
        wanted_bytes = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
        if idx_bytes < wanted_bytes:
            raise DataError(
                f"{idx} must have {wanted_bytes} bytes for {num_sequences} sequences and {num_boundaries} document "
                f"boundaries, got {idx_bytes}: it is truncated"
            )
        if num_sequences == 0:
            raise DataError(f"{idx} must hold at least one sequence, got 0")
        # Builders write sequences back to back, so the last one says how long the .bin must be.
        file.seek(_HEADER.size + 4 * (num_sequences - 1))
        (last_length,) = struct.unpack("<i", file.read(4))
        file.seek(_HEADER.size + 4 * num_sequences + 8 * (num_sequences - 1))
        (last_offset,) = struct.unpack("<q", file.read(8))
    dtype, token_bytes = _TOKEN_TYPES[code]
    if last_length < 0 or last_offset < 0 or last_offset % token_bytes:
        raise DataError(
            f"{idx} must give its last sequence a length >= 0 and an offset that is a multiple of {token_bytes} "
            f"bytes, got length {last_length} and offset {last_offset}"
        )
    end_bytes = last_offset + last_length * token_bytes
    if bin_bytes < end_bytes:
        raise DataError(f"{tokens} must have {end_bytes} bytes as {idx.name} says, got {bin_bytes}: it is truncated")
    return IndexSummary(num_sequences=num_sequences, num_tokens=end_bytes // token_bytes, token_dtype=dtype)
