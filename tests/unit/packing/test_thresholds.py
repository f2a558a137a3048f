"""Thresholds derived from lengths."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from wlb.errors import ConfigError, DataError
from wlb.packing import derive_thresholds

DATA = Path(__file__).parents[4] / "shared" / "data" / "lengths"


def test_one_clear_band_of_outliers_is_found():
    # a hundred documents of about 24 in a window of 32, all others tiny: any threshold between is as good, so the first
    lengths = [1] * 3100 + [24, 25] * 50
    assert derive_thresholds(lengths, 32, 1, max_fill_steps=100) == (4,)


def test_two_lengths_get_a_queue_each():
    thresholds = derive_thresholds([1] * 1000 + [10] * 100 + [30] * 100, 32, 2, max_mean_delay_steps=1)
    assert len(thresholds) == 2
    assert 1 < thresholds[0] <= 10 < thresholds[1] <= 30


@pytest.mark.parametrize("num_queues", [0, 1, 2])
def test_short_documents_need_no_queue(num_queues):
    assert derive_thresholds([3, 4, 5] * 100, 1024, num_queues) == ()


def test_a_band_that_fills_too_slowly_gets_no_queue():
    lengths = [4] * 100_000 + [900]
    assert derive_thresholds(lengths, 1024, 1) == ()
    assert derive_thresholds(lengths, 1024, 1, max_fill_steps=1000) != ()


def test_a_smaller_delay_means_fewer_or_lower_thresholds():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(4, 1.5, 20_000).astype(int) + 1, 1024)
    loose = derive_thresholds(lengths, 1024, 2, max_mean_delay_steps=1.0)
    tight = derive_thresholds(lengths, 1024, 2, max_mean_delay_steps=0.3)
    assert len(loose) == 2
    assert sum(tight) < sum(loose)


def test_documents_over_the_window_count_as_their_pieces():
    whole = derive_thresholds([1] * 500 + [64, 10] * 20, 32, 1)
    cut = derive_thresholds([1] * 500 + [32, 32, 10] * 20, 32, 1)
    assert whole == cut != ()


@pytest.mark.parametrize("window", [1, 2, 5, 31, 33])
@pytest.mark.parametrize("num_queues", [1, 2, 3, 4])
def test_tiny_windows_give_increasing_thresholds_within_the_window(window, num_queues):
    thresholds = derive_thresholds([1, 2, 3, 40, 7], window, num_queues, max_mean_delay_steps=9)
    assert len(thresholds) <= num_queues
    assert all(a < b for a, b in pairwise((0, *thresholds, window + 1)))


def test_bad_arguments():
    with pytest.raises(ConfigError, match=r"num_queues must be in \[0, 4\], got 5"):
        derive_thresholds([1], 8, 5)
    with pytest.raises(ConfigError, match="window_tokens must be >= 1, got 0"):
        derive_thresholds([1], 0)
    with pytest.raises(ConfigError, match="num_micro_batches must be >= 1, got 0"):
        derive_thresholds([1], 8, num_micro_batches=0)
    with pytest.raises(DataError, match="lengths must hold at least one document"):
        derive_thresholds([0], 8)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not here: thresholds of measured traces are not checked")
def test_thresholds_of_measured_traces_are_stable_under_thinning():
    lengths = np.array(json.loads((DATA / "wlb_llm_128k.json").read_text()))
    low, high = derive_thresholds(lengths, 131072)
    thin_low, thin_high = derive_thresholds(lengths[::3], 131072)
    assert 131072 // 8 <= low < high < 131072
    assert abs(low - thin_low) <= 131072 // 8
    assert abs(high - thin_high) <= 131072 // 8
