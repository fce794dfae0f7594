"""How the next pack is chosen from the records that wait: a registry of pure functions.

    subset_sum   exact search for a full pack of the wanted cost                   (the default)
    greedy       the oldest, then the largest that fit
    next_fit     in order until one does not fit: what a plain loop does, for comparison
    single       one record a pack: rows of padded batches

Packs over the lower bound and CPU time a sample on benchmarks/real_mix_a.csv, look-ahead of 64 records, by
benchmarks/packing.py on a machine with 2 CPU cores that other work shared:

                 8192/40           16384/48          32768/96
    subset_sum   1.0007  20.8 us   1.0034  12.2 us   1.0014   8.2 us
    greedy       1.0018   9.4 us   1.0081   6.8 us   1.0082   6.2 us
    next_fit     1.2098   6.8 us   1.1316   5.0 us   1.0701   4.1 us
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..errors import UserError
from .balance import UNIT, Balance, Goal
from .budget import Budget
from .knapsack import SubsetSums

SEARCHED = 48  # records that a search looks at: the oldest
MORE_TILES = 8  # than wanted: what a search looks at where tokens bind
TRIES = 5  # subsets that are looked at for the one of the best cost
EXPECTED = 2.5  # samples whose attention cost is expected of the search before it is known
FULL = 0.004  # of the token budget: packs this close to the fullest count as equally full
MAX_GAP = 0.03  # share of the token budget that may stay empty to make a pack cheaper
LARGE = 0.6  # of the tokens that wait, in samples above half a pack: beyond it the largest go first
SMALL = 0.1  # of the token budget: samples up to this length are left to the search even then
GAP = 1000  # parts of the token budget: a smaller gap is not worth an exchange


class Waiting(NamedTuple):
    """The records that wait, oldest first, as parallel lists.

    Attributes:
        tokens: aligned.
        tiles: as they are.
        squares: cost of attention, among tokens and within pictures, by `Balance.square`.
        pairs: squared aligned tokens; of a tree without the pairs of different branches.
    """

    tokens: list[int]
    tiles: list[int]
    squares: list[int]
    pairs: list[int]


# (waiting, budget, balance, goal) -> places of the pack's records; not empty, each once, within the budget.
Policy = Callable[[Waiting, Budget, Balance, Goal], list[int]]

POLICIES: dict[str, Policy] = {}


def policy(name: str) -> Callable[[Policy], Policy]:
    """Register a policy."""

    def register(function: Policy) -> Policy:
        POLICIES[name] = function
        return function

    return register


def find_policy(name: str) -> Policy:
    """A registered policy.

    Raises:
        UserError: there is none of this name.
    """
    if name not in POLICIES:
        raise UserError(f"packing policy {name!r} is unknown: use one of {', '.join(POLICIES)}")
    return POLICIES[name]


class _Pack:
    """A pack being filled: what it holds and what still fits."""

    def __init__(self, waiting: Waiting, budget: Budget) -> None:
        self.waiting, self.budget = waiting, budget
        self.places: list[int] = []
        self.tokens = self.tiles = self.squares = self.pairs = 0
        self.takes_tiles = True  # False: it has as many as it should, and is filled with text at most

    def fits(self, place: int) -> bool:
        tokens, limit = self.waiting.tokens[place], self.budget.max_attention_cost
        return (
            self.tokens + tokens <= self.budget.max_tokens
            and self.tiles + self.waiting.tiles[place] <= self.budget.max_tiles
            and (limit is None or self.pairs + self.waiting.pairs[place] <= limit)
        )

    def sizes_that_fit(self, places: list[int]) -> tuple[int, int] | None:
        """Tokens and tiles of these records together, or None where they exceed what is left."""
        tokens, limit = self.waiting.tokens, self.budget.max_attention_cost
        added = sum(map(tokens.__getitem__, places))
        if self.tokens + added > self.budget.max_tokens:  # the search knows sizes by the row and column of its grid
            return None
        tiles = sum(map(self.waiting.tiles.__getitem__, places))
        if self.tiles + tiles > self.budget.max_tiles:
            return None
        if limit is not None and self.pairs + sum(map(self.waiting.pairs.__getitem__, places)) > limit:
            return None
        return added, tiles

    def put(self, place: int) -> None:
        tokens = self.waiting.tokens[place]
        self.places.append(place)
        self.tokens += tokens
        self.tiles += self.waiting.tiles[place]
        self.squares += self.waiting.squares[place]
        self.pairs += self.waiting.pairs[place]

    def rest(self) -> list[int]:
        """Places that are not in the pack, oldest first."""
        taken = set(self.places)
        return [place for place in range(len(self.waiting.tokens)) if place not in taken]


@policy("next_fit")
def next_fit(waiting: Waiting, budget: Budget, balance: Balance, goal: Goal) -> list[int]:
    """The oldest records in order, until one does not fit. No look-ahead is used."""
    pack = _Pack(waiting, budget)
    for place in range(len(waiting.tokens)):
        if not pack.fits(place):
            break
        pack.put(place)
    return pack.places


@policy("single")
def single(waiting: Waiting, budget: Budget, balance: Balance, goal: Goal) -> list[int]:
    """The oldest record by itself: one sample a row, for padded batches."""
    return [0]


@policy("greedy")
def greedy(waiting: Waiting, budget: Budget, balance: Balance, goal: Goal) -> list[int]:
    """The oldest record, then whatever fits, by its share of the scarcer budget, largest first."""
    pack = _Pack(waiting, budget)
    pack.put(0)
    size = (
        waiting.tokens if goal.tokens_bind else [v * budget.max_tokens + t for t, v in zip(*waiting[:2], strict=True)]
    )
    for place in sorted(range(1, len(size)), key=lambda place: -size[place]):
        if pack.fits(place):
            pack.put(place)
    return pack.places


@policy("subset_sum")
def subset_sum(waiting: Waiting, budget: Budget, balance: Balance, goal: Goal) -> list[int]:
    """The goal's anchor, the oldest records until the pack is nearly full, then an exact search.

    Where much of what waits is large, the largest that fit come before the search instead of the oldest: exactly full
    packs of short records would use up what the large ones need beside them.

    Among the subsets that fill the scarcer budget equally well, the one whose cost is nearest to the goal's is
    taken; where tokens bind, a last exchange of two records with the same tiles fills the gap that is left.
    """
    pack = _Pack(waiting, budget)
    pack.put(goal.anchor)
    if goal.tokens_bind and _much_is_large(waiting, budget):
        _fill_by_size(pack)
    elif goal.tokens_by_age > 0:
        _fill_by_age(pack, goal)
    _fill_by_search(pack, balance, goal)
    if goal.tokens_bind or goal.target is None:
        _top_up(pack)
    if (
        goal.tokens_bind
        and (budget.max_tokens - pack.tokens) * GAP >= budget.max_tokens
        and budget.max_attention_cost is None
    ):
        _exchange(pack)
    return pack.places


def _top_up(pack: _Pack) -> None:
    """Put in whatever still fits, oldest first."""
    tokens, tiles, *_ = pack.waiting
    taken = set(pack.places)
    room_tokens = pack.budget.max_tokens - pack.tokens
    room_tiles = pack.budget.max_tiles - pack.tiles if pack.takes_tiles else 0
    for place, length in enumerate(tokens):
        if length <= room_tokens and place not in taken and tiles[place] <= room_tiles and pack.fits(place):
            pack.put(place)
            room_tokens, room_tiles = room_tokens - length, room_tiles - tiles[place]


def _fill_by_age(pack: _Pack, goal: Goal) -> None:
    tokens, tiles = pack.waiting.tokens, pack.waiting.tiles
    for place in range(len(tokens)):
        if place != goal.anchor and (
            pack.tokens + tokens[place] <= goal.tokens_by_age
            and pack.tiles + tiles[place] <= goal.tiles_by_age
            and pack.fits(place)
        ):
            pack.put(place)
            if pack.tokens >= 0.9 * goal.tokens_by_age or pack.tiles >= 0.9 * goal.tiles_by_age:
                break


def _much_is_large(waiting: Waiting, budget: Budget) -> bool:
    large = sum(length for length in waiting.tokens if 2 * length > budget.max_tokens)
    return large > LARGE * sum(waiting.tokens)


def _fill_by_size(pack: _Pack) -> None:
    tokens, least = pack.waiting.tokens, SMALL * pack.budget.max_tokens
    for place in sorted(pack.rest(), key=lambda place: -tokens[place]):
        if tokens[place] <= least:
            break
        if pack.fits(place):
            pack.put(place)


def _fill_by_search(pack: _Pack, balance: Balance, goal: Goal) -> None:
    """Put in the fullest subset of what waits whose cost is nearest to the goal's."""
    tokens, tiles, *_ = pack.waiting
    room_tokens = pack.budget.max_tokens - pack.tokens
    wanted, room_tiles = _wanted(pack, balance, goal)
    candidates = [p for p in pack.rest() if tokens[p] <= room_tokens and tiles[p] <= room_tiles][:SEARCHED]
    if not candidates:
        return
    sums = SubsetSums([(tokens[p], tiles[p]) for p in candidates], room_tokens, room_tiles)
    best, over, top = _nearest(pack, balance, goal, sums, candidates, wanted)
    if goal.tokens_bind and goal.target is not None and over > goal.above:
        most = max(0, int(wanted)) + 1
        cheaper = _less_full(pack, balance, goal, sums, candidates, top, most, goal.target + over)
        if cheaper is not None:
            best, pack.takes_tiles = cheaper, False
    for place in best:
        pack.put(place)


