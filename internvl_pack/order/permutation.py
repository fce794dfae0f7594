"""A seeded permutation of range(n) with O(1) memory and O(1) seek.

A Feistel network over the smallest power of two that holds n, walked until the value falls below n
(cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002; two walks at most
on average). Below SMALL elements, where a network of few bits reaches only a part of the
permutations, the elements are sorted by their hash instead.

Only integer arithmetic: the same order on every machine, Python and numpy version.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SMALL = 256
_ROUNDS = 6
_MASK = (1 << 64) - 1
_MULTIPLY = 0xD6E8FEB86659FD93  # odd; from Evensen's rrmxmx mixer


def mix64(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit integers."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed that depends on every part and on their order."""
    state = 0
    for part in parts:
        if isinstance(part, str):
            data = part.encode()
            part = len(data)
            for start in range(0, len(data), 7):
                state = mix64(state ^ int.from_bytes(data[start : start + 7], "little"))
        state = mix64(state ^ mix64(part & _MASK))
    return state


class Permutation:
    """`Permutation(n, seed)[k]` is the k-th element of a seeded permutation of range(n)."""

    __slots__ = ("_high_mask", "_keys", "_low_bits", "_low_mask", "_table", "n")

    def __init__(self, n: int, seed: int) -> None:
        if n < 0:
            raise ValueError(f"a permutation needs n >= 0, got {n}")
        self.n = n
        self._table: tuple[int, ...] | None = None
        if n <= SMALL:
            key = mix64(seed & _MASK)
            self._table = tuple(sorted(range(n), key=lambda i: (mix64(key ^ i), i)))
            return
        bits = (n - 1).bit_length()
        self._low_bits = bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        self._keys = tuple((derive_seed(seed, r), derive_seed(seed, r + 1)) for r in range(0, _ROUNDS, 2))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int) -> int:
        if not 0 <= k < self.n:
            raise IndexError(f"{k} is outside a permutation of {self.n} elements")
        if self._table is not None:
            return self._table[k]
        x = k
        while True:
            x = self._encrypt(x)
            if x < self.n:
                return x

    def take(self, places: np.ndarray) -> np.ndarray:
        """The elements at these places, int64 (n,): as `[k]` of each, without a loop in Python."""
        places = np.asarray(places, np.int64)
        if places.size and not (places.min() >= 0 and places.max() < self.n):
            raise IndexError(f"places {places.min()} to {places.max()} are outside a permutation of {self.n} elements")
        if self._table is not None:
            return np.asarray(self._table, np.int64)[places]
        found = self._encrypt(places.astype(np.uint64), np.uint64)
        while (outside := found >= self.n).any():
            found[outside] = self._encrypt(found[outside], np.uint64)
        return found.astype(np.int64)

    def _encrypt(self, x: Any, kind: Any = int) -> Any:
        """Of a number, or of an array of uint64, which wraps around as the masks do with numbers."""
        multiply, shift, half, bits = kind(_MULTIPLY), kind(29), kind(32), kind(self._low_bits)
        low_mask, high_mask, mask = kind(self._low_mask), kind(self._high_mask), kind(_MASK)
        low, high = x & low_mask, x >> bits
        for low_key, high_key in self._keys:  # alternating halves, so that they may differ in width
            h = ((high ^ kind(low_key)) * multiply) & mask
            low = low ^ (((h ^ (h >> shift)) * multiply & mask) >> half & low_mask)
            h = ((low ^ kind(high_key)) * multiply) & mask
            high = high ^ (((h ^ (h >> shift)) * multiply & mask) >> half & high_mask)
        return (high << bits) | low
