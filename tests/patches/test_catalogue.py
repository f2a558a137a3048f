"""Every patch is in the catalogue, has a row in the README, and fits what is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.wlb.patches.catalogue import every_patch
from megatron.wlb.patches.registry import Patch, check

FOLDER = Path(__file__).resolve().parents[2] / "megatron" / "wlb" / "patches"
NOT_A_PATCH = {"__init__", "catalogue", "registry"}


def _files() -> dict[str, str]:
    """First line of each patch file, which names its target."""
    files = {p.stem: p.read_text().split("\n")[0].strip('"') for p in FOLDER.glob("*.py") if p.stem not in NOT_A_PATCH}
    assert files
    return files


def test_one_file_a_target_and_all_in_the_catalogue() -> None:
    assert sorted(_files().values()) == sorted(patch.target for patch in every_patch())


def test_the_readme_has_a_row_for_each() -> None:
    readme = (FOLDER / "README.md").read_text()
    for stem, target in _files().items():
        assert f"| `{stem}.py` | `{target}` |" in readme


@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex are not installed")
@pytest.mark.parametrize("patch", every_patch(), ids=lambda p: p.target)
def test_fits_the_installed_version(patch: Patch) -> None:
    state = check(patch)
    if state.absent:
        assert state.problem == f"{patch.distribution} is not installed"
    else:
        assert state.problem == ""
