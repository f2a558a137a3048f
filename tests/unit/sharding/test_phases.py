"""The geometry of blocks: every visible score once, none that is not, no row without a key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.attention.device_rows import on_device
from wlb.sharding import phases
from wlb.sharding.phases import PhaseBuilder, visible_blocks
from wlb.sharding.rows import Rows
from wlb.sharding.tasks import Keys, Task


def test_a_span_is_a_full_and_a_diagonal_block() -> None:
    assert list(visible_blocks((2, 4), (0, 4), None)) == [(2, 4, 0, 2, "full"), (2, 4, 2, 4, "diagonal")]


def test_a_window_as_long_as_what_is_seen_cuts_nothing() -> None:
    assert list(visible_blocks((2, 4), (0, 4), 4)) == list(visible_blocks((2, 4), (0, 4), None))


def test_queries_that_a_window_takes_past_the_keys_are_left_out() -> None:
    """Keys 0 and 1, a window of 3: query 2 sees 0 and 1, query 3 sees 1, query 4 none."""
    assert list(visible_blocks((2, 5), (0, 2), 3)) == [(2, 4, 0, 2, "masked")]
    assert list(visible_blocks((4, 6), (0, 2), 3)) == []


def test_a_window_longer_than_a_piece_is_masked_only_at_its_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 2 queries, a window of 6: query 10 sees keys 5 to 10, query 11 sees 6 to 11."""
    monkeypatch.setattr(phases, "MASK_ROWS", 2)
    assert list(visible_blocks((10, 12), (0, 12), 6)) == [
        (10, 12, 5, 7, "masked"),
        (10, 12, 7, 10, "full"),
        (10, 12, 10, 12, "diagonal"),
    ]


def _covered(queries: tuple[int, int], keys: tuple[int, int], window: int | None) -> np.ndarray:
    """How often each (query, key) is computed."""
    counts = np.zeros((queries[1], max(queries[1], keys[1])), dtype=int)
    distance = np.arange(counts.shape[0])[:, None] - np.arange(counts.shape[1])
    visible = (distance >= 0) & (distance < (window or len(counts) + 1))
    for s, e, a, b, kind in visible_blocks(queries, keys, window):
        assert queries[0] <= s < e <= queries[1]
        assert keys[0] <= a < b <= keys[1]
        part = visible[s:e, a:b]
        assert part.any(axis=1).all(), "a query without a key"
        if kind == "full":
            assert part.all()
        elif kind == "diagonal":
            assert (s, e) == (a, b)
            assert (part == np.tri(e - s, dtype=bool)).all()
        else:
            assert part.shape[0] <= phases.MASK_ROWS
            assert part.shape[1] <= 2 * phases.MASK_ROWS
        counts[s:e, a:b] += part
    return counts


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_every_visible_score_is_computed_once(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, 40), "start")
    stop = data.draw(st.integers(start + 1, start + 60), "stop")
    own = data.draw(st.booleans(), "own keys")
    if own:
        keys = (data.draw(st.integers(0, start), "first key"), stop)
    else:
        start, stop = start + 1, stop + 1
        first = data.draw(st.integers(0, start - 1), "first key")
        keys = (first, data.draw(st.integers(first + 1, start), "key stop"))
    window = data.draw(st.one_of(st.none(), st.integers(1, 70)), "window")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "MASK_ROWS", data.draw(st.integers(1, 12), "rows"))
        counts = _covered((start, stop), keys, window)
    distance = np.arange(counts.shape[0])[:, None] - np.arange(counts.shape[1])
    wanted = (distance >= 0) & (distance < (window or len(counts) + 1))
    wanted[:start] = False
    wanted[:, : keys[0]] = wanted[:, keys[1] :] = False
    assert (counts == wanted).all()


def test_masks_stay_small_over_a_long_document() -> None:
    """A window of 1,000 over 100,000 tokens: masks of 256 x 512 at most, as `_covered` also checks for small ones."""
    each = [(e - s, b - a) for s, e, a, b, kind in visible_blocks((0, 100_000), (0, 100_000), 1000) if kind == "masked"]
    assert len(each) > 100
    assert max(q for q, _ in each) <= 256
    assert max(k for _, k in each) <= 512


def test_a_builder_says_which_rows_have_an_output_already() -> None:
    """Rows 0 and 1 see themselves first, then keys of another rank; rows 2 and 3 only keys of another rank."""
    builder = PhaseBuilder(4, None)
    own = builder.phase([Task(0, 2, 5, (Keys(0, 2, 5),))], num_keys=4, causal=True)
    remote = builder.phase(
        [Task(0, 2, 5, (Keys(0, 3, 0), Keys(3, 4, 4))), Task(2, 4, 9, (Keys(4, 6, 1),))], num_keys=6, causal=False
    )
    assert own.first
    assert [b.first for b in own.blocks] == [True]
    assert not remote.first
    assert [b.first for b in remote.blocks] == [False, False, True]
    assert [(b.key_start, b.key_stop, b.shift) for b in remote.blocks] == [(0, 3, 5), (3, 4, 1), (4, 6, 8)]
    assert remote.call.query_rows.numbers.tolist() == [0, 1, 2, 3]
    assert remote.call.key_rows.numbers.tolist() == [0, 1, 2, 3, 4, 5]
    assert remote.call.query_edges.numbers.tolist() == [0, 2, 4]
    assert remote.call.key_edges.numbers.tolist() == [0, 4, 6]
    assert (remote.call.most_queries, remote.call.most_keys) == (2, 4)


def test_rows_are_copied_to_a_device_once() -> None:
    import torch

    rows = Rows(np.array([2, 0, 1]))
    device = torch.device("cpu")
    assert on_device(rows, device) is on_device(rows, device)
    assert on_device(rows, device).tolist() == [2, 0, 1]
    assert not rows.are_all_in_order
    assert Rows(np.arange(3)).are_all_in_order
