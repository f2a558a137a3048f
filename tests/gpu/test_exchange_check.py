"""The GPU check of rows between processes, rehearsed over gloo: it passes, and finds what is broken on purpose."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.harness.processes import run_ranks


def rehearse() -> dict[str, Any]:
    """Outcomes as it is, and by what is broken. Runs in a rank."""
    from megatron.wlb.cpu import cpu_as_device
    from megatron.wlb.gpu_check import exchange
    from megatron.wlb.gpu_check.sections import SCALES
    from megatron.wlb.parallel import single_process
    from megatron.wlb.patches.registry import replace
    from wlb.attention import GroupExchange
    from wlb.attention.transport import HostTransport

    scale = SCALES["cpu"]
    pack = (scale.sharding.lengths, scale.sharding.heads["GQA"], scale.sharding.tile_tokens)
    run_ranks_of_check, all_to_all = exchange._run_ranks, GroupExchange.all_to_all
    kept: list[Any] = []
    received_rows: list[Any] = []

    def keeping(folder: Any, backend: str) -> Any:
        kept.append(run_ranks_of_check(folder, backend))
        return kept[-1]

    def swapped(_folder: Any, _backend: str) -> Any:
        return kept[0][::-1]

    def noting(self: Any, sent: Any, send_counts: Any, received: Any, receive_counts: Any) -> Any:
        received_rows.append(received)
        return all_to_all(self, sent, send_counts, received, receive_counts)

    class Overwritten(HostTransport):
        """Somebody else gets the memory of what is received, as where a stream does not wait."""

        @contextmanager
        def end(self) -> Any:
            yield
            received_rows[-1][-1:].fill_(200.0)

    outcomes: dict[str, Any] = {}
    with cpu_as_device(), single_process("gloo"):
        with ExitStack() as undo:
            replace(undo, exchange, "_run_ranks", keeping)
            outcomes["nothing"] = exchange.check_exchange(scale.exchange, *pack)
        with ExitStack() as undo:
            replace(undo, exchange, "_run_ranks", swapped)
            outcomes["swapped"] = exchange.check_exchange(scale.exchange, *pack)
            replace(undo, exchange, "_run_ranks", lambda *_: kept[0])
            replace(undo, exchange, "transport_for", lambda _device: Overwritten())
            replace(undo, GroupExchange, "all_to_all", noting)
            outcomes["overwritten"] = exchange.check_exchange(scale.exchange, *pack)
    return outcomes


@pytest.fixture(scope="module")
def rehearsed() -> dict[str, Any]:
    outcomes: dict[str, Any] = run_ranks(rehearse, 1)[0]
    return outcomes


def test_passes_as_it_is_and_says_what_was_left_out(rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed["nothing"]
    assert passed, measured
    assert measured["all_to_all"]["messages"] == 20
    assert measured["all_to_all"]["MiB"] > 0
    assert measured["shift"] == {"skipped": "gloo has no messages of a rank to itself"}
    assert set(measured["two processes"]) == {
        f"{c}: {r}" for c in ("all_gather", "p2p") for r in ("out", "dq", "dk", "dv")
    }


def test_finds_memory_that_is_given_away_too_early(rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed["overwritten"]
    assert not passed
    # One row of each message that has one: 16 of 20, of 32 numbers.
    assert measured["all_to_all"]["wrong numbers"] == 16 * 32


def test_finds_processes_that_differ_from_one(rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed["swapped"]
    assert not passed
    assert measured["all_to_all"]["wrong numbers"] == 0
    assert min(measured["two processes"].values()) > 0.5


def test_the_page_tells_results_from_what_was_not_run() -> None:
    from megatron.wlb.gpu_check.page import section
    from megatron.wlb.gpu_check.results import Result

    measured = {
        "all_to_all": {"wrong numbers": 0, "messages": 20, "MiB": 0.5},
        "shift": {"skipped": "gloo has no messages of a rank to itself"},
        "two processes": {"p2p: out": 1e-3, "p2p: dq": float("nan")},
    }
    result = Result(
        name="NCCL to itself",
        kind="NCCL to itself",
        passed=False,
        rule="rule",
        measured=measured,
        duration_s=1.0,
        budget_s=8.0,
    )
    assert section(result)[2:] == [
        "     all_to_all: 0 wrong numbers in 20 messages, 0.5 MiB together",
        "     shift: not run: gloo has no messages of a rank to itself",
        "     two processes: largest difference nan (p2p: dq)",
    ]
