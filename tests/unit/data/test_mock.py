"""Mock documents: what any rank computes of them, alike on every machine."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from wlb.data.mock import MockDocuments
from wlb.data.stream import DocumentStream
from wlb.errors import ConfigError

WINDOW = 131072


def _documents(**changes: Any) -> MockDocuments:
    return MockDocuments(**{"count": 1 << 16, "window_tokens": WINDOW, "vocab_size": 32000, "seed": 1234, **changes})


def test_lengths_are_those_of_every_machine_and_version() -> None:
    """Literals: a plan that follows from lengths must not move with numpy, the processor or a refactoring."""
    assert _documents().sequence_lengths[:8].tolist() == [5973, 3291, 4565, 8281, 2573, 4716, 16104, 549]
    assert _documents().get(5, 0, 4).tolist() == [12684, 12689, 12694, 12699]


def test_lengths_have_a_long_tail() -> None:
    """As published for 128K: a median near 3,300 tokens, a sixth of all tokens in documents over a quarter of it."""
    lengths = np.asarray(_documents().sequence_lengths, dtype=np.int64)
    assert np.median(lengths) == pytest.approx(WINDOW / 40, rel=0.03)
    outliers = lengths[lengths > WINDOW / 4 + 1]
    assert len(outliers) / len(lengths) == pytest.approx(1 / 64, rel=0.1)
    assert outliers.sum() / lengths.sum() == pytest.approx(1 / 6, rel=0.1)
    assert lengths.max() == WINDOW + 1, "the longest has a label for each of its window's positions"
    assert lengths.min() >= 2, "each has a position to train"


def test_the_window_and_the_seed_choose_the_set() -> None:
    reference = _documents().sequence_lengths
    assert (_documents(count=100).sequence_lengths == reference[:100]).all()
    assert (_documents(seed=1235).sequence_lengths != reference).mean() > 0.9
    assert np.median(_documents(window_tokens=4096).sequence_lengths) == pytest.approx(4096 / 40, rel=0.03)
    assert _documents().get(3, 0, 50).tolist() != _documents(seed=1235).get(3, 0, 50).tolist()


def test_tokens_are_a_progression_read_from_anywhere() -> None:
    documents = _documents(vocab_size=100)
    whole = documents.get(7)
    assert len(whole) == documents.sequence_lengths[7]
    assert set(np.diff(whole) % 100) == {(whole[1] - whole[0]) % 100}
    assert documents.get(7, 40, 5).tolist() == whole[40:45].tolist()
    assert whole.min() >= 0
    assert whole.max() < 100
    assert len({tuple(documents.get(row, 0, 2).tolist()) for row in range(200)}) > 150


@pytest.mark.parametrize("name", ["count", "window_tokens", "vocab_size"])
def test_an_empty_set_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} of mock documents must be >= 1, got 0"):
        _documents(**{name: 0})


def test_rows_travel_to_the_planning_process() -> None:
    rows = _documents().rows(10, 5000)
    sent = pickle.dumps(rows)
    assert len(sent) < 1000, "names, not lengths"

    def drawn(source: Any) -> list[tuple[int, int]]:
        stream = DocumentStream([source], window_tokens=WINDOW, cut="window", seed=1)
        return [(d.sequence, d.length) for d in stream.take(1_000_000, arrival=0)]

    here = drawn(rows.source())
    assert here == drawn(pickle.loads(sent).source())
    assert all(10 <= sequence < 5000 for sequence, _ in here)
    assert [length for _, length in here] == [rows.lengths()[sequence] - 1 for sequence, _ in here]
