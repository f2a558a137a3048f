"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.data import learnable_documents, write_index
from tests.harness.training import train

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of an index of 2,000 short documents, some longer than the harness's window of 64."""
    folder = tmp_path_factory.mktemp("toy")
    return write_index(folder / "toy_text_document", learnable_documents(count=2000, seed=7, longest=200))


@pytest.fixture(scope="session")
def start_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch_dist checkpoint of one process, from which runs of every layout start with equal weights.

    Megatron seeds weights by pipeline rank, so layouts agree only when they load the same ones.
    """
    folder = tmp_path_factory.mktemp("start")
    train(["--mock-data", "--save", folder, "--save-interval", "1"], iterations=1)
    return folder