def _wanted(pack: _Pack, balance: Balance, goal: Goal) -> tuple[float, int]:
    """(what the search should add of the budget that does not bind, tiles that it may add at most)."""
    room_tokens, room_tiles = pack.budget.max_tokens - pack.tokens, pack.budget.max_tiles - pack.tiles
    if goal.target is None:
        return (room_tiles if goal.tokens_bind else room_tokens), room_tiles
    f = balance.figures
    attention = EXPECTED * f["squares"] / f["samples"]
    missing = goal.target - pack.squares - attention  # secondary cost that the pack should get
    if not goal.tokens_bind:
        return missing / UNIT - pack.tokens, room_tiles
    tiles = missing / balance.tile_cost - pack.tiles
    return tiles, min(room_tiles, max(0, int(tiles)) + MORE_TILES)


def _nearest(
    pack: _Pack, balance: Balance, goal: Goal, sums: SubsetSums, candidates: list[int], wanted: float
) -> tuple[list[int], float, int]:
    """(subset, how far its pack is over the target, its row or column) of the fullest ones tried."""
    slack = max(1, int(pack.budget.max_tokens * FULL) // sums.step) if goal.target is not None else 0
    states = sums.full_rows(slack, wanted) if goal.tokens_bind else sums.full_columns(wanted, TRIES)
    best: list[int] = []
    nearest = None
    over = 0.0
    found = top = 0
    for tries, (row, column) in enumerate(states):
        if tries >= 4 * TRIES or (found and (row < top - slack if goal.tokens_bind else column < top)):
            break
        subset = [candidates[place] for place in sums.subset(row, column)]
        added = pack.sizes_that_fit(subset)
        if added is None:
            continue
        if goal.target is None:
            return subset, 0.0, 0
        above = _secondary(pack, balance, goal, subset, *added) - goal.target
        if nearest is None or abs(above) < nearest:
            best, nearest, over = subset, abs(above), above
        found += 1
        top = max(top, row if goal.tokens_bind else column)
        if found >= TRIES or abs(above) < goal.close:
            break
    return best, over, top


def _secondary(pack: _Pack, balance: Balance, goal: Goal, subset: list[int], tokens: int, tiles: int) -> int:
    """The secondary cost of the pack with this subset, of so many tokens and tiles, added."""
    squares = pack.squares + sum(map(pack.waiting.squares.__getitem__, subset))
    if goal.tokens_bind:
        return squares + (pack.tiles + tiles) * balance.tile_cost
    return squares + (pack.tokens + tokens) * UNIT


def _less_full(
    pack: _Pack,
    balance: Balance,
    goal: Goal,
    sums: SubsetSums,
    candidates: list[int],
    top: int,
    most_tiles: int,
    least: float,
) -> list[int] | None:
    """The fullest subset below row `top` that is not too dear, or None where that leaves more than MAX_GAP empty."""
    assert goal.target is not None, "a pack is too dear for a target only"
    best = None
    for row, column in sums.lower_rows(top, int(MAX_GAP * pack.budget.max_tokens) // sums.step, most_tiles):
        subset = [candidates[place] for place in sums.subset(row, column)]
        added = pack.sizes_that_fit(subset)
        if added is None:
            continue
        secondary = _secondary(pack, balance, goal, subset, *added)
        if secondary < least:
            best, least = subset, secondary
            if secondary <= goal.target + goal.above:
                break
    return best


def _exchange(pack: _Pack) -> None:
    """Exchange one record of the pack for a longer one with as many tiles, if one fits the gap best."""
    tokens, tiles = pack.waiting.tokens, pack.waiting.tiles
    gap = pack.budget.max_tokens - pack.tokens
    others: dict[int, list[int]] = {tiles[out]: [] for out in pack.places[1:]}
    for into in pack.rest():
        if tiles[into] in others:
            others[tiles[into]].append(into)
    best = 0
    pair = None
    for out in pack.places[1:]:
        least, most = tokens[out] + best, tokens[out] + gap
        for into in others[tiles[out]]:
            if least < tokens[into] <= most:
                best, pair = tokens[into] - tokens[out], (out, into)
                least = tokens[into]
    if pair is not None:
        pack.places.remove(pair[0])
        pack.places.append(pair[1])
        pack.tokens += best
