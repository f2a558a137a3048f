"""Transformer Engine's sources, fetched once and kept in pytest's cache, and stand-ins with the patch applied."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


@pytest.fixture
def patched(te_source: TeSource, tmp_path: Path) -> Any:
    """(cp_size) -> `backends` with the patch applied, whose groups are ranks of one process."""
    # Not above: upstream's warnings on import are let through once tests are collected.
    from megatron.wlb.core_attention import GroupExchanges
    from megatron.wlb.patches.registry import applied
    from megatron.wlb.patches.te_context_parallel import make_patch
    from tests.patches.te_calls import WaitingMailbox, signature_in, stand_in

    with ExitStack() as stack:

        def apply(cp_size: int = 1, *, keep_gathered: bool = False) -> Any:
            backends = stack.enter_context(stand_in(te_source.version, tmp_path, signature=signature_in(te_source)))
            mailbox = WaitingMailbox(cp_size)
            exchanges = GroupExchanges(lambda group: mailbox.exchange(int(group)))
            stack.enter_context(applied([make_patch(exchanges, keep_gathered=keep_gathered)]))
            return backends

        yield apply
