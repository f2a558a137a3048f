"""The document stream on lists short enough to cut by hand."""

import json
import tracemalloc

import numpy as np
import pytest

from wlb.data.stream import DocumentSource, DocumentStream
from wlb.errors import ConfigError, DataError, StateError


def source(lengths, *, label_tokens=0, **kwargs):
    return DocumentSource(lengths=np.array(lengths, dtype=np.int32), label_tokens=label_tokens, **kwargs)


def stream(*sources, window=8, cut="stream", seed=1, shuffle=False):
    return DocumentStream(sources, window_tokens=window, cut=cut, seed=seed, shuffle=shuffle)


def lengths_of(pieces):
    return [p.length for p in pieces]


def ids_of(pieces):
    """(sequence, start, length) of each piece."""
    return [(p.sequence, p.start, p.length) for p in pieces]


def test_stream_cut_is_concatenate_and_cut_at_every_window():
    # 6 | 4 | 13 positions, window 8:   0......6 6..8|8.10 10......16|16.....23
    pieces = stream(source([6, 4, 13])).take(23, arrival=3)
    assert ids_of(pieces) == [(0, 0, 6), (1, 0, 2), (1, 2, 2), (2, 0, 6), (2, 6, 7)]
    assert [p.doc_id for p in pieces] == [0, 1, 2, 3, 4]
    assert {p.arrival for p in pieces} == {3}


def test_window_cut_keeps_documents_whole_up_to_the_window():
    drawn = stream(source([6, 8, 9, 16, 17]), cut="window")
    assert ids_of(drawn.take(56, arrival=0)) == [
        (0, 0, 6),
        (1, 0, 8),
        *[(2, 0, 8), (2, 8, 1)],
        *[(3, 0, 8), (3, 8, 8)],
        *[(4, 0, 8), (4, 8, 8), (4, 16, 1)],
    ]
    assert drawn.counters.cut_documents == 3
    assert drawn.counters.documents_drawn == 5
    assert drawn.counters.pieces_drawn == 9
    assert drawn.counters.tokens_drawn == 56


def test_the_last_stored_token_of_a_sequence_is_only_a_label():
    drawn = stream(source([5, 1, 0, 3], label_tokens=1), cut="window")
    assert ids_of(drawn.take(6, arrival=0)) == [(0, 0, 4), (3, 0, 2)]
    assert drawn.counters.skipped_empty == 2
    assert drawn.epoch_tokens == 6


def test_take_stops_at_the_first_piece_that_reaches_the_wanted_tokens():
    drawn = stream(source([3, 3, 3]), cut="window")
    assert lengths_of(drawn.take(4, arrival=0)) == [3, 3]
    assert drawn.take(0, arrival=1) == ()
    assert drawn.take(-5, arrival=1) == ()
    assert ids_of(drawn.take(1, arrival=1)) == [(2, 0, 3)]


def test_a_piece_beyond_the_bound_comes_first_in_the_next_draw():
    drawn = stream(source([3, 4, 5]), cut="window")
    assert ids_of(drawn.take(9, arrival=0, at_most_tokens=9)) == [(0, 0, 3), (1, 0, 4)]
    assert drawn.take(2, arrival=0, at_most_tokens=2) == ()
    assert drawn.tokens_drawn == 7
    resumed = stream(source([3, 4, 5]), cut="window")
    resumed.restore(drawn.state())
    assert ids_of(drawn.take(5, arrival=1)) == ids_of(resumed.take(5, arrival=1)) == [(2, 0, 5)]


def test_an_aligned_stream_fills_windows_exactly():
    drawn = stream(source([5, 11, 1, 30]), window=8, shuffle=True)
    for k in (1, 2, 5):
        assert sum(lengths_of(drawn.take(8 * k, arrival=0))) == 8 * k


def test_each_epoch_is_a_new_order_of_the_same_documents():
    drawn = stream(source([1] * 20), shuffle=True)
    epochs = [[p.sequence for p in drawn.take(20, arrival=0)] for _ in range(3)]
    assert [sorted(e) for e in epochs] == [list(range(20))] * 3
    assert len({tuple(e) for e in epochs}) == 3
    assert drawn.counters.epochs == (2,)


def test_a_single_document_repeats():
    drawn = stream(source([9]), cut="window", shuffle=True)
    assert ids_of(drawn.take(18, arrival=0)) == [(0, 0, 8), (0, 8, 1)] * 2


def test_a_split_hands_out_its_own_rows_under_the_sequence_base():
    drawn = stream(source([1] * 10, first=3, stop=6, sequence_base=100), shuffle=True)
    assert sorted(p.sequence for p in drawn.take(3, arrival=0)) == [103, 104, 105]


