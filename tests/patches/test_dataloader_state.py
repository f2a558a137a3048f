"""The state of packing is saved once, from one iterator of several."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.wlb.patches.dataloader_state import make_patch


@pytest.mark.parametrize("iterators", ["only", ["first", "second"]], ids=["one chunk", "two chunks"])
def test_one_iterator_is_saved_by_the_rank_that_writes(iterators: Any) -> None:
    saved: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> None:
        saved.append((args, kwargs))

    make_patch(lambda: False).make(original)(iterators, 3, "folder", dp_group=None)
    assert saved == []
    make_patch(lambda: True).make(original)(iterators, 3, "folder", dp_group=None)
    first = "first" if isinstance(iterators, list) else "only"
    assert saved == [((first, 3, "folder"), {"dp_group": None})]
