"""megatron.core.datasets.utils:compile_helpers

Runs `make` in the installed package and exits the process when that fails. The wheel ships the compiled
extension but no Makefile, so it always fails. No option turns the call off.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.wlb.patches.registry import Patch


def _make(original: Callable[[], None]) -> Callable[[], None]:
    def compile_helpers() -> None:
        try:
            from megatron.core.datasets import helpers_cpp  # noqa: F401
        except ImportError:
            original()

    return compile_helpers


PATCH = Patch(
    target="megatron.core.datasets.utils:compile_helpers",
    distribution="megatron-core",
    versions=">=0.19.2,<0.20",
    source_digest="84029a50ae8cfac1",
    reason="the wheel holds the compiled helper but no Makefile, and the failed build ends the process",
    make=_make,
)
