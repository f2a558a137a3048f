"""Every patch that a run may apply, for a check without a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from megatron.wlb.core_attention import GroupExchanges
from megatron.wlb.patches import (
    compile_helpers,
    dataloader_state,
    log_line,
    moe_metrics,
    rope_thd,
    schedule,
    te_context_parallel,
)
from megatron.wlb.patches.registry import Patch, PatchState

_HEADINGS = ("target", "distribution", "versions", "installed", "wanted", "found", "state")


def every_patch() -> tuple[Patch, ...]:
    """One a file of this folder. Those that a run makes from its own objects can be checked, not applied."""
    return (
        compile_helpers.PATCH,
        rope_thd.PATCH,
        te_context_parallel.make_patch(GroupExchanges(_not_in_a_run), keep_gathered=False),
        schedule.make_patch(_not_in_a_run),
        log_line.make_patch(_not_in_a_run),
        moe_metrics.make_patch(_not_in_a_run),
        dataloader_state.make_patch(_not_in_a_run),
    )


def patch_table(states: Sequence[PatchState]) -> str:
    """A row a patch: where it goes, what it was written against, what is installed, whether the two agree."""
    rows = [_HEADINGS] + [
        (
            s.patch.target,
            s.patch.distribution,
            s.patch.versions,
            s.version or "-",
            s.patch.wanted,
            s.digest or "-",
            "not installed" if s.absent else "DRIFTED" if s.problem else "fits",
        )
        for s in states
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _not_in_a_run(*_args: Any) -> NoReturn:
    raise AssertionError("a patch of the catalogue is only there to be checked; a run makes its own")
