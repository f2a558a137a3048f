"""Start-up says of each optional package whether it is there, and what is lost without it."""

from __future__ import annotations

from argparse import Namespace
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from megatron.wlb import environment
from megatron.wlb.environment import (
    APEX,
    OPTIONAL_PACKAGES,
    TRANSFORMER_ENGINE,
    OptionalPackage,
    has_package,
    require_installed_core,
    require_packages,
)
from wlb.errors import ConfigError


def _package(module: str, distribution: str) -> OptionalPackage:
    return OptionalPackage(name="Thing", module=module, distributions=("no-such-thing", distribution), lost="speed")


def test_a_package_that_is_there_says_its_version() -> None:
    assert _package("pytest", "pytest").sentence() == f"Thing: found, {pytest.__version__}"
    assert _package("pytest", "no-such-thing-either").sentence() == "Thing: found"


def test_a_package_that_is_missing_says_what_is_lost() -> None:
    # A distribution of that name does not count when the module that matters cannot be imported.
    package = _package("no_such_module", "pytest")
    assert not package.found
    assert package.version == ""
    assert package.sentence() == "Thing: not found; lost: speed"


def test_the_three_that_megatron_uses() -> None:
    assert [package.name for package in OPTIONAL_PACKAGES] == [TRANSFORMER_ENGINE, APEX, "flash-attn"]
    assert all(package.lost for package in OPTIONAL_PACKAGES)
    assert has_package(APEX) == OPTIONAL_PACKAGES[1].found


MEGATRONS_DEFAULTS = {
    "transformer_impl": "transformer_engine",
    "apply_rope_fusion": True,
    "gradient_accumulation_fusion": True,
    "no_persist_layer_norm": False,
    "multi_latent_attention": False,
}
ALL_OFF = {
    "transformer_impl": "local",
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
}
LOCAL = "--transformer-impl local"
ROPE, FUSION, NORM = "--no-rope-fusion", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"


@pytest.mark.parametrize(
    ("present", "options", "flags"),
    [
        ((), {}, [LOCAL, ROPE, FUSION, NORM]),
        ((), {"transformer_impl": "local"}, [ROPE, FUSION, NORM]),
        ((), {"transformer_impl": "local", "multi_latent_attention": True}, [FUSION, NORM]),
        ((APEX,), {}, [LOCAL, ROPE]),
        ((TRANSFORMER_ENGINE,), {}, [FUSION]),
        ((TRANSFORMER_ENGINE,), {"transformer_impl": "local"}, [FUSION, NORM]),
    ],
)
def test_all_flags_that_a_missing_package_needs_are_named_at_once(
    present: tuple[str, ...], options: dict[str, object], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "has_package", lambda name: name in present)
    with pytest.raises(ConfigError) as refused:
        require_packages(Namespace(**(MEGATRONS_DEFAULTS | options)))
    assert f" a run needs {' '.join(flags)}: give these flags too" in str(refused.value)
    assert not any(name in str(refused.value) for name in present)
    require_packages(Namespace(**(MEGATRONS_DEFAULTS | ALL_OFF)))


def test_nothing_is_asked_where_both_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_package", lambda _name: True)
    require_packages(Namespace(**MEGATRONS_DEFAULTS))


class _Installed(metadata.Distribution):
    """megatron-core 0.19.2 in a folder."""

    def __init__(self, folder: Path, *, direct_url: str | None = None) -> None:
        self._folder, self._direct_url = folder, direct_url

    def read_text(self, filename: str) -> str | None:
        return {"METADATA": "Name: megatron-core\nVersion: 0.19.2\n", "direct_url.json": self._direct_url}.get(filename)

    def locate_file(self, path: object) -> Path:
        return self._folder / str(path)


def _core(folder: Path, version: str) -> ModuleType:
    module = ModuleType("megatron.core")
    module.__file__, module.__version__ = str(folder / "megatron/core/__init__.py"), version  # type: ignore[attr-defined]
    return module


def test_a_checkout_before_the_installed_megatron_is_refused_with_its_path(tmp_path: Path) -> None:
    site, checkout = tmp_path / "site", tmp_path / "Megatron-LM"
    installed = _Installed(site)
    require_installed_core(_core(site, "0.19.2+cf3490e"), installed)
    for version in ("0.19.2", "0.20.0rc0"):
        with pytest.raises(ConfigError, match=r"must be the installed megatron-core 0\.19\.2, got ") as refused:
            require_installed_core(_core(checkout, version), installed)
        assert f"{version} from {checkout / 'megatron/core'}: remove" in str(refused.value)
    with pytest.raises(ConfigError, match="megatron-core must be installed"):
        require_installed_core(_core(checkout, "0.19.2"), None)
    editable = _Installed(site, direct_url='{"url": "file:///x", "dir_info": {"editable": true}}')
    require_installed_core(_core(checkout, "0.19.2"), editable)
