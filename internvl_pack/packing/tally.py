"""What packs hold, counted pack by pack, in memory that does not grow with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..records import Fragment
from .bounds import LowerBounds
from .budget import Budget

FILL_BINS = 100


class PackTally:
    """Sums over packs.

    Attributes:
        packs, segments: their numbers.
        samples: segments that begin one; parts of a split sample count once.
        tokens, aligned_tokens, tiles: without and with what aligning adds to each segment.
        trees, branches: parts of trees, and their branches.
        saved_tokens: that the branches would take more if each had its prefix to itself.
        bounds: packs that no packer can do without.
        fills: packs by the fuller of their two fills, FILL_BINS + 1 bins.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget, self.bounds = budget, LowerBounds(budget)
        self.packs = self.segments = self.samples = self.tokens = 0
        self.trees = self.branches = self.saved_tokens = 0
        self.fills = [0] * (FILL_BINS + 1)

    @property
    def aligned_tokens(self) -> int:
        return self.bounds.num_tokens

    @property
    def tiles(self) -> int:
        return self.bounds.num_tiles

    def add(self, fragments: Sequence[Fragment]) -> None:
        """The fragments of one pack."""
        budget, aligned_before, tiles_before = self.budget, self.aligned_tokens, self.tiles
        for fragment in fragments:
            self.tokens += fragment.num_tokens
            self.samples += fragment.index == 0
            self.bounds.add(fragment.num_tokens, fragment.num_tiles)
            self.trees += fragment.num_branches > 0
            self.branches += fragment.num_branches
            self.saved_tokens += fragment.num_saved_tokens
        fill = (self.aligned_tokens - aligned_before) / budget.max_tokens
        if budget.max_tiles:
            fill = max(fill, (self.tiles - tiles_before) / budget.max_tiles)
        self.fills[min(FILL_BINS, int(fill * FILL_BINS))] += 1
        self.packs += 1
        self.segments += len(fragments)


def quantile(counts: Mapping[int, int], share: float) -> int:
    """The smallest value that at least `share` of the counted values do not exceed; 0 where there is none."""
    need, seen = share * sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= need:
            return value
    return 0
