"""`LanePacker`: one lane's packer, from a stream of fragments to a stream of packs.

    while more samples:                 records wait, oldest first
        until packer.full: packer.add(fragment)
        packer.pop()                    -> the next pack
    while packer.waiting: packer.pop()  -> the last packs

The look-ahead holds `buffer_size` records, and more where these are so short that they would not fill LOOK_AHEAD_PACKS
packs: 64 questions of 60 tokens are a quarter of a row of 16,384.

Bounded wait. A pack is built around one waiting fragment, its anchor. After `buffer_size` packs a fragment is older
than any other may stay: from then on the oldest is the anchor of every pack. So a fragment that found n others
waiting when it came is in one of the next `buffer_size + n` packs that are built; `longest_wait` says what the
reservoir adds. The policies `greedy` and `next_fit` always take the oldest: the next n + 1 packs.

Determinism. The state is whole numbers and keys. It goes through JSON, and a packer that is given it back
continues exactly as the first one would have.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from internvl_pack.errors import SampleError, UserError
from internvl_pack.packing.balance import Balance
from internvl_pack.packing.budget import Budget
from internvl_pack.packing.cost import CostModel
from internvl_pack.packing.policies import Waiting, find_policy
from internvl_pack.packing.reservoir import Reservoir

LOOK_AHEAD_PACKS = 2  # packs that the look-ahead could fill, at least, by one of the budgets


class Packable(Protocol):
    """What is packed; a `Fragment`, or anything with these."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_tiles(self) -> int: ...

    @property
    def key(self) -> tuple[Hashable, ...]: ...


Item = TypeVar("Item", bound=Packable)


