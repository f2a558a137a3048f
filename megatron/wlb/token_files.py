"""Megatron's data options as document sources: which sequences of which index files a split reads."""

from __future__ import annotations

from argparse import Namespace
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.training.utils import get_blend_and_blend_per_split

from wlb.data.index_file import IndexRows, check_index
from wlb.data.mock import MockDocuments
from wlb.data.source import DocumentRows
from wlb.errors import ConfigError, DataError

# Tokens looked at in each file before training; every token is checked again when it is read.
_CHECKED_TOKENS = 1 << 20
_LABEL_TOKENS = 1
# Of all splits together; the stream begins a new epoch when they are used up.
_NUM_MOCK_DOCUMENTS = 3 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFiles:
    """Open data sets, as one numbering of sequences.

    datasets: index files, or mock documents.
    rows: per split (train, valid, test) the sequences it reads, one entry a data set, () where the split is empty.
    """

    datasets: tuple[Any, ...]
    sequence_bases: tuple[int, ...]
    rows: tuple[tuple[DocumentRows, ...], ...]

    def read(self, sequence: int, start: int, count: int) -> np.ndarray:
        """`count` stored tokens of a sequence from `start`; fewer if the sequence ends before."""
        number = bisect_right(self.sequence_bases, sequence) - 1
        row = sequence - self.sequence_bases[number]
        dataset = self.datasets[number]
        count = min(count, int(dataset.sequence_lengths[row]) - start)
        return np.asarray(dataset.get(row, offset=start, length=count))


def open_token_files(args: Namespace, *, vocab_size: int) -> TokenFiles:
    """Open what --data-path and its relatives name, and check it; with --mock-data, documents that no file holds.

    Raises:
        ConfigError: no data is named, or a split is.
        DataError: a file is missing or truncated, or holds a token id that is not below `vocab_size`.
    """
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend is None and blend_per_split is None:
        if not args.mock_data:
            raise ConfigError("--data-path must name .bin/.idx data with --wlb-packing, got none and no --mock-data")
        return _mock_documents(args, vocab_size=vocab_size)
    opened: dict[str, int] = {}
    datasets: list[Any] = []
    bases: list[int] = []

    def open_prefix(prefix: str) -> int:
        if prefix not in opened:
            check_index(prefix)
            opened[prefix] = len(datasets)
            bases.append(bases[-1] + len(datasets[-1]) if datasets else 0)
            datasets.append(IndexedDataset(prefix, multimodal=False, mmap=args.mmap_bin_files))
            _check_vocabulary(prefix, datasets[-1], vocab_size)
        return opened[prefix]

    rows_of_splits: list[tuple[DocumentRows, ...]] = []
    whole = [(0.0, 1.0)] * len(Split)
    spans = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split)) if blend else whole
    for split in Split:
        blend_of_split = blend if blend else blend_per_split[split.value]
        span = spans[split.value]
        if blend_of_split is None or span is None:
            rows_of_splits.append(())
            continue
        prefixes, weights = blend_of_split
        numbers = [open_prefix(prefix) for prefix in prefixes]
        rows = [_rows(datasets[number], span) for number in numbers]
        for prefix, number, (first, stop) in zip(prefixes, numbers, rows, strict=True):
            if stop > first and int(datasets[number].sequence_lengths[first:stop].max()) <= _LABEL_TOKENS:
                raise DataError(
                    f"{prefix}.idx must hold a sequence of more than {_LABEL_TOKENS} token in the {split.name} split, "
                    "got none: a token that is only a label trains nothing"
                )
        if weights is None:
            # As in Megatron: without weights, data sets contribute by size.
            weights = [
                float(datasets[n].sequence_lengths[a:b].sum(dtype=np.int64))
                for n, (a, b) in zip(numbers, rows, strict=True)
            ]
        rows_of_splits.append(
            tuple(
                IndexRows(
                    prefix=prefix,
                    first=first,
                    stop=stop,
                    weight=weight,
                    sequence_base=bases[number],
                )
                for prefix, number, weight, (first, stop) in zip(prefixes, numbers, weights, rows, strict=True)
                if stop > first
            )
        )
    return _token_files(args, datasets, bases, rows_of_splits)


def _token_files(
    args: Namespace, datasets: Sequence[Any], bases: Sequence[int], rows: Sequence[tuple[DocumentRows, ...]]
) -> TokenFiles:
    if not rows[0]:
        raise ConfigError(f"--split must leave sequences to the training split, got {args.split}")
    return TokenFiles(datasets=tuple(datasets), sequence_bases=tuple(bases), rows=tuple(rows))


def _mock_documents(args: Namespace, *, vocab_size: int) -> TokenFiles:
    documents = MockDocuments(
        count=_NUM_MOCK_DOCUMENTS, window_tokens=args.seq_length, vocab_size=vocab_size, seed=args.seed
    )
    # An even split where none is asked for, as of Megatron's own mock data.
    spans = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split or "1,1,1"))
    rows = [() if span is None else (documents.rows(*_rows(documents, span)),) for span in spans]
    return _token_files(args, [documents], [0], rows)


def _rows(dataset: Any, span: tuple[float, float]) -> tuple[int, int]:
    """Sequences of a split: the same rows that Megatron's own data sets give it."""
    count = len(dataset)
    return round(span[0] * count), round(span[1] * count)


def _check_vocabulary(prefix: str, dataset: Any, vocab_size: int) -> None:
    """Look at the first tokens of a file, so that the wrong tokenizer is found before training."""
    seen = 0
    for row in range(len(dataset)):
        tokens = dataset.get(row)
        seen += len(tokens)
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise DataError(
                f"token ids must be below the vocabulary size {vocab_size}, got {int(tokens.max())} in sequence {row} "
                f"of {prefix}.bin: was it made with another tokenizer?"
            )
        if seen >= _CHECKED_TOKENS:
            return
