"""The computed shuffle: a bijection for every size, unrelated for every key, the same on every machine."""

import numpy as np
import pytest

from wlb.data.permutation import Permutation
from wlb.errors import DataError


def test_every_size_up_to_300_is_a_bijection_and_scalar_equals_vector():
    for size in range(1, 301):
        permutation = Permutation(size=size, key=(7, 0, 3))
        block = permutation.block(0, size)
        assert sorted(block.tolist()) == list(range(size)), size
        assert [permutation.at(i) for i in range(size)] == block.tolist(), size


@pytest.mark.parametrize("size", [4096, 65_537, 999_983, 1_000_000])
def test_large_sizes_are_bijections(size: int):
    permutation = Permutation(size=size, key=(1, 0, 0))
    block = permutation.block(0, size)
    assert np.bincount(block, minlength=size).tolist() == [1] * size
    assert [permutation.at(i) for i in range(0, size, size // 7)] == block[:: size // 7].tolist()


def test_elements_of_a_huge_domain_are_distinct_and_need_no_array():
    permutation = Permutation(size=10**15, key=(1, 0, 0))
    block = permutation.block(10**14, 10**14 + 10_000)
    assert len(set(block.tolist())) == 10_000
    assert block.min() >= 0
    assert block.max() < 10**15
    assert permutation.at(10**14 + 5) == block[5]


def test_values_never_change():
    # A saved run goes on with the order of the version that saved it: these literals are a contract.
    assert Permutation(size=8, key=(1, 0, 0)).block(0, 8).tolist() == [7, 3, 1, 5, 2, 4, 6, 0]
    assert Permutation(size=8, key=(1, 0, 1)).block(0, 8).tolist() == [6, 5, 2, 1, 0, 3, 7, 4]
    assert Permutation(size=1_000_000, key=(1, 0, 0)).block(0, 4).tolist() == [101338, 575166, 707076, 821949]
    assert Permutation(size=1, key=(1, 0, 0)).block(0, 1).tolist() == [0]


def test_any_block_is_a_slice_of_the_whole():
    permutation = Permutation(size=1000, key=(3, 1, 4))
    whole = permutation.block(0, 1000).tolist()
    assert permutation.block(37, 541).tolist() == whole[37:541]
    assert permutation.block(1000, 1000).tolist() == []


def test_seed_source_and_epoch_each_change_the_order():
    keys = [(s, n, e) for s in range(3) for n in range(3) for e in range(3)]
    orders = {tuple(Permutation(size=50, key=key).block(0, 50).tolist()) for key in keys}
    assert len(orders) == 27


@pytest.mark.parametrize("size", [3, 10, 37])
def test_each_element_comes_to_each_place_equally_often(size: int):
    num_keys = 4000
    counts = np.zeros((size, size))
    for key in range(num_keys):
        counts[np.arange(size), Permutation(size=size, key=(key,)).block(0, size)] += 1
    expected = num_keys / size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_neighbours_are_unrelated():
    order = Permutation(size=100_000, key=(5, 0, 0)).block(0, 100_000)
    assert abs(float(np.corrcoef(order[:-1], order[1:])[0, 1])) < 0.016  # 5 standard errors
    assert abs(float(np.corrcoef(np.arange(100_000), order)[0, 1])) < 0.016
    # In random order a tenth of the places holds a tenth of each tenth of the elements.
    table = np.bincount(order // 10_000 * 10 + np.arange(100_000) // 10_000, minlength=100)
    assert table.min() > 850
    assert table.max() < 1150


def test_bad_arguments_are_named():
    with pytest.raises(DataError, match=r"size must be >= 1 and < 2\*\*62, got 0"):
        Permutation(size=0, key=(1,))
    with pytest.raises(IndexError, match=r"index must be in \[0, 5\), got 5"):
        Permutation(size=5, key=(1,)).at(5)
    with pytest.raises(IndexError, match=r"first and stop must be ordered in \[0, 5\], got 3 and 6"):
        Permutation(size=5, key=(1,)).block(3, 6)
