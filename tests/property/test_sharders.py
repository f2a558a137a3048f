"""What every registered sharder promises, on random and on adversarial documents."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.errors import ShardingError
from wlb.sharding import SHARDERS, ShardCosts

CP_SIZES = (1, 2, 3, 4, 8, 16)
LEAST = math.lcm(*CP_SIZES)
STATIC = ("per_sequence", "per_document")

# Every total is a multiple of all sizes.
ADVERSARIAL = {
    "one document": (LEAST,),
    "one token each": (1,) * LEAST,
    "giant with dust": (LEAST * 4 - 40, *(1,) * 40),
    "dust before a giant": (*(2, 1, 3) * 4, LEAST * 3 - 24),
    "equal": (12,) * 8,
    "primes": (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 7),
    "fewer documents than ranks": (LEAST + 1, LEAST - 1),
    "two giants and little else": (2 * LEAST + 5, 2 * LEAST - 7, 2),
    "just over a share": (LEAST // 16 + 1,) * 12,
}

COSTS = {
    "tiles": ShardCosts(tile_tokens=4),
    "tiles larger than documents": ShardCosts(tile_tokens=128),
    "receiving": ShardCosts(tile_tokens=4, received_token_pairs=20),
    "everything": ShardCosts(tile_tokens=1, received_token_pairs=3, span_pairs=7, exchange_pairs=50),
    "receiving is all that counts": ShardCosts(tile_tokens=2, received_token_pairs=10**9),
}

each_sharder = pytest.mark.parametrize("name", list(SHARDERS))
each_size = pytest.mark.parametrize("cp_size", CP_SIZES)


def _padded(lengths, cp_size):
    """With padding as a last document, as micro-batches come."""
    padding = -sum(lengths) % cp_size
    return (*lengths, padding) if padding else tuple(lengths)


@st.composite
def _packs(draw):
    length = st.one_of(
        st.integers(1, 12),
        st.sampled_from([1, 2, 3, 5, 7, 31, 61, 127, 128, 129, 257]),
        st.integers(200, 400),
    )
    cp_size = draw(st.sampled_from(CP_SIZES))
    return _padded(draw(st.lists(length, min_size=1, max_size=12)), cp_size), cp_size


def _dense(plan):
    """(T, T) the mask that the plan must compute, built from lengths alone: [query, key] by index in the pack."""
    document = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
    index = np.arange(len(document))
    return (document[:, None] == document[None, :]) & (index[None, :] <= index[:, None])


def _tokens(plan, rank):
    """Index in the pack of what a rank holds, from its spans alone."""
    starts = np.concatenate([[0], np.cumsum(plan.lengths)])
    return [int(starts[s.document]) + i for s in plan.ranks[rank] for i in range(s.start, s.stop)]


def _check(plan, lengths, cp_size):
    assert plan.lengths == tuple(lengths)
    assert plan.cp_size == cp_size
    total = sum(lengths)
    held = [_tokens(plan, rank) for rank in range(cp_size)]
    assert [len(tokens) for tokens in held] == [total // cp_size] * cp_size
    assert sorted(token for tokens in held for token in tokens) == list(range(total))
    pack = np.arange(total)
    assert plan.rearrange.tolist() == [token for tokens in held for token in tokens]
    assert (pack[plan.rearrange][plan.restore] == pack).all()
    mask = _dense(plan)
    for rank, tokens in enumerate(held):
        assert plan.causal_pairs(rank) == mask[tokens].sum()
        needed = set(np.flatnonzero(mask[tokens].any(axis=0)).tolist()) - set(tokens)
        assert plan.received_tokens(rank) == len(needed)
    assert sum(plan.causal_pairs(rank) for rank in range(cp_size)) == mask.sum()


@each_sharder
@each_size
@pytest.mark.parametrize("case", list(ADVERSARIAL))
def test_adversarial_packs_are_partitioned(name, cp_size, case):
    lengths = ADVERSARIAL[case]
    assert sum(lengths) % LEAST == 0
    for costs in COSTS.values():
        _check(SHARDERS[name](lengths, cp_size, costs), lengths, cp_size)


@each_sharder
@settings(max_examples=60, deadline=None)
@given(pack=_packs(), costs=st.sampled_from(list(COSTS.values())))
def test_random_packs_are_partitioned(name, pack, costs):
    lengths, cp_size = pack
    _check(SHARDERS[name](lengths, cp_size, costs), lengths, cp_size)


@each_sharder
@settings(max_examples=40, deadline=None)
@given(pack=_packs(), costs=st.sampled_from(list(COSTS.values())))
def test_the_same_lengths_give_the_same_plan(name, pack, costs):
    lengths, cp_size = pack
    one, two = (SHARDERS[name](kind(lengths), cp_size, costs) for kind in (list, tuple))
    assert one == two
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize("name", ["adaptive", "hybrid"])
@settings(max_examples=80, deadline=None)
@given(pack=_packs(), costs=st.sampled_from(list(COSTS.values())))
def test_a_search_is_never_predicted_slower_than_a_static_plan(name, pack, costs):
    lengths, cp_size = pack
    mine = costs.slowest_pairs(SHARDERS[name](lengths, cp_size, costs))
    assert mine <= min(costs.slowest_pairs(SHARDERS[other](lengths, cp_size, costs)) for other in STATIC)


@settings(max_examples=80, deadline=None)
@given(pack=_packs())
def test_per_document_is_level_in_every_document(pack):
    """A rank's tokens of a document are those of any other to within 2, whatever its length."""
    lengths, cp_size = pack
    plan = SHARDERS["per_document"](lengths, cp_size, ShardCosts())
    for document in range(len(lengths)):
        held = [sum(s.num_tokens for s in spans if s.document == document) for spans in plan.ranks]
        assert max(held) - min(held) <= 2


