"""Start-up says of each optional package whether it is there, and what is lost without it."""

from __future__ import annotations

import pytest

from megatron.wlb.environment import APEX, OPTIONAL_PACKAGES, TRANSFORMER_ENGINE, OptionalPackage, has_package


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
