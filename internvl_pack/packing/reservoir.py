"""Packs held back so that all ranks hand out packs of like cost, without communication.

A lane keeps `size` finished packs. At its turn number t it hands out the one of cost rank `size - 1 - t mod size`,
dearest first: the packs of other lanes at the same turn have the same rank among theirs, so their costs are alike.
A pack that has waited for OVERDUE x size turns goes as soon as a turn comes that may hand out a dearer one.
"""

from __future__ import annotations

from bisect import insort
from typing import Any

OVERDUE = 4


class Reservoir:
    """Up to `size` packs, sorted by cost."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = 0
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
        """A pack leaves within this many turns: each `size` turns take at least one that is overdue."""
        return OVERDUE * self.size + self.size * self.size

    def add(self, cost: int, pack: Any) -> None:
        insort(self._packs, (cost, self.turns, self._added, pack), key=lambda entry: entry[:3])
        self._added += 1

    def pop(self) -> Any:
        """The pack of this turn; with fewer packs than `size` (the stream has ended) ranks are scaled."""
        rank = (self.size - 1 - self.turns % self.size) * len(self._packs) // self.size
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
