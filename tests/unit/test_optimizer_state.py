"""Where the state of the distributed optimizer cannot be loaded, a sentence says so before training."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.wlb import optimizer_state
from wlb.errors import ConfigError


def _args(**changed: Any) -> Namespace:
    args = {"use_distributed_optimizer": True, "load": None, "save": None, "finetune": False}
    return Namespace(**(args | {"no_load_optim": False, "no_save_optim": False} | changed))


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    return str(tmp_path)


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "has_package", lambda _name: False)


@pytest.mark.usefixtures("without_packages")
def test_loading_is_refused(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"with a checkpoint in --load needs Transformer Engine or Apex .*, got "):
        optimizer_state.check_loadable(_args(load=checkpoint))


@pytest.mark.usefixtures("without_packages")
def test_saving_is_warned_of(tmp_path: Path) -> None:
    assert "can be resumed only with Transformer Engine or Apex" in optimizer_state.check_loadable(
        _args(save=str(tmp_path), load=str(tmp_path))  # no checkpoint there yet
    )


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize(
    "changed", [{"use_distributed_optimizer": False}, {"finetune": True}, {"no_load_optim": True}], ids=str
)
def test_what_loads_no_such_state_passes(changed: dict[str, bool], checkpoint: str) -> None:
    assert optimizer_state.check_loadable(_args(load=checkpoint, **changed)) == ""


def test_with_a_package_it_loads(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "has_package", lambda name: name == optimizer_state.APEX)
    assert optimizer_state.check_loadable(_args(load=checkpoint, save=checkpoint)) == ""
