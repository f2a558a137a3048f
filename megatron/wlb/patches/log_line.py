"""megatron.training.training:print_rank_last

The function that prints the log line of an iteration, and little else. Our fields follow its last one, so that
everything that parses the line today goes on doing so.
Seam that failed: the loss dictionary, whose entries land in the middle of the line.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.wlb.patches.registry import Patch

_OF_AN_ITERATION = "elapsed time per iteration (ms):"


def make_patch(suffix: Callable[[], str]) -> Patch:
    """suffix: () -> what to append to the log line of the iteration that has just ended."""

    def make(original: Callable[[str], None]) -> Callable[[str], None]:
        def print_rank_last(message: str) -> None:
            original(message + suffix() if _OF_AN_ITERATION in message else message)

        return print_rank_last

    return Patch(
        target="megatron.training.training:print_rank_last",
        distribution="megatron-core",
        versions=">=0.19.2,<0.20",
        source_digest="a408eeba0100cc6c",
        reason="the log line has no place for further fields after its last one",
        make=make,
        rebind_aliases=False,
    )