@each_sharder
def test_one_rank_holds_all_documents_whole(name):
    lengths = (3, 1, 8)
    spans = SHARDERS[name](lengths, 1, ShardCosts()).ranks[0]
    assert [(s.document, s.start, s.stop) for s in spans] == [(0, 0, 3), (1, 0, 1), (2, 0, 8)]


@each_sharder
def test_no_document_is_an_empty_plan(name):
    plan = SHARDERS[name]((), 4, ShardCosts())
    assert plan.ranks == ((),) * 4


@each_sharder
@pytest.mark.parametrize(
    ("lengths", "cp_size", "message"),
    [
        ((5, 4), 2, "multiple of cp_size = 2, got 9"),
        ((4,), 0, "cp_size must be >= 1, got 0"),
        ((4, 0), 2, r"lengths must be >= 1, got 0 \(document 1\)"),
    ],
)
def test_what_cannot_be_divided_is_refused(name, lengths, cp_size, message):
    with pytest.raises(ShardingError, match=message):
        SHARDERS[name](lengths, cp_size, ShardCosts())


# Inputs of public reports: last tokens floored away, odd lengths, and shards that are equal by document order only.
@each_sharder
@pytest.mark.parametrize(
    ("lengths", "cp_size"), [((7, 1), 2), ((5, 3), 2), ((6, 10), 4), ((4, 12), 2), ((698, 6), 4)], ids=str
)
def test_reported_packs(name, lengths, cp_size):
    _check(SHARDERS[name](lengths, cp_size, ShardCosts(tile_tokens=2, received_token_pairs=1)), lengths, cp_size)


def test_per_document_levels_the_pairs_of_4_and_12():
    """Ranks are equal in pairs too, and only the rank-major order keeps them so."""
    plan = SHARDERS["per_document"]((4, 12), 2, ShardCosts())
    assert [plan.causal_pairs(rank) for rank in (0, 1)] == [44, 44]
