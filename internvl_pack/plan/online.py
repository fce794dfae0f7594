"""`OnlinePacks`: the packer over the order of one epoch.

    position -> Part of the survey -> fragments, or a refusal -> Packer -> packs

It reads the survey only, no sample and no pixel: some 25 us a sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from ..config import PackingConfig
from ..errors import SampleError, UserError
from ..ledger import Ledger
from ..order.mixture import Mixture
from ..packing.cost import CostModel
from ..packing.packer import Packer
from ..records import Fragment, whole
from ..survey.survey import PART, Part
from .packed_state import fragment_table, fragments_of, narrowed
from .sequence import PlannedPack, Refused

# Rows of one dataset, all bad: nothing in it can be used.
ALL_BAD_ROWS = 32


def all_bad(dataset: str, num_bad: int, sample_id: str, error: SampleError) -> str:
    """The message of a dataset whose first ALL_BAD_ROWS are bad."""
    return f"dataset {dataset!r}: none of its first {num_bad} samples can be used; {sample_id}: {error}"


class Lengths(Protocol):
    """What a plan reads of the survey."""

    def part(self, mixture: Mixture, number: int) -> Part: ...

    def sample_id(self, dataset: int, row: int) -> str: ...

    def where_images_are(self, dataset: int) -> str: ...


class SampleReader:
    """The samples of one epoch in its order, as fragments or refusals.

    Args:
        survey: lengths along the order.
        mixture: the order.
        config: how samples are cut, and what a bad one does to the run.
        stops: False counts bad samples and continues, whatever the config says; for estimates.

    Attributes:
        cursor: positions of the order that were read.
    """

    def __init__(self, survey: Lengths, mixture: Mixture, config: PackingConfig, *, stops: bool = True) -> None:
        self._survey, self._mixture, self._config, self._stops = survey, mixture, config, stops
        self.cursor = 0
        self.ledger = Ledger()
        self._refused: list[Refused] = []
        self._good: Counter[int] = Counter()  # rows of each dataset that can be used
        self._bad: Counter[int] = Counter()

    def samples(self) -> Iterator[list[Fragment]]:
        """The fragments of each sample that can be used, from the cursor on.

        Raises:
            UserError: a sample that must stop the run.
        """
        room = self._config.room
        while self.cursor < len(self._mixture):
            number, offset = divmod(self.cursor, PART)
            part = self._survey.part(self._mixture, number)
            tokens, tiles, datasets = part.tokens.tolist(), part.tiles.tolist(), part.datasets.tolist()
            for place in range(offset, len(tokens)):
                position = self.cursor
                self.cursor += 1
                fits = tokens[place] and tokens[place] <= room.max_tokens and tiles[place] <= room.max_tiles
                if fits and place not in part.trees:
                    fragments = [whole(position, tokens[place], tiles[place], part.tile_pairs(place))]
                else:
                    found = self._cut(part, place, position)
                    if found is None:
                        continue
                    fragments = found
                self._good[datasets[place]] += 1
                self.ledger.read(tokens[place], fragments)
                yield fragments

    def _cut(self, part: Part, place: int, position: int) -> list[Fragment] | None:
        """The fragments of a tree, or of a sample that does not fit into a pack; None where it is refused."""
        try:
            return part.cut(place, position, self._survey.sample_id, self._config)
        except SampleError as error:
            self._refuse(position, int(part.datasets[place]), int(part.rows[place]), error)
            return None

    def _refuse(self, position: int, dataset: int, row: int, error: SampleError) -> None:
        self.ledger.refuse(error.reason)
        if error.reason == "image_missing" and not self._good[dataset]:  # perhaps all of them
            hint = self._survey.where_images_are(dataset)
            error = SampleError(error.reason, f"{error.detail}; {hint}" if hint else error.detail, error.source)
        self._refused.append(Refused(position, error.reason, error.detail, error.source))
        self._bad[dataset] += 1
        if not self._stops:
            return
        if self._config.on_error == "stop" or error.reason == "oversized_error":
            raise UserError(f"{self._survey.sample_id(dataset, row)}: {error}")
        if self._bad[dataset] >= ALL_BAD_ROWS and not self._good[dataset]:
            name = self._mixture.parts[dataset].name
            raise UserError(all_bad(name, self._bad[dataset], self._survey.sample_id(dataset, row), error))

    def take_refused(self) -> list[Refused]:
        """Samples refused since this was last asked."""
        refused, self._refused = self._refused, []
        return refused

    def _reader_state(self) -> dict[str, Any]:
        counts = {"good": self._good, "bad": self._bad}
        return {"cursor": self.cursor} | {
            name: {str(dataset): count for dataset, count in counter.items()} for name, counter in counts.items()
        }

    def _load_reader(self, state: Mapping[str, Any]) -> None:
        if state["cursor"] > len(self._mixture):
            raise UserError(
                f"resume: {state['cursor']:,} samples of the epoch were read when the state was saved, the data has "
                f"{len(self._mixture):,} now: set the data back, or start anew from the weights"
            )
        assert state["cursor"] >= 0, "a place before the first"
        self.cursor = state["cursor"]
        self._good, self._bad = (Counter({int(d): int(n) for d, n in state[name].items()}) for name in ("good", "bad"))


class OnlinePacks(SampleReader):
    """Packs of one epoch, made while it is read. A `PackSequence`.

    Args:
        survey, mixture, stops: see `SampleReader`.
        config: budgets, packer and how samples are cut.
        cost: what packs cost; every reader must use the same.

    Attributes:
        more_to_read: whether the order has samples left.
    """

    def __init__(
        self, survey: Lengths, mixture: Mixture, config: PackingConfig, cost: CostModel, *, stops: bool = True
    ) -> None:
        super().__init__(survey, mixture, config, stops=stops)
        self._samples = self.samples()
        self.more_to_read = True
        self.budget = config.budget()
        self._packer: Packer[Fragment] = Packer(
            self.budget,
            policy=config.packing_policy if config.packing else "single",
            buffer_size=config.max_buffer_size if config.packing else 1,
            cost=cost,
        )

    def next_pack(self) -> PlannedPack | None:
        packer = self._packer
        while self.more_to_read and not packer.full:
            fragments = next(self._samples, None)
            if fragments is None:
                self.more_to_read = False
            else:
                for fragment in fragments:
                    packer.add(fragment)
        if not packer.waiting:
            return None
        number = packer.num_built
        cost, fragments = packer.pop()
        return PlannedPack(number, cost, tuple(fragments))

    def state_dict(self) -> dict[str, Any]:
        return {
            "reader": self._reader_state(),
            "waiting": narrowed(fragment_table(self._packer.waiting)),
            "packer": self._packer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, pooled: Sequence[Sequence[Fragment]] = ()) -> None:
        self._load_reader(state["reader"])
        waiting = fragments_of(state["waiting"])
        self.ledger.check_waiting([*waiting, *(fragment for pack in pooled for fragment in pack)])
        assert self.ledger.samples_in == self.cursor, "other samples were counted than were read"
        if not all(self._holds(pack) for pack in (*pooled, *([fragment] for fragment in waiting))):
            raise UserError(
                "resume: samples of the saved state wait in packs of a larger budget: set max_packed_tokens, "
                "num_images_expected, max_attention_cost and pad_to_multiple_of back, or start anew from the weights"
            )
        self._packer.load_state_dict(state["packer"], waiting)

    def _holds(self, pack: Sequence[Fragment]) -> bool:
        budget, lengths = self.budget, [self.budget.aligned(fragment.num_tokens) for fragment in pack]
        pairs = sum(n * n for n in lengths) - sum(fragment.num_unseen_pairs for fragment in pack)
        return (
            sum(lengths) <= budget.max_tokens
            and sum(fragment.num_tiles for fragment in pack) <= budget.max_tiles
            and pairs <= (budget.max_attention_cost or pairs)
        )