class LanePacker(Generic[Item]):
    """Packs one lane.

    Args:
        budget: what a pack may hold; segments count with their aligned lengths.
        policy: a name of policies.POLICIES.
        buffer_size: records of look-ahead.
        reservoir: packs held back to hand them out by cost, see reservoir.py; 0 for none.
        cost: what packs cost, for the balance between ranks. Every rank must use the same.
        prior: what the lane begins with, from `prior_figures`; every lane of a run must be given the same. None: the
            lane finds all out for itself.

    Raises:
        UserError: an unknown policy, a look-ahead below 1 or a negative reservoir.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        policy: str = "subset_sum",
        buffer_size: int = 64,
        reservoir: int = 0,
        cost: CostModel | None = None,
        prior: Mapping[str, int] | None = None,
    ) -> None:
        if buffer_size < 1:
            raise UserError(f"max_buffer_size is {buffer_size}: give at least 1 record of look-ahead")
        if reservoir < 0:
            raise UserError(f"balance_reservoir is {reservoir}: give 0 (off) or more packs")
        self.budget = budget
        self.buffer_size = buffer_size
        self._policy = find_policy(policy)
        self._balance = Balance(budget, cost or CostModel.from_size("1B"))
        self._reservoir = Reservoir(reservoir)
        self._built = 0  # packs
        self._items: list[Item] = []
        self._waiting = Waiting([], [], [])
        self._born: list[int] = []  # packs that had been built when each item came
        self._tokens = self._tiles = 0  # that wait, aligned
        self._most = 0  # items that ever waited at once
        self.expect(prior)

    def expect(self, prior: Mapping[str, int] | None) -> None:
        """Begin with these figures; before the first `add`. None changes nothing."""
        assert not self._built and not self._items, "a packer that has begun has figures of its own"
        if prior is not None:
            self._balance.figures = dict(prior)

    @property
    def full(self) -> bool:
        """Whether the look-ahead is filled, and the reservoir too."""
        return self._look_ahead_is_filled and self._reservoir.full

    @property
    def _look_ahead_is_filled(self) -> bool:
        return len(self._items) >= self.buffer_size and (
            self._tokens >= LOOK_AHEAD_PACKS * self.budget.max_tokens
            or self._tiles >= LOOK_AHEAD_PACKS * max(1, self.budget.max_tiles)
        )

    @property
    def waiting(self) -> list[Item]:
        """What is in no pack that was handed out: oldest first, that is by key where there is a reservoir."""
        held = [item for pack in self._reservoir.packs for item in pack]
        return sorted(held + self._items, key=lambda item: item.key) if held else list(self._items)

    @property
    def longest_wait(self) -> int:
        """Packs handed out between a fragment's `add` and its own pack, at most, if `full` stops the adding."""
        return (
            self.buffer_size
            + max(self.buffer_size, self._most)
            + (self._reservoir.longest_wait if self._reservoir.size else 0)
        )

    def add(self, item: Item) -> None:
        """Give the packer one more fragment.

        Raises:
            SampleError: `sample_empty`, or `oversized_error` for what fits into no pack (see split.py).
        """
        if item.num_tokens < 1:
            raise SampleError("sample_empty", f"fragment {item.key} has no tokens")
        if not self.budget.fits(item.num_tokens, item.num_tiles):
            raise SampleError(
                "oversized_error",
                f"fragment {item.key} has {item.num_tokens} tokens and {item.num_tiles} tiles, "
                f"a pack holds {self.budget.max_segment_tokens} and {self.budget.max_tiles}",
            )
        if not self._reservoir.full and self._look_ahead_is_filled:
            self._hold()
        tokens = self.budget.aligned(item.num_tokens)
        square = self._balance.square(tokens)
        self._balance.add(tokens, item.num_tiles, square)
        self._items.append(item)
        self._waiting.tokens.append(tokens)
        self._waiting.tiles.append(item.num_tiles)
        self._waiting.squares.append(square)
        self._born.append(self._built)
        self._tokens += tokens
        self._tiles += item.num_tiles
        self._most = max(self._most, len(self._items))

    def pop(self) -> list[Item]:
        """The next pack, its fragments in the order in which they came; empty when nothing waits."""
        if not self._reservoir.size:
            return self._build()[1] if self._items else []
        while self._items and not self._reservoir.full:
            self._hold()
        return self._reservoir.pop() if len(self._reservoir) else []

    def _hold(self) -> None:
        cost, pack = self._build()
        self._reservoir.add(cost, pack)

    def _build(self) -> tuple[int, list[Item]]:
        """(cost, pack) taken from what waits."""
        waiting = self._waiting
        goal = self._balance.goal(
            self._built, *waiting, self._born, self.buffer_size, last=not self._look_ahead_is_filled
        )
        places = sorted(self._policy(waiting, self.budget, self._balance, goal))
        assert places, "a policy must take something"
        sums = [sum(column[place] for place in places) for column in waiting]
        assert sums[0] <= self.budget.max_tokens and sums[1] <= self.budget.max_tiles, "a pack over its budget"
        pack = [self._items[place] for place in places]
        for column in (self._items, self._born, *waiting):
            for place in reversed(places):
                del column[place]
        self._tokens -= sums[0]
        self._tiles -= sums[1]
        self._built += 1
        return self._balance.cost(*sums), pack

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: keys of what waits, packs of the reservoir, and the running figures (whole numbers,
        those that it began with counted in)."""
        return {
            "waiting": [list(item.key) for item in self._items],
            "born": list(self._born),
            "built": self._built,
            "figures": dict(self._balance.figures),
            "reservoir": [
                {"cost": cost, "turn": turn, "keys": [list(item.key) for item in pack]}
                for cost, turn, pack in self._reservoir.state()
            ],
            "turns": self._reservoir.turns,
        }

    def load_state_dict(self, state: Mapping[str, Any], fragments: Mapping[tuple[Hashable, ...], Item]) -> None:
        """Go on where the state was taken; `fragments` gives back what waited, by key (as a tuple)."""
        self._items = [fragments[tuple(key)] for key in state["waiting"]]
        tokens = [self.budget.aligned(item.num_tokens) for item in self._items]
        self._waiting = Waiting(
            tokens, [item.num_tiles for item in self._items], [self._balance.square(n) for n in tokens]
        )
        self._tokens, self._tiles = sum(tokens), sum(self._waiting.tiles)
        self._most = len(self._items)
        self._born = list(state["born"])
        self._built = state["built"]
        self._balance.figures = dict(state["figures"])
        self._reservoir.restore(
            state["turns"],
            [
                (entry["cost"], entry["turn"], [fragments[tuple(key)] for key in entry["keys"]])
                for entry in state["reservoir"]
            ],
        )
