"""What holds for a document stream whatever the lengths, the window, the cut and the blend."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.data.stream import DocumentSource, DocumentStream

CUTS = ("stream", "window")


@st.composite
def blends(draw):
    """One to three sources with at least one training position each."""
    sources = []
    for i in range(draw(st.integers(1, 3))):
        label_tokens = draw(st.integers(0, 1))
        lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12))
        lengths.append(draw(st.integers(1 + label_tokens, 40)))
        sources.append(
            DocumentSource(
                lengths=np.array(lengths, dtype=np.int32),
                label_tokens=label_tokens,
                weight=draw(st.sampled_from([1.0, 0.3, 2.5])),
                sequence_base=1000 * i,
            )
        )
    return sources


streams = st.fixed_dictionaries(
    {"sources": blends(), "window_tokens": st.integers(1, 24), "seed": st.integers(0, 3), "shuffle": st.booleans()}
)


def pieces_of(drawn, takes):
    return [p for wanted in takes for p in drawn.take(wanted, arrival=0)]


def whole_documents(pieces):
    """Sequences in order, with their lengths, from pieces that were cut anywhere; the last may be unfinished."""
    documents = []
    for p in pieces:
        if p.start == 0:
            documents.append([p.sequence, 0])
        assert documents[-1] == [p.sequence, p.start]  # pieces of a document follow each other without a gap
        documents[-1][1] += p.length
    return documents


@settings(max_examples=150, deadline=None)
@given(streams, st.lists(st.integers(-5, 60), min_size=1, max_size=8))
def test_stream_cut_does_not_depend_on_how_it_is_drawn(kwargs, takes):
    drawn = DocumentStream(**kwargs, cut="stream")
    pieces = pieces_of(drawn, takes)
    at_once = DocumentStream(**kwargs, cut="stream").take(sum(p.length for p in pieces), arrival=0)
    assert list(at_once) == pieces
    assert [p.doc_id for p in pieces] == list(range(len(pieces)))
    # Borders are the multiples of the window and the ends of documents, nothing else.
    window, position = kwargs["window_tokens"], 0
    for i, p in enumerate(pieces):
        assert position // window == (position + p.length - 1) // window
        position += p.length
        if i + 1 < len(pieces) and pieces[i + 1].start > 0:
            assert position % window == 0


@settings(max_examples=100, deadline=None)
@given(streams, st.integers(1, 200))
def test_both_cuts_give_the_same_documents_in_the_same_order(kwargs, wanted):
    by_cut = [whole_documents(DocumentStream(**kwargs, cut=cut).take(wanted, arrival=0)) for cut in CUTS]
    shorter, longer = sorted(by_cut, key=len)
    assert len(longer) - len(shorter) <= 1
    assert shorter[:-1] == longer[: len(shorter) - 1]
    assert shorter[-1][0] == longer[len(shorter) - 1][0]


@settings(max_examples=100, deadline=None)
@given(streams, st.sampled_from(CUTS), st.integers(1, 3))
def test_an_epoch_holds_each_position_exactly_once(kwargs, cut, num_epochs):
    source = kwargs["sources"][0]
    drawn = DocumentStream(**{**kwargs, "sources": [source]}, cut=cut)
    positions = [max(0, int(n) - source.label_tokens) for n in source.lengths]
    for _ in range(num_epochs):
        pieces = drawn.take(sum(positions), arrival=0)
        seen = sorted((p.sequence, t) for p in pieces for t in range(p.start, p.start + p.length))
        assert seen == [(row, t) for row, n in enumerate(positions) for t in range(n)]
        assert max(p.length for p in pieces) <= kwargs["window_tokens"]
    assert drawn.counters.tokens_drawn == num_epochs * sum(positions) == num_epochs * drawn.epoch_tokens
    assert drawn.counters.documents_drawn == num_epochs * sum(n > 0 for n in positions)


@settings(max_examples=150, deadline=None)
@given(streams, st.sampled_from(CUTS), st.lists(st.integers(0, 60), max_size=5), st.integers(1, 150))
def test_a_restored_stream_goes_on_exactly(kwargs, cut, takes, rest):
    unbroken = DocumentStream(**kwargs, cut=cut)
    pieces_of(unbroken, takes)
    resumed = DocumentStream(**kwargs, cut=cut)
    resumed.take(7, arrival=0)  # wherever it stood before
    resumed.restore(json.loads(json.dumps(unbroken.state())))
    assert resumed.take(rest, arrival=1) == unbroken.take(rest, arrival=1)
    assert resumed.state() == unbroken.state()


@settings(max_examples=100, deadline=None)
@given(streams, st.sampled_from(CUTS), st.integers(1, 100), st.integers(0, 100))
def test_a_bounded_draw_is_a_prefix_of_the_unbounded_one(kwargs, cut, wanted, bound):
    free = DocumentStream(**kwargs, cut=cut).take(wanted, arrival=0)
    drawn = DocumentStream(**kwargs, cut=cut)
    bounded = drawn.take(wanted, arrival=0, at_most_tokens=bound)
    assert sum(p.length for p in bounded) <= bound
    assert (*bounded, *drawn.take(wanted - drawn.tokens_drawn, arrival=0)) == free


@pytest.mark.parametrize("seed", range(5))
def test_resume_across_blocks_and_epochs_of_a_long_source(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 60, 1500).astype(np.int32)

    def build():
        return DocumentStream(
            [DocumentSource(lengths=lengths, label_tokens=1)], window_tokens=50, cut="stream", seed=seed
        )

    unbroken, resumed = build(), build()
    for step in range(60):
        wanted = int(rng.integers(1, 4000))
        if step % 7 == 0:
            resumed = build()
            resumed.restore(unbroken.state())
        assert resumed.take(wanted, arrival=step) == unbroken.take(wanted, arrival=step), (seed, step)
    assert unbroken.counters.epochs[0] >= 2
