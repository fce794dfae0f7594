"""`Packer`: from a stream of fragments to a stream of packs.

    while more samples:                 records wait, oldest first
        until packer.full: packer.add(fragment)
        packer.pop()                    -> the next pack and its cost
    while packer.waiting: packer.pop()  -> the last packs

The look-ahead holds `buffer_size` records, and more where these are so short that they would not fill LOOK_AHEAD_PACKS
packs: 64 questions of 60 tokens are a quarter of a row of 16,384.

Bounded wait. A pack is built around one waiting fragment, its anchor. After `buffer_size` packs a fragment is older
than any other may stay: from then on the oldest is the anchor of every pack. So a fragment that found n others
waiting when it came is in one of the next `buffer_size + n` packs. The policies `greedy` and `next_fit` always take
the oldest: the next n + 1 packs.

Determinism. The state is whole numbers and what waits. It goes through JSON, and a packer that is given it back
continues exactly as the first one would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from ..errors import SampleError, UserError
from .balance import Balance, Packable
from .budget import Budget
from .cost import CostModel
from .policies import Waiting, find_policy

LOOK_AHEAD_PACKS = 2  # packs that the look-ahead could fill, at least, by one of the budgets


Item = TypeVar("Item", bound=Packable)


class Packer(Generic[Item]):
    """Packs one stream.

    Args:
        budget: what a pack may hold; segments count with their aligned lengths.
        policy: a name of policies.POLICIES.
        buffer_size: records of look-ahead.
        cost: what packs cost to train, so that packs come out alike; every reader must use the same.

    Raises:
        UserError: an unknown policy, or a look-ahead below 1.
    """

    def __init__(
        self, budget: Budget, *, policy: str = "subset_sum", buffer_size: int = 64, cost: CostModel | None = None
    ) -> None:
        if buffer_size < 1:
            raise UserError(f"max_buffer_size is {buffer_size}: give at least 1 record of look-ahead")
        self.budget = budget
        self.buffer_size = buffer_size
        self.num_built = 0  # packs
        self._longest = budget.max_segment_tokens  # aligned, as it is a multiple of the alignment
        self._policy = find_policy(policy)
        self._balance = Balance(budget, cost or CostModel.from_name("1B"))
        self._items: list[Item] = []
        self._waiting = Waiting([], [], [], [])
        self._born: list[int] = []  # packs that had been built when each item came
        self._tokens = self._tiles = 0  # that wait, aligned

    @property
    def full(self) -> bool:
        """Whether the look-ahead is filled."""
        return len(self._items) >= self.buffer_size and (
            self._tokens >= LOOK_AHEAD_PACKS * self.budget.max_tokens
            or self._tiles >= LOOK_AHEAD_PACKS * max(1, self.budget.max_tiles)
        )

    @property
    def waiting(self) -> list[Item]:
        """What is in no pack yet, oldest first."""
        return list(self._items)

    def add(self, item: Item) -> None:
        """Give the packer one more fragment.

        Raises:
            SampleError: `sample_empty`, or `oversized_error` for what fits into no pack (see split.py).
        """
        tokens, num_tiles, square, pairs = self._balance.sizes(item)
        if tokens < 1:
            raise SampleError("sample_empty", f"fragment {item.key} has no tokens")
        if tokens > self._longest or num_tiles > self.budget.max_tiles:
            raise SampleError(
                "oversized_error",
                f"fragment {item.key} has {item.num_tokens} tokens and {num_tiles} tiles, "
                f"a pack holds {self.budget.max_segment_tokens} and {self.budget.max_tiles}",
            )
        self._balance.add(tokens, num_tiles, square)
        self._items.append(item)
        self._waiting.tokens.append(tokens)
        self._waiting.tiles.append(num_tiles)
        self._waiting.squares.append(square)
        self._waiting.pairs.append(pairs)
        self._born.append(self.num_built)
        self._tokens += tokens
        self._tiles += num_tiles

    def pop(self) -> tuple[int, list[Item]]:
        """(cost, fragments) of the next pack, the fragments in the order in which they came; something must wait."""
        waiting = self._waiting
        goal = self._balance.goal(self.num_built, *waiting[:3], self._born, self.buffer_size, last=not self.full)
        places = sorted(self._policy(waiting, self.budget, self._balance, goal))
        assert places, "a policy must take something"
        sums = [sum(column[place] for place in places) for column in waiting[:3]]
        assert sums[0] <= self.budget.max_tokens and sums[1] <= self.budget.max_tiles, "a pack over its budget"
        pack = [self._items[place] for place in places]
        for column in (self._items, self._born, *waiting):
            for place in reversed(places):
                del column[place]
        self._tokens -= sums[0]
        self._tiles -= sums[1]
        self.num_built += 1
        return self._balance.cost(*sums), pack

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the running figures, all of them whole numbers. What waits is saved beside it."""
        return {"born": list(self._born), "built": self.num_built, "figures": dict(self._balance.figures)}

    def load_state_dict(self, state: Mapping[str, Any], waiting: Sequence[Item]) -> None:
        """Go on where the state was taken, with what waited then."""
        assert len(state["born"]) == len(waiting), "a time of birth an item"
        assert state["figures"].keys() == self._balance.figures.keys(), "the figures of another release"
        numbers = [state["built"], *state["born"], *state["figures"].values()]
        assert all(isinstance(n, int) for n in numbers), "figures are whole numbers"
        self._items = list(waiting)
        sizes = [self._balance.sizes(item) for item in waiting]
        self._waiting = Waiting(*([size[n] for size in sizes] for n in range(4)))
        self._tokens, self._tiles = sum(self._waiting.tokens), sum(self._waiting.tiles)
        self._born = list(state["born"])
        self.num_built = state["built"]
        self._balance.figures = dict(state["figures"])
