"""A shuffled order that needs no array: a keyed permutation of range(size) that is computed, not stored.

The shuffle of an epoch is then a pure function of (seed, source, epoch): its memory does not grow with the
corpus, any position can be asked for at once, and a resumed run starts in the middle without replaying.

Construction: a Feistel network over two unequal halves (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002). Numbers are written as (left, right) on a rectangle rows x columns that holds `size`
cells and fewer than `rows` more; each round adds a hash of one half to the other, modulo that half's range.
Images that fall on the few cells beyond `size` are mapped again until they fall inside (cycle walking).
"""

from __future__ import annotations

import hashlib
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import DataError

_NUM_ROUNDS = 8  # of 8 bytes each: the largest digest of blake2b
_MASK = (1 << 64) - 1
_MULTIPLY_1 = 0xBF58476D1CE4E5B9  # the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)
_MULTIPLY_2 = 0x94D049BB133111EB


class Permutation:
    """A pseudo-random bijection of range(size), chosen by `key`.

    size: >= 1.
    key: integers, for example (seed, source, epoch); different keys give unrelated orders.

    >>> Permutation(size=8, key=(1, 0, 0)).block(0, 8)
    array([7, 3, 1, 5, 2, 4, 6, 0])
    """

    def __init__(self, *, size: int, key: tuple[int, ...]) -> None:
        if not 1 <= size < 1 << 62:
            raise DataError(f"size must be >= 1 and < 2**62, got {size}")
        self.size = size
        self._rows = isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        digest = hashlib.blake2b(repr([int(k) for k in key]).encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._round_keys = tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))

    def at(self, index: int) -> int:
        """The element at `index`, in [0, size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"index must be in [0, {self.size}), got {index}")
        image = self._encrypt_one(index)
        while image >= self.size:
            image = self._encrypt_one(image)
        return image

    def block(self, first: int, stop: int) -> NDArray[np.int64]:
        """Elements `first` to `stop - 1`, (stop - first,) int64; equal to `at` of each index."""
        if not 0 <= first <= stop <= self.size:
            raise IndexError(f"first and stop must be ordered in [0, {self.size}], got {first} and {stop}")
        images = self._encrypt(np.arange(first, stop, dtype=np.uint64))
        outside = np.flatnonzero(images >= self.size)
        while outside.size:
            images[outside] = self._encrypt(images[outside])
            outside = outside[images[outside] >= self.size]
        return images.astype(np.int64)

    def _encrypt_one(self, value: int) -> int:
        left, right = divmod(value, self._columns)
        for i, key in enumerate(self._round_keys):
            if i % 2 == 0:
                left = (left + _hash_one(right, key)) % self._rows
            else:
                right = (right + _hash_one(left, key)) % self._columns
        return left * self._columns + right

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        left, right = values // columns, values % columns
        for i, key in enumerate(self._round_keys):
            if i % 2 == 0:
                left = (left + hash_numbers(right, key)) % rows
            else:
                right = (right + hash_numbers(left, key)) % columns
        return left * columns + right


# Both hashes drop the last bit: the sum with a half then never wraps at 2**64, and a wrap for some values of
# that half and not for others would make the round no bijection.


def _hash_one(value: int, key: int) -> int:
    x = (value + key) & _MASK
    x = ((x ^ (x >> 30)) * _MULTIPLY_1) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLY_2) & _MASK
    return (x ^ (x >> 31)) >> 1


def hash_numbers(values: NDArray[np.uint64], key: int) -> NDArray[Any]:
    """A pseudo-random number in [0, 2**63) for each value, of the shape of `values`; `key` in [0, 2**64)."""
    x = values + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MULTIPLY_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MULTIPLY_2)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(1)
