"""A seeded permutation of range(n) with O(1) memory and O(1) seek.

A Feistel network over the smallest power of two that holds n, walked until the value falls below n
(cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002; two walks at most
on average). Below SMALL elements, where a network of few bits reaches only a part of the
permutations, the elements are sorted by their hash instead.

Only integer arithmetic: the same order on every machine, Python and numpy version.
"""

from __future__ import annotations

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

    def _encrypt(self, x: int) -> int:
        low, high = x & self._low_mask, x >> self._low_bits
        for low_key, high_key in self._keys:  # alternating halves, so that they may differ in width
            h = ((high ^ low_key) * _MULTIPLY) & _MASK
            low ^= ((h ^ (h >> 29)) * _MULTIPLY >> 32) & self._low_mask
            h = ((low ^ high_key) * _MULTIPLY) & _MASK
            high ^= ((h ^ (h >> 29)) * _MULTIPLY >> 32) & self._high_mask
        return (high << self._low_bits) | low
