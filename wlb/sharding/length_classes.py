"""Short tasks apart from long ones: a variable-length kernel launches blocks for the longest task in every task.

Its grid is (tiles of the longest task, tasks, heads), and the blocks of a task that is over start and end for nothing.
One document of 64K tokens among a hundred short ones makes nearly all of them such. Forward counts tiles of queries,
backward of keys, and both have small kernels that count those of queries. So tasks are dealt to at most three calls by
their length, where the blocks that it saves are worth a call.

Tasks of 1, 1, 2, 2, 2, 500 tiles: one call launches 6 * 500, two launch 5 * 2 + 500.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np

from wlb.sharding.rows import Int64

TILE_ROWS = 128
MOST_CLASSES = 3

# An estimate: a block that ends at once takes some 5 ns of a device that runs hundreds of them side by side, times 16
# or more heads; a call takes some 50 to 100 microseconds of the launching thread, and of the device.
LEAST_SAVED_TILES = 1024


def tiles_of(lengths: Int64) -> Int64:
    """Blocks that are needed for so many rows.

    >>> tiles_of(np.array([1, 128, 129])).tolist()
    [1, 1, 2]
    """
    return -(-lengths // TILE_ROWS)


def length_classes(query_lengths: Int64, key_lengths: Int64) -> Int64:
    """(tasks,) class of each task, from 0 for the shortest; at most `MOST_CLASSES` of them, none empty.

    They are cut at powers of two, where the fewest tiles are launched; a cut must save `LEAST_SAVED_TILES`.
    """
    queries, keys = tiles_of(query_lengths), tiles_of(key_lengths)
    octaves = np.ceil(np.log2(np.maximum(queries, keys))).astype(np.int64)
    present, steps, counts = np.unique(octaves, return_inverse=True, return_counts=True)
    longest = np.zeros((2, len(present)), dtype=np.int64)
    np.maximum.at(longest[0], steps, queries)
    np.maximum.at(longest[1], steps, keys)

    launched = _launched(counts.tolist(), *longest.tolist())

    def weight(cuts: tuple[int, ...]) -> int:
        return sum(launched[ends] for ends in pairwise((0, *cuts, len(present)))) + LEAST_SAVED_TILES * len(cuts)

    places = range(1, len(present))
    best = min((cuts for n in range(MOST_CLASSES) for cuts in combinations(places, n)), key=weight)
    classes: Int64 = np.searchsorted(np.array(best, dtype=np.int64), steps, side="right")
    return classes


def _launched(counts: list[int], queries: list[int], keys: list[int]) -> dict[tuple[int, int], int]:
    """Tiles, by queries and by keys, that tasks of octaves [start, stop) launch in one call.

    counts: of the tasks of each octave. queries, keys: tiles of the longest of them.
    """
    launched = {}
    for start in range(len(counts)):
        count = most_queries = most_keys = 0
        for octave in range(start, len(counts)):
            count += counts[octave]
            most_queries, most_keys = max(most_queries, queries[octave]), max(most_keys, keys[octave])
            launched[start, octave + 1] = count * (most_queries + most_keys)
    return launched
