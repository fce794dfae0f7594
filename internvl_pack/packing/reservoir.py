"""Packs held back so that all ranks hand out packs of like cost, without communication.

A lane keeps `size` finished packs, sorted by cost. Each of its turns hands out the pack of a fixed rank, so that the
packs of other lanes at the same turn have the same rank among theirs, and like costs. The ranks go through the dearer
half, dearest first, ROUNDS times, and then once through the cheaper half: cheap packs (long text, few tiles) come at
random, and a step in which some lanes have none to give is a step in which all others wait. They are called for
more rarely than they come; a lane that has more of them than it is asked for lets them go in dearer turns, which
costs little. A pack that has waited for OVERDUE x size turns goes as soon as a turn may hand out a dearer one.
"""

from __future__ import annotations

from bisect import insort
from typing import Any

OVERDUE = 10
ROUNDS = 6


class Reservoir:
    """Up to `size` packs, sorted by cost."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = 0
        half = size // 2
        self._ranks = [*range(size - 1, half - 1, -1)] * ROUNDS + [*range(half - 1, -1, -1)]
        self._packs: list[tuple[int, int, int, Any]] = []  # cost, turn when it came, number, pack
        self._added = 0

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def full(self) -> bool:
        return len(self._packs) >= self.size

    @property
    def packs(self) -> list[Any]:
        """The packs, oldest first."""
        return [pack for _, _, _, pack in sorted(self._packs, key=lambda entry: entry[2])]

    @property
    def longest_wait(self) -> int:
        """A pack leaves within this many turns: any `size` in a row have one that takes the oldest if it is overdue."""
        return OVERDUE * self.size + self.size * self.size

    def add(self, cost: int, pack: Any) -> None:
        insort(self._packs, (cost, self.turns, self._added, pack), key=lambda entry: entry[:3])
        self._added += 1

    def pop(self) -> Any:
        """The pack of this turn; with fewer packs than `size` (the stream has ended) ranks are scaled."""
        rank = self._ranks[self.turns % len(self._ranks)] * len(self._packs) // self.size
        oldest = min(range(len(self._packs)), key=lambda place: self._packs[place][2])
        if oldest <= rank and self.turns - self._packs[oldest][1] >= OVERDUE * self.size:
            rank = oldest
        self.turns += 1
        return self._packs.pop(rank)[3]

    def state(self) -> list[tuple[int, int, Any]]:
        """(cost, turn when it came, pack), oldest first."""
        return [(cost, turn, pack) for cost, turn, _, pack in sorted(self._packs, key=lambda entry: entry[2])]

    def restore(self, turns: int, entries: list[tuple[int, int, Any]]) -> None:
        self._packs, self._added = [], 0
        for cost, turn, pack in entries:
            self.turns = turn
            self.add(cost, pack)
        self.turns = turns