def test_blend_draws_from_the_source_that_is_furthest_behind():
    # Shares 3 to 1 of tokens; documents of 2 and of 4 tokens. Deficits before each draw (3 T - 4 own, T - 4 own):
    # (0, 0) a   (-2, 2) b   (10, -10) a   (8, -8) a   (6, -6) a   (4, -4) a   (2, -2) a   (0, 0) a
    a, b = source([2] * 50, weight=3.0), source([4] * 50, weight=1.0, sequence_base=1000)
    pieces = stream(a, b, cut="window").take(18, arrival=0)
    assert [p.sequence // 1000 for p in pieces] == [0, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (70, 20, 10), (1, 1, 1)])
def test_blend_shares_are_shares_of_tokens(weights):
    rng = np.random.default_rng(0)
    parts = [
        source(rng.integers(1, longest, 3000), weight=w, sequence_base=10**6 * i)
        for i, (longest, w) in enumerate(zip((10, 200, 40), weights, strict=True))
    ]
    pieces = stream(*parts, window=256, cut="window", shuffle=True).take(60_000, arrival=0)
    tokens = np.zeros(3)
    for p in pieces:
        tokens[p.sequence // 10**6] += p.length
    wanted = np.array(weights) / sum(weights) * tokens.sum()
    assert np.abs(tokens - wanted).max() <= 400  # two of the longest documents


def test_state_is_small_json_and_goes_on_inside_a_document():
    parts = [source([5, 0, 21, 7], weight=2.0), source([3, 9], sequence_base=10)]
    drawn = stream(*parts, shuffle=True)
    drawn.take(40, arrival=0)
    saved = json.loads(json.dumps(drawn.state()))
    assert saved["open"] is not None
    assert len(json.dumps(saved)) < 1000
    resumed = stream(*parts, shuffle=True)
    resumed.restore(saved)
    assert resumed.take(200, arrival=1) == drawn.take(200, arrival=1)
    assert resumed.counters == drawn.counters
    assert resumed.state() == drawn.state()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "stream seed must be what the saved state was made with: saved 1, present 2"),
        ({"cut": "window"}, "stream cut .* saved 'stream', present 'window'"),
        ({"window": 16}, "stream window_tokens .* saved 8, present 16"),
        ({"shuffle": True}, "stream shuffle .* saved 0, present 1"),
    ],
)
def test_state_of_another_configuration_is_refused(change, message):
    saved = stream(source([5, 4])).state()
    with pytest.raises(StateError, match=message):
        stream(source([5, 4]), **change).restore(saved)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (source([5, 4, 3]), "num_sequences of source 0 .* saved 2, present 3"),
        (source([5, 4], first=1), "first of source 0 .* saved 0, present 1"),
        (source([5, 5]), "positions of source 0 .* saved 9, present 10"),
        (source([4, 5]), "lengths_crc32 of source 0"),
        (source([5, 4], label_tokens=1), "label_tokens of source 0 .* saved 0, present 1"),
    ],
)
def test_state_of_other_data_is_refused_and_changes_nothing(other, message):
    saved = stream(source([5, 4])).state()
    present = stream(other)
    with pytest.raises(StateError, match=message):
        present.restore(saved)
    assert present.tokens_drawn == 0


@pytest.mark.parametrize("field", ["version", "config", "data", "sources", "open", "tokens_drawn"])
def test_incomplete_state_is_refused(field):
    drawn = stream(source([5, 4]))
    saved = {k: v for k, v in drawn.state().items() if k != field}
    with pytest.raises(StateError, match=f"must be complete.*{field}"):
        drawn.restore(saved)


def test_unknown_state_version_is_refused():
    drawn = stream(source([5, 4]))
    with pytest.raises(StateError, match=r"stream version .* saved 99, present 1"):
        drawn.restore({**drawn.state(), "version": 99})


def test_another_blend_is_refused():
    saved = stream(source([5]), source([4], weight=2.0)).state()
    with pytest.raises(StateError, match=r"num_sources .* saved 2, present 1"):
        stream(source([5])).restore(saved)
    with pytest.raises(StateError, match="weight of source 0"):
        stream(source([5]), source([4])).restore(saved)


def test_bad_sources_are_named():
    with pytest.raises(DataError, match=r"source 1 must hold a sequence .* 3 sequences \[0, 3\) has at most 1"):
        stream(source([5]), source([1, 0, 1], label_tokens=1))
    with pytest.raises(DataError, match=r"must hold at least one of the 3 sequences, got \[2, 2\)"):
        source([5, 5, 5], first=2, stop=2)
    with pytest.raises(DataError, match=r"must hold at least one of the 0 sequences, got \[0, 0\)"):
        source([])
    with pytest.raises(DataError, match=r"got \[0, 4\)"):
        source([5, 5, 5], stop=4)
    with pytest.raises(DataError, match=r"lengths must be >= 0, got -7 for sequence 1 of source 0"):
        stream(source([5, -7]))
    with pytest.raises(DataError, match=r"weight must be > 0 and finite, got 0.0"):
        source([5], weight=0.0)
    with pytest.raises(DataError, match=r"label_tokens must be 0 or 1, got 2"):
        source([5], label_tokens=2)
    with pytest.raises(DataError, match=r"lengths must be a vector of integers, got shape .* float64"):
        DocumentSource(lengths=np.array([1.5]), label_tokens=0)
    with pytest.raises(DataError, match="sources must hold at least one source"):
        stream()


def test_bad_configuration_is_named():
    with pytest.raises(ConfigError, match="window_tokens must be >= 1, got 0"):
        stream(source([5]), window=0)
    with pytest.raises(ConfigError, match="cut must be one of stream, window, got 'half'"):
        stream(source([5]), cut="half")


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    num_sequences = 5_000_000
    path = tmp_path / "lengths.bin"
    np.random.default_rng(0).integers(0, 4000, num_sequences).astype(np.int32).tofile(path)
    lengths = np.memmap(path, dtype=np.int32, mode="r")
    tracemalloc.start()
    try:
        drawn = stream(DocumentSource(lengths=lengths, label_tokens=1), window=131_072, shuffle=True)
        for step in range(20):
            assert drawn.take(131_072, arrival=step)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Stored lengths are 20 MB and a shuffled order would be 20 or 40 MB: the scan's chunk is what is seen.
    assert peak_bytes < 3_000_000, peak_bytes
