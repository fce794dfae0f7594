"""What every pack should cost, so that the packs of a step are alike and no rank waits for another.

A pack is full in the scarcer budget, tokens or tiles: the one that needs more packs for the whole stream. The packer
can still choose how much of the other budget a pack takes. What that costs, with attention, is the pack's secondary
cost. Three parts set its target:

    level   the stream's own ratio of the two budgets, so that targets agree with the supply in the long run
    drift   if the look-ahead holds too much of one, packs take more of it, a share SLOPE / records each
    light   some samples fit no average pack: 7,000 tokens of text leave no room for 26 tiles. Every PHASES-th pack is
            reserved for them and aims below the average; the others aim a little above it to compensate. The step
            groups put such packs beside each other.

The step groups even out the rest (plan/groups.py).

Measured on benchmarks/real_mix_a.csv, 64 ranks, InternVL3-1B, mean over max cost of a step: docs/measurements.md.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

from .budget import Budget
from .cost import CostModel

PHASES = 4
SPARED = 2.0  # times the mean shortfall of light samples: their neighbours in the pack fall short as well
SLOPE = 1.5
MOST_DRIFT = 0.06  # of the mean cost of a pack
FILLED = 0.9  # of a budget: an anchor with too few neighbours for this waits for more of them
ODD = 0.03  # of the mean cost of a pack: a sample whose pack misses the target by more waits for a light pack
BY_SEARCH = 6  # samples of mean size that are left for the search; the others of a pack are taken by age
CLOSE = 0.01  # of the mean cost of a pack: a third of a tile; a better subset is not worth the time to find it
ABOVE = 0.02  # of the mean cost of a pack: what a full pack may exceed its target by
UNIT = 1024  # costs are whole numbers of 1/1024 token


class Packable(Protocol):
    """What is packed; a `Fragment`, or anything with these."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_tiles(self) -> int: ...

    @property
    def num_unseen_pairs(self) -> int: ...

    @property
    def num_tile_pairs(self) -> int: ...

    @property
    def key(self) -> tuple[Hashable, ...]: ...


@dataclass(frozen=True, slots=True)
class Goal:
    """What the next pack should be.

    Attributes:
        anchor: place among the waiting of the fragment that must be part of it.
        tokens_bind: tokens are the scarcer budget, else tiles.
        target: secondary cost to come close to, or None to take as much as fits (the stream has ended).
        close: a difference from the target that does not matter.
        above: if a full pack exceeds its target by more than this, one slightly less full is preferred: every rank
            waits for the dearest.
        tokens_by_age, tiles_by_age: fill up to this by age before searching.
    """

    anchor: int
    tokens_bind: bool
    target: float | None
    close: float
    above: float
    tokens_by_age: float
    tiles_by_age: float


