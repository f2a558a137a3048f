"""Small index files, written by Megatron's own builder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch


def write_index(prefix: Path, documents: Sequence[Sequence[int]]) -> Path:
    """Write `<prefix>.bin` and `<prefix>.idx`; returns the prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.tensor(document, dtype=torch.int64), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def learnable_documents(*, count: int, seed: int, longest: int, vocab_size: int = 127) -> list[list[int]]:
    """Documents with a long tail of lengths, whose tokens can be predicted from the ones before."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        length = int(np.clip(rng.lognormal(2.6, 1.0), 1, longest))
        steps = rng.integers(1, 4, size=length)
        documents.append(((np.cumsum(steps) + rng.integers(0, vocab_size)) % (vocab_size - 1)).tolist())
    return documents
