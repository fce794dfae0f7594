"""Packing of a whole epoch at once, for presets that are planned before training.

first_fit_decreasing   the largest first, each into the first pack with room. The fullest packs of the two, but
                       long samples end up together: a pack of many short ones and packs of one long one differ in
                       cost, so ranks wait for each other more.
first_fit_shuffle      in the order of the epoch, each into the first pack with room. Packs are mixed, and a little
                       less full.

Both look at every open pack, in O(log packs) a sample: a tree keeps the most room below each node. They need the
whole epoch in memory and cannot stream; the order of the packs is shuffled afterwards, since first fit fills the
early ones with the long samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..records import Fragment
from .budget import Budget


def first_fit_decreasing(fragments: Sequence[Fragment], budget: Budget) -> list[list[Fragment]]:
    """First fit, largest share of its scarcer budget first; equal ones keep their order."""

    def share(fragment: Fragment) -> float:
        tiles = fragment.num_tiles / budget.max_tiles if budget.max_tiles else 0.0
        return max(budget.aligned(fragment.num_tokens) / budget.max_tokens, tiles)

    return first_fit_shuffle(sorted(fragments, key=share, reverse=True), budget)


def first_fit_shuffle(fragments: Sequence[Fragment], budget: Budget) -> list[list[Fragment]]:
    """First fit in the given order, which is the epoch's shuffled one. Packs in the order they were opened.

    Raises:
        ValueError: a fragment that fits into no pack; the splitter makes none.
    """
    packs: list[list[Fragment]] = []
    room = _Room()
    for fragment in fragments:
        if not budget.fits(fragment.num_tokens, fragment.num_tiles):
            raise ValueError(f"a fragment of {fragment.num_tokens} tokens and {fragment.num_tiles} tiles fits nowhere")
        length = budget.aligned(fragment.num_tokens)
        cost = length**2 - fragment.num_unseen_pairs if budget.max_attention_cost is not None else 0
        needs = (length, fragment.num_tiles, cost)
        pack = room.first_with(needs)
        if pack is None:
            pack = len(packs)
            packs.append([])
            room.append((budget.max_tokens, budget.max_tiles, budget.max_attention_cost or 0))
        packs[pack].append(fragment)
        room.take(pack, needs)
    return packs


OFFLINE_POLICIES = {"first_fit_decreasing": first_fit_decreasing, "first_fit_shuffle": first_fit_shuffle}


class _Room:
    """The room of every pack, and of each node of a binary tree over them the most room of its packs.

    Token, tile and cost maxima of a node may come from different packs, so a node that seems to have room may
    have none: the search then backs out of it.
    """

    def __init__(self) -> None:
        self._size = 1  # leaves, a power of two
        self._used = 0
        self._nodes: list[tuple[int, int, int]] = [(-1, -1, -1)] * 2

    def append(self, room: tuple[int, int, int]) -> None:
        if self._used == self._size:
            leaves = self._nodes[self._size :]
            self._size *= 2
            self._nodes = [(-1, -1, -1)] * self._size + leaves + [(-1, -1, -1)] * (self._size - len(leaves))
            for node in range(self._size - 1, 0, -1):
                self._nodes[node] = _most(self._nodes[2 * node], self._nodes[2 * node + 1])
        self._set(self._used, room)
        self._used += 1

    def take(self, pack: int, needs: tuple[int, int, int]) -> None:
        room = self._nodes[self._size + pack]
        self._set(pack, (room[0] - needs[0], room[1] - needs[1], room[2] - needs[2]))

    def _set(self, pack: int, room: tuple[int, int, int]) -> None:
        nodes = self._nodes
        node = self._size + pack
        nodes[node] = room
        node //= 2
        while node:
            most = _most(nodes[2 * node], nodes[2 * node + 1])
            if nodes[node] == most:
                break
            nodes[node] = most
            node //= 2

    def first_with(self, needs: tuple[int, int, int]) -> int | None:
        """The first pack with at least this much room of each kind."""
        tokens, tiles, cost = needs
        nodes, size = self._nodes, self._size
        waiting = [1]
        while waiting:
            node = waiting.pop()
            room = nodes[node]
            if room[0] < tokens or room[1] < tiles or room[2] < cost:
                continue
            if node >= size:
                return node - size
            waiting += (2 * node + 1, 2 * node)
        return None


def _most(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return (a[0] if a[0] > b[0] else b[0], a[1] if a[1] > b[1] else b[1], a[2] if a[2] > b[2] else b[2])