class Balance:
    """Running figures of the stream, all of them whole numbers, and the goals that follow from them."""

    # Figures that begin anew where the other budget becomes the scarcer one.
    OF_BINDING = ("rich_secondary", "rich_primary", "poor_secondary", "poor_primary", "missed_low", "missed_high")
    FIGURES = ("samples", "tokens", "tiles", "squares", *OF_BINDING, "tokens_before", "tiles_before", "tokens_bind")

    def __init__(self, budget: Budget, cost: CostModel) -> None:
        self.budget = budget
        self._attention, self._picture, self._token = cost.attention * UNIT, cost.picture * UNIT, cost.token
        self.tile_cost = cost.tile * UNIT // cost.token
        self.figures = dict.fromkeys(self.FIGURES, 0)
        self.figures["tokens_bind"] = 1

    def sizes(self, item: Packable) -> tuple[int, int, int, int]:
        """(tokens, tiles, square, pairs) of a fragment: aligned tokens, tiles, the cost of attention in units (among
        tokens and within pictures), and pairs of tokens, of a tree only those that see each other (cost.py).
        """
        tokens = self.budget.aligned(item.num_tokens)
        pairs = tokens * tokens - item.num_unseen_pairs
        square = (self._attention * pairs + self._picture * item.num_tile_pairs) // self._token
        return tokens, item.num_tiles, square, pairs

    def cost(self, num_tokens: int, num_tiles: int, squares: int) -> int:
        """The cost of a pack, in units."""
        return num_tokens * UNIT + num_tiles * self.tile_cost + squares

    def add(self, num_tokens: int, num_tiles: int, square: int) -> None:
        """A fragment came in."""
        f = self.figures
        f["samples"] += 1
        f["tokens"] += num_tokens
        f["tiles"] += num_tiles
        f["squares"] += square
        bind = int(f["tiles"] * self.budget.max_tokens <= f["tokens"] * self.budget.max_tiles)
        if bind != f["tokens_bind"]:  # the figures below mean something else now
            f.update(dict.fromkeys(self.OF_BINDING, 0))
            f.update(tokens_bind=bind, tokens_before=f["tokens"], tiles_before=f["tiles"])
        if bind:
            secondary, primary, full = square + num_tiles * self.tile_cost, num_tokens, self.budget.max_tokens
        else:
            secondary, primary, full = square + num_tokens * UNIT, num_tiles, self.budget.max_tiles
        ratio = self._ratio()
        if secondary >= ratio * primary:
            f["rich_secondary"] += secondary
            f["rich_primary"] += primary
        else:
            f["poor_secondary"] += secondary
            f["poor_primary"] += primary
        if f["rich_primary"] and f["poor_primary"]:
            room, level = full - primary, ratio * full
            most = secondary + room * f["rich_secondary"] / f["rich_primary"]
            least = secondary + room * f["poor_secondary"] / f["poor_primary"]
            if most < level:
                f["missed_low"] += int(level - most)
            if least > level:
                f["missed_high"] += int(least - level)

    def _ratio(self) -> float:
        """Secondary cost of the stream for each token or tile that binds."""
        f = self.figures
        if f["tokens_bind"]:
            return (f["squares"] + f["tiles"] * self.tile_cost) / f["tokens"]
        return (f["squares"] + f["tokens"] * UNIT) / f["tiles"]

    def goal(
        self,
        pops: int,
        tokens: list[int],
        tiles: list[int],
        squares: list[int],
        born: list[int],
        patience: int,
        *,
        last: bool = False,
    ) -> Goal:
        """The goal for pack number `pops`, with these records waiting, oldest first.

        Args:
            tokens, tiles, squares: of the waiting, parallel.
            born: `pops` when each came in.
            patience: packs after which the oldest is taken whatever it is.
            last: the stream has ended: packs are filled and no longer balanced.
        """
        f, budget = self.figures, self.budget
        bind = bool(f["tokens_bind"])
        if bind:
            tile = self.tile_cost
            secondary = [s + v * tile for s, v in zip(squares, tiles, strict=True)]
            primary, full = tokens, budget.max_tokens
        else:
            secondary = [s + t * UNIT for s, t in zip(squares, tokens, strict=True)]
            primary, full = tiles, budget.max_tiles
        ratio = self._ratio()
        packs = self._packs(f["tokens"], f["tiles"])
        mean = self.cost(f["tokens"], f["tiles"], f["squares"]) / packs
        drift = SLOPE * (sum(secondary) - ratio * sum(primary)) / len(tokens)
        drift = max(-MOST_DRIFT * mean, min(MOST_DRIFT * mean, drift))
        since = self._packs(f["tokens"] - f["tokens_before"], f["tiles"] - f["tiles_before"])
        high = f["missed_high"] > f["missed_low"]
        spared = SPARED * max(f["missed_high"], f["missed_low"]) / (since + PHASES)
        if high:
            spared = -spared
        ordinary = ratio * full + drift + spared
        light = pops % PHASES == 0
        anchor = 0
        if pops - born[0] < patience and not last:
            odd = ordinary + ODD * mean if high else ordinary - ODD * mean
            reaches = self._reaches(secondary, primary, full, high)
            is_odd = ((reach > odd if high else reach < odd) for reach in reaches)
            anchor = next((place for place, found in enumerate(is_odd) if found == light), 0)
            if self._most_filled(anchor, tokens, tiles) < FILLED:
                anchor = max(anchor, self._largest(tokens, tiles), key=lambda a: self._most_filled(a, tokens, tiles))
        share = 1 - BY_SEARCH / f["samples"] * packs
        return Goal(
            anchor=anchor,
            tokens_bind=bind,
            target=None if last else ordinary - PHASES * spared if light else ordinary,
            close=CLOSE * mean,
            above=ABOVE * mean,
            tokens_by_age=max(0.0, share) * budget.max_tokens,
            tiles_by_age=max(0.0, share) * budget.max_tiles,
        )

    def _packs(self, tokens: int, tiles: int) -> float:
        """Packs' worth of the scarcer budget."""
        return max(tokens / self.budget.max_tokens, tiles / max(1, self.budget.max_tiles))

    def _reaches(self, secondary: list[int], primary: list[int], full: int, high: bool) -> Iterator[float]:
        """Of each record the least (`high`), else the most, secondary cost of a full pack that holds it."""
        side = "poor" if high else "rich"
        in_all, bound = self.figures[side + "_secondary"], self.figures[side + "_primary"]
        dense = in_all / bound if bound else self._ratio()
        return (s + (full - p) * dense for s, p in zip(secondary, primary, strict=True))

    def _most_filled(self, anchor: int, tokens: list[int], tiles: list[int]) -> float:
        """How full the pack of this anchor could be at most, by the sizes of all that fit beside it; 1 is full."""
        max_tokens, max_tiles = self.budget.max_tokens, self.budget.max_tiles
        room_tokens, room_tiles = max_tokens - tokens[anchor], max_tiles - tiles[anchor]
        all_tokens = all_tiles = 0
        for place, (t, v) in enumerate(zip(tokens, tiles, strict=True)):
            if place == anchor or (t <= room_tokens and v <= room_tiles):
                all_tokens += t
                all_tiles += v
                if all_tokens >= max_tokens or all_tiles >= max_tiles > 0:
                    return 1.0
        return max(all_tokens / max_tokens, all_tiles / max_tiles if max_tiles else 0.0)

    def _largest(self, tokens: list[int], tiles: list[int]) -> int:
        """Place of the largest record by its share of either budget, the oldest of equal ones."""
        max_tokens, max_tiles = self.budget.max_tokens, self.budget.max_tiles
        shares = [max(t * max_tiles, v * max_tokens) if max_tiles else t for t, v in zip(tokens, tiles, strict=True)]
        return shares.index(max(shares))
