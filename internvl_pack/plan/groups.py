"""`StepPlan`: packs in groups of like cost, one group an optimizer step.

    PackSequence -> pool of packs, by cost -> groups of packs_per_step neighbours, drawn in random order -> steps

All ranks wait for the dearest pack of a step, so packs that train together should cost alike. The pool holds up to
GROUPS groups (fewer where a step has so many packs that POOL_PACKS would be exceeded). A step is drawn at random among
them, so that no curriculum of costs arises; a pack that has waited for OVERDUE draws of the whole pool goes next.

At the end of the epoch the pool empties: every step but the last has packs_per_step packs, and none is empty.

Mean over max cost of a step, benchmarks/real_mix_a.csv, 50,000 samples, InternVL3-1B: docs/measurements.md.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..ledger import Ledger
from ..order.permutation import derive_seed
from ..records import Fragment
from .packed_state import FRAGMENT_FIELDS, check_whole_numbers, fragment_table, fragments_of, narrowed, split_like
from .sequence import PackSequence, PlannedPack, Refused

GROUPS = 24
POOL_PACKS = 8192
OVERDUE = 4


class Step(NamedTuple):
    """One optimizer step.

    Attributes:
        number: of the epoch, from 0.
        packs: packs_per_step of them, fewer in the last step; dearest first.
        refused: samples that were refused while it was planned.
    """

    number: int
    packs: tuple[PlannedPack, ...]
    refused: list[Refused]


class _Pooled(NamedTuple):
    """A pack in the pool: compared by cost, then by number, which is its own."""

    cost: int
    number: int
    came: int  # the step that was next when it came
    pack: PlannedPack
    fragments: np.ndarray  # the pack's, as a saved state has them


class StepPlan:
    """The steps of one epoch, the same in every reader that plans from the same sequence.

    Args:
        sequence: the packs.
        packs_per_step: ranks x accumulation x packs a batch.
        seed, epoch: of the random draws.
        balanced: False takes packs as they come, for rows that are not packed and for evaluation.
    """

    def __init__(
        self, sequence: PackSequence, packs_per_step: int, *, seed: int, epoch: int, balanced: bool = True
    ) -> None:
        assert packs_per_step >= 1, "a step has a pack"
        self.packs_per_step = packs_per_step
        self._sequence = sequence
        self._seed, self._epoch, self._balanced = seed, epoch, balanced
        self._pool: list[_Pooled] = []  # cheapest first
        self.num_steps = 0  # handed out

    @property
    def num_groups(self) -> int:
        """Groups that the pool holds."""
        if not self._balanced or self.packs_per_step == 1:
            return 1
        return max(2, min(GROUPS, POOL_PACKS // self.packs_per_step))

    @property
    def ledger(self) -> Ledger:
        """Counts of all samples read so far; those of the steps handed out are packed."""
        return self._sequence.ledger

    def __iter__(self) -> Iterator[Step]:
        while (step := self.next_step()) is not None:
            yield step

    def next_step(self) -> Step | None:
        """The next step; None at the end of the epoch.

        Raises:
            UserError: a sample that must stop the run.
        """
        while len(self._pool) < self.num_groups * self.packs_per_step:
            pack = self._sequence.next_pack()
            if pack is None:
                break
            insort(self._pool, _Pooled(pack.cost, pack.number, self.num_steps, pack, fragment_table(pack.fragments)))
        if not self._pool:
            return None
        start = self._draw() * self.packs_per_step
        group = self._pool[start : start + self.packs_per_step]
        del self._pool[start : start + self.packs_per_step]
        group.sort(key=lambda pooled: (-pooled.cost, pooled.number) if self._balanced else (pooled.number, 0))
        packs = tuple(pooled.pack for pooled in group)
        for pack in packs:
            for fragment in pack.fragments:
                self.ledger.pack(fragment)
        step = Step(self.num_steps, packs, self._sequence.take_refused())
        self.num_steps += 1
        return step

    def take_refused(self) -> list[Refused]:
        """Samples refused since the last step; all of them in an epoch without steps."""
        return self._sequence.take_refused()

    def _draw(self) -> int:
        """Which group of the pool, counted from the cheapest."""
        full_groups = len(self._pool) // self.packs_per_step
        if full_groups < 2:
            return 0
        oldest = min(range(len(self._pool)), key=lambda place: self._pool[place].number)
        if self.num_steps - self._pool[oldest].came >= OVERDUE * self.num_groups:
            return min(oldest // self.packs_per_step, full_groups - 1)
        return derive_seed(self._seed, "group", self._epoch, self.num_steps) % full_groups

    # -- state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What any reader goes on from after the last step handed out: JSON values and tables (packed_state.py)."""
        packs = [[pooled.cost, pooled.number, pooled.came, len(pooled.fragments)] for pooled in self._pool]
        nothing = np.empty((0, FRAGMENT_FIELDS), np.int64)
        return {
            "epoch": self._epoch,
            "step": self.num_steps,
            "packs_per_step": self.packs_per_step,
            "ledger": self.ledger.state_dict(),
            "sequence": self._sequence.state_dict(),
            "pool": np.array(packs, np.int64).reshape(-1, 4),
            "pooled": narrowed(np.concatenate([nothing, *(pooled.fragments for pooled in self._pool)])),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the state's step. With another number of packs a step, groups differ from there on.

        Raises:
            UserError: the state is damaged, or not of this sequence.
        """
        try:
            self._load(state)
        except UserError:
            raise
        except (AssertionError, LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"resume: the plan of the saved state is damaged ({type(error).__name__}: {error}): "
                "resume from an earlier checkpoint"
            ) from None

    def _load(self, state: Mapping[str, Any]) -> None:
        check_whole_numbers(state)
        assert state["epoch"] == self._epoch, "the state of another epoch"
        assert state["step"] >= 0 < state["packs_per_step"], "steps before the first, or without packs"
        self.num_steps = state["step"]
        self.ledger.load_state_dict(state["ledger"])
        pool = state["pool"].tolist()
        fragments = split_like(fragments_of(state["pooled"]), [size for *_, size in pool])
        self._sequence.load_state_dict(state["sequence"], pooled=fragments)
        self._pool = [
            _Pooled(cost, number, came, PlannedPack(number, cost, held), fragment_table(held))
            for (cost, number, came, _), held in zip(pool, fragments, strict=True)
        ]


def deal(step: Step, num_ranks: int, packs_per_batch: int = 1) -> list[list[list[PlannedPack]]]:
    """The step's packs as [rank][micro-batch] lists of up to `packs_per_batch` packs.

    Packs are dealt dearest first to ranks 0, 1, ..., then back (N - 1, ..., 0), so that the ranks' sums are even. All
    ranks get the same number of micro-batches; one without a pack is an empty list. If the last step of an epoch has
    fewer packs than ranks, its packs are divided, so that every rank has work while there are fragments.
    """
    packs = list(step.packs)
    if len(packs) < num_ranks:
        packs = parted(packs, num_ranks)
    by_rank: list[list[PlannedPack]] = [[] for _ in range(num_ranks)]
    for place, pack in enumerate(packs):
        turn, at = divmod(place, num_ranks)
        by_rank[at if turn % 2 == 0 else num_ranks - 1 - at].append(pack)
    micro_batches = -(-len(packs) // (num_ranks * packs_per_batch))
    return [
        [held[at * packs_per_batch : (at + 1) * packs_per_batch] for at in range(micro_batches)] for held in by_rank
    ]


def parted(packs: Sequence[PlannedPack], num_parts: int) -> list[PlannedPack]:
    """The packs cut into `num_parts` packs, each into equally many; fewer where there are fewer fragments.

    A part goes with the fewest tokens first, so that parts of a pack are as even as greed makes them.
    """
    counts: dict[int, int] = {}
    left = num_parts
    # Packs of few fragments first: the parts that they cannot make are made of the others.
    for place in sorted(range(len(packs)), key=lambda place: (len(packs[place].fragments), -place)):
        counts[place] = min(len(packs[place].fragments), left // (len(packs) - len(counts)))
        left -= counts[place]
    parts: list[PlannedPack] = []
    for place, pack in enumerate(packs):
        count = counts[place]
        held: list[list[Fragment]] = [[] for _ in range(count)]
        tokens = [0] * count
        for fragment in sorted(pack.fragments, key=lambda f: (-f.num_tokens, f.key)):
            lightest = tokens.index(min(tokens))
            tokens[lightest] += fragment.num_tokens
            held[lightest].append(fragment)
        share = pack.cost // count
        parts += [PlannedPack(pack.number, share, tuple(sorted(each, key=lambda f: f.key))) for each in held]
    return parts
