"""Transformer Engine's sources, fetched once and kept in pytest's cache."""

from __future__ import annotations

import pytest

from tests.patches.te_source import VERSIONS, TeSource, fetch


@pytest.fixture(scope="session")
def te_failures(request: pytest.FixtureRequest) -> dict[str, str]:
    """By version, why its source could not be fetched."""
    return fetch(request.config.cache.mkdir("transformer-engine-sources"))


@pytest.fixture(scope="session", params=VERSIONS)
def te_source(request: pytest.FixtureRequest, te_failures: dict[str, str]) -> TeSource:
    """Of every version of Transformer Engine that was read."""
    version = request.param
    if version in te_failures:
        pytest.skip(
            f"Transformer Engine {version} could not be fetched ({te_failures[version]}); lost: the check that the "
            "patch of its context parallelism fits this version"
        )
    return TeSource(version, request.config.cache.mkdir("transformer-engine-sources") / version)
