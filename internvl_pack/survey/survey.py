"""`Survey`: the lengths along an epoch's order, a part of PART positions at a time, measured where they are not known.

    position -> (dataset, row) -> table on disk, else read and encoded (headers, no pixels) -> part -> all readers

A reader that comes to a block of which some parts are not known measures those that nobody has published yet, from a
part of its own on, round the block: so readers share the work without asking each other. As many parts make a block as
there are readers.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..config import PackingConfig
from ..encode.sample import Encoded
from ..errors import SampleError
from ..order.mixture import Mixture
from ..packing.budget import Room
from ..records import Fragment
from ..samples import Samples
from .exchange import Exchange
from .table import (
    CUTTABLE,
    MAX_TILES,
    MAX_TOKENS,
    MISSING,
    PLAIN,
    REFUSED,
    TREE,
    Lengths,
    Measured,
    Note,
    SurveyKey,
    SurveyTable,
    crowd_of,
    tile_pairs,
)

# Positions of a part: 50 ms of measuring.
PART = 128
_KEPT_PARTS = 8

# (dataset, row) -> sample id.
SampleId = Callable[[int, int], str]


@dataclass(frozen=True)
class Part:
    """Some samples, by default those at PART positions of an epoch (fewer at its end).

    Attributes:
        datasets, rows: where they stand; int64 (n,).
        tokens, tiles: their sizes; int64 (n,), 0 where refused.
        crowds: how their tiles are shared among pictures, uint8 (n,); None where that does not matter.
        notes: by offset: of rows that must be cut, of trees, and of rows that are refused.
        trees: their offsets.
    """

    datasets: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    tiles: np.ndarray
    notes: Mapping[int, Note] = field(default_factory=dict)
    trees: frozenset[int] = frozenset()
    crowds: np.ndarray | None = None

    @classmethod
    def of(cls, datasets: np.ndarray, rows: np.ndarray) -> Part:
        """Samples that are not measured yet."""
        nothing = np.zeros(len(rows), np.int64)
        return cls(datasets, rows, nothing, nothing)

    def tile_pairs(self, offset: int) -> int:
        """As a `Fragment` has them."""
        return 0 if self.crowds is None else tile_pairs(int(self.tiles[offset]), int(self.crowds[offset]))

    def cut(self, offset: int, position: int, sample_id: SampleId, config: PackingConfig) -> list[Fragment]:
        """The fragments of a tree, or of a sample that does not fit into a pack, at `position` of its epoch.

        Raises:
            SampleError: it was refused, or is by `oversize`.
        """
        note = self.notes.get(offset)
        if note is None:
            raise SampleError("sample_empty", "the sample has no tokens")
        if note.error is not None:
            raise SampleError(*note.error)
        name = sample_id(int(self.datasets[offset]), int(self.rows[offset]))
        sizes = int(self.tokens[offset]), int(self.tiles[offset]), self.tile_pairs(offset)
        return config.cut(note.record(name, *sizes), position)


class Survey:
    """Lengths of a run's samples. Picklable, for reader processes.

    Args:
        samples: the data.
        room: samples beyond it are noted with the places where they may be cut.
        root: folder of the tables; None keeps them for this process and its children only.
    """

    def __init__(self, samples: Samples, room: Room, root: Path | None) -> None:
        self.samples = samples
        self.room = room
        self.counts_pictures = samples.encoder.grid_positions  # whose tiles see each other
        self.share(None)
        self.tables = tuple(SurveyTable(root, key) for key in survey_keys(samples))

    def share(self, exchange: Exchange | None, *, reader: int = 0, num_readers: int = 1) -> None:
        """Share the work with other readers from now on.

        Args:
            exchange: with the other readers of the run; None relies on this reader and the tables alone.
            reader, num_readers: this reader's number among those that work at the same time.
        """
        self.exchange, self.reader, self.num_readers = exchange, reader, num_readers
        self._kept: OrderedDict[str, Part] = OrderedDict()

    # -- along the order -----------------------------------------------------------------------------

    def part(self, mixture: Mixture, number: int) -> Part:
        """Positions number * PART and on of an epoch, measured where they are not known."""
        name = f"{mixture.epoch}/{number}"
        if name not in self._kept:
            self._kept[name] = self._agreed(mixture, number)
            while len(self._kept) > _KEPT_PARTS:
                self._kept.popitem(last=False)
        return self._kept[name]

    def _agreed(self, mixture: Mixture, number: int) -> Part:
        part = self._located(mixture, number)
        if self.exchange is None:
            if (self._lookup(part.datasets, part.rows).verdicts == MISSING).any():
                self._work_round(mixture, number)
            return self.measured(part)
        name = f"{mixture.epoch}/{number}"
        payload = self.exchange.get(name)
        if payload is None:
            self._work_round(mixture, number)
            payload = self.exchange.get(name)
            assert payload is not None, "it was published or found while measuring the block"
        return _unpacked(part, payload, self.counts_pictures)

    def _work_round(self, mixture: Mixture, number: int) -> None:
        """Measure the parts of a block that are missing, from this reader's own on."""
        first = number - number % self.num_readers
        size = min(self.num_readers, -(-len(mixture) // PART) - first)
        for turn in range(size):
            each = first + (self.reader + turn) % size
            name = f"{mixture.epoch}/{each}"
            if self.exchange is None:
                self.measured(self._located(mixture, each))
            elif self.exchange.get(name) is None:
                self.exchange.publish(name, _packed(self.measured(self._located(mixture, each))))

    @staticmethod
    def _located(mixture: Mixture, number: int) -> Part:
        start = number * PART
        return Part.of(*mixture.locate_range(start, min(start + PART, len(mixture))))

    # -- rows ----------------------------------------------------------------------------------------

    def _lookup(self, datasets: np.ndarray, rows: np.ndarray) -> Lengths:
        """As the tables have them; rows beyond the room count only with their note."""
        found = Lengths(*(np.zeros(len(rows), kind) for kind in (np.int64, np.int64, np.uint8, np.uint8)))
        for dataset in np.unique(datasets).tolist():
            chosen = datasets == dataset
            for column, values in zip(found, self.tables[dataset].lengths(rows[chosen]), strict=True):
                column[chosen] = values
        found.verdicts[(found.verdicts == PLAIN) & ~self.room.holds(found.tokens, found.tiles)] = MISSING
        return found

    def measured(self, part: Part, *, look_again: bool = False) -> Part:
        """The part with its lengths: from the tables, or measured and kept there.

        Args:
            look_again: measure again the rows whose images are separate files, which the content mark does not cover.
        """
        tokens, tiles, verdicts, crowds = self._lookup(part.datasets, part.rows)
        if look_again:
            apart = np.array([spec.shards is None for spec in self.samples.specs])
            verdicts[apart[part.datasets] & (tiles > 0)] = MISSING
        noted = (verdicts == REFUSED) | (verdicts == TREE)
        noted |= (verdicts == CUTTABLE) & ~self.room.holds(tokens, tiles)
        notes: dict[int, Note] = {}
        new: dict[int, list[tuple[int, Measured]]] = {}
        for offset in np.flatnonzero(noted | (verdicts == MISSING)).tolist():
            dataset, row = int(part.datasets[offset]), int(part.rows[offset])
            sizes = int(tokens[offset]), int(tiles[offset])
            one = Measured(*sizes, int(verdicts[offset]), crowd=int(crowds[offset]))
            if noted[offset]:
                one = one._replace(note=self.tables[dataset].note(row))
            if one.verdict == MISSING or not one.fits_note():
                one, _ = self.measure(dataset, row)
                new.setdefault(dataset, []).append((row, one))
            tokens[offset], tiles[offset], crowds[offset] = one.num_tokens, one.num_tiles, one.crowd
            if one.note is not None:
                notes[offset] = one.note
        for dataset, found in new.items():
            self.tables[dataset].put(*zip(*found, strict=True))
        shared = crowds if self.counts_pictures else None
        return Part(part.datasets, part.rows, tokens, tiles, notes, _trees(notes), shared)

    def measure(self, dataset: int, row: int) -> tuple[Measured, Encoded | None]:
        """Read and encode one row, without pixels. The encoded sample is None where the row is refused."""
        try:
            encoded = self.samples.encode(dataset, row)
            record = encoded.record
            if record.num_tokens > MAX_TOKENS or record.num_tiles > MAX_TILES:
                raise SampleError(
                    "sample_too_large",
                    f"{record.num_tokens:,} tokens and {record.num_tiles:,} tiles are beyond the {MAX_TOKENS:,} tokens "
                    f"and {MAX_TILES:,} tiles that can be packed",
                    self.samples.origin(dataset, row),
                )
        except SampleError as error:
            return Measured.of_error(error), None
        cuttable = not self.room.holds(record.num_tokens, record.num_tiles)
        shared = [n for image in encoded.images for n in image.grid.seen_together] if self.counts_pictures else []
        return Measured.of_record(record, cuttable=cuttable, crowd=crowd_of(shared)), encoded

    def missing(self, dataset: int, rows: np.ndarray) -> np.ndarray:
        """Those of a dataset's rows, int64 (n,), that are not known."""
        return rows[self._lookup(np.full(len(rows), dataset, np.int64), rows).verdicts == MISSING]

    def measure_rows(self, dataset: int, rows: np.ndarray) -> None:
        """Measure those of a dataset's rows, int64 (n,), that are not known, for the table."""
        self.measured(Part.of(np.full(len(rows), dataset, np.int64), rows))

    def sample_id(self, dataset: int, row: int) -> str:
        return self.samples.sample_id(dataset, row)

    def where_images_are(self, dataset: int) -> str:
        """See `DatasetSpec.where_images_are`."""
        return self.samples.specs[dataset].where_images_are

    @property
    def num_known(self) -> int:
        """Rows that need not be measured again."""
        return sum(table.num_known for table in self.tables)

    def has_trees(self) -> bool:
        """Whether a row that is known is a prefix tree."""
        return any(TREE in verdicts for table in self.tables for verdicts in table.verdicts())

    def forget_refusals(self) -> None:
        """Try rows again that an earlier run refused; before any reader of this run begins."""
        for table in self.tables:
            table.forget_refusals()


def survey_keys(samples: Samples) -> list[SurveyKey]:
    """What the lengths of each dataset depend on. Its name, weights and repeats are not among it."""
    encode = samples.encoder.fingerprint()
    return [
        SurveyKey(
            spec.name,
            len(source),
            {"content": source.content, "max_dynamic_patch": spec.max_dynamic_patch, "encode": encode},
        )
        for spec, source in zip(samples.specs, samples.sources, strict=True)
    ]


def _packed(part: Part) -> bytes:
    """A part's lengths for the exchange: uint32 tokens, uint16 tiles, uint8 crowds where they matter, notes as JSON."""
    notes = json.dumps({offset: note.to_json() for offset, note in part.notes.items()}).encode()
    crowds = b"" if part.crowds is None else part.crowds.tobytes()
    return zlib.compress(part.tokens.astype("<u4").tobytes() + part.tiles.astype("<u2").tobytes() + crowds + notes, 1)


def _unpacked(part: Part, payload: bytes, counts_pictures: bool) -> Part:
    data, n = zlib.decompress(payload), len(part.rows)
    tokens = np.frombuffer(data, "<u4", n).astype(np.int64)
    tiles = np.frombuffer(data, "<u2", n, 4 * n).astype(np.int64)
    crowds = np.frombuffer(data, np.uint8, n, 6 * n) if counts_pictures else None
    rest = data[(7 if counts_pictures else 6) * n :]
    notes = {int(offset): Note.from_json(text) for offset, text in json.loads(rest).items()}
    return Part(part.datasets, part.rows, tokens, tiles, notes, _trees(notes), crowds)


def _trees(notes: Mapping[int, Note]) -> frozenset[int]:
    return frozenset(offset for offset, note in notes.items() if note.branches)
