"""Lower bounds on the number of packs: what no packer can beat.

    sums     ceil(sum / budget), tokens and tiles each ("L1")
    large    Martello and Toth's L2, tokens and tiles each: samples over half of a budget cannot share a pack, so some
             room is lost beside them whatever is done (Knapsack Problems, 1990, chapter 8)
    joint    both budgets at once: text that comes with few tiles takes the tokens that tiles need

The joint bound. Let d be a number of tokens a tile. A sample of t tokens and v tiles has the excess e = t - d v. In a
pack of token budget T and tile budget V the excesses sum to sum(t) - d sum(v) <= T - d sum(v), so

    tiles not used = V - sum(v) >= (sum(e) - (T - d V)) / d

With free = T - d V >= 0 and samples of negative excess counted as they are, one pack leaves at least
(sum over e > free of (e - free) - sum over e < 0 of |e|) / d tiles unused, and none leaves fewer than 0. Over all packs

    packs x V >= sum(v) + (sum over e > free of (e - free) - sum over e < 0 of |e|) / d

for every d, of which the best is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil

from .budget import Budget

DENSITIES = 24  # tokens-a-tile values that the joint bound tries
GRAIN = 1024  # resolution of the joint bound, in parts of the token budget; lengths are rounded down


class LowerBounds:
    """Counts samples one by one, in memory that does not grow with them."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.num_tokens = self.num_tiles = 0
        self._by_tokens: Counter[int] = Counter()
        self._by_tiles: Counter[int] = Counter()
        self._by_both: Counter[tuple[int, int]] = Counter()
        self._grain = max(1, budget.max_tokens // GRAIN)

    def add(self, num_tokens: int, num_tiles: int) -> None:
        """One fragment, aligned as the packer counts it."""
        tokens = self.budget.aligned(num_tokens)
        self.num_tokens += tokens
        self.num_tiles += num_tiles
        self._by_tokens[tokens] += 1
        self._by_tiles[num_tiles] += 1
        self._by_both[tokens // self._grain * self._grain, num_tiles] += 1

    def all(self) -> dict[str, int]:
        """Every bound by name."""
        budget = self.budget
        return {
            "tokens, sum": -(-self.num_tokens // budget.max_tokens),
            "tiles, sum": -(-self.num_tiles // budget.max_tiles) if budget.max_tiles else 0,
            "tokens, large samples": large_bound(self._by_tokens, budget.max_tokens),
            "tiles, large samples": large_bound(self._by_tiles, budget.max_tiles) if budget.max_tiles else 0,
            "both budgets": joint_bound(self._by_both, self.num_tiles, budget) if budget.max_tiles else 0,
        }

    def best(self) -> int:
        """The highest bound; at least 1 where there is anything to pack."""
        return max(*self.all().values(), int(self.num_tokens > 0))


def large_bound(counts: Mapping[int, int], capacity: int) -> int:
    """Martello and Toth's L2 over sizes given with their counts; 0 <= size <= capacity.

    For a threshold a <= capacity / 2: samples over capacity - a are alone; those over half of it are alone among
    themselves; those from a to half of it fill what the second kind leaves, or need packs of their own.
    """
    sizes = sorted(size for size in counts if size > 0)
    total = sum(size * counts[size] for size in sizes)
    best = -(-total // capacity)
    half = [size for size in sizes if 2 * size > capacity]
    num_over_half = sum(counts[size] for size in half)
    small = [size for size in sizes if 2 * size <= capacity]
    small_sum = sum(size * counts[size] for size in small)  # of the sizes from the threshold up
    shared = sum(size * counts[size] for size in half)  # of the large sizes that can share with the threshold's
    num_shared = num_over_half
    for threshold in small:
        while half and half[-1] > capacity - threshold:
            size = half.pop()
            shared -= size * counts[size]
            num_shared -= counts[size]
        left = small_sum - (num_shared * capacity - shared)
        best = max(best, num_over_half + max(0, -(-left // capacity)))
        small_sum -= threshold * counts[threshold]
    return max(best, num_over_half)


def joint_bound(counts: Mapping[tuple[int, int], int], num_tiles: int, budget: Budget) -> int:
    """The bound of the module's docstring, over (tokens, tiles) given with their counts."""
    best = 0
    for density in _densities(counts):
        free = budget.max_tokens - density * budget.max_tiles
        if free < 0:
            continue
        lost = 0.0
        for (tokens, tiles), count in counts.items():
            excess = tokens - density * tiles
            if excess > free:
                lost += (excess - free) * count
            elif excess < 0:
                lost += excess * count
        # a hair less, so that rounding never makes the bound too high
        best = max(best, ceil((num_tiles + lost / density) / budget.max_tiles - 1e-6))
    return best


def _densities(counts: Mapping[tuple[int, int], int]) -> list[float]:
    """Tokens a tile of the densest samples: quantiles, weighted by tiles, nearer together at the dense end."""
    found = sorted((tokens / tiles, tiles * count) for (tokens, tiles), count in counts.items() if tiles and tokens)
    total = sum(weight for _, weight in found)
    chosen, seen = [], 0
    marks = [(i / DENSITIES) ** 3 * total for i in range(DENSITIES)]
    for density, weight in found:
        seen += weight
        if marks and seen >= marks[0]:
            chosen.append(density)
            marks = [mark for mark in marks if mark > seen]
    return chosen
