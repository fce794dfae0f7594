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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..encode.sample import Encoded
from ..errors import SampleError
from ..order.mixture import Mixture
from ..packing.budget import Room
from ..samples import Samples
from .exchange import Exchange
from .table import MAX_TILES, MAX_TOKENS, MISSING, PLAIN, REFUSED, Measured, Note, SurveyKey, SurveyTable

# Positions of a part: 50 ms of measuring.
PART = 128
_KEPT_PARTS = 8


@dataclass(frozen=True)
class Part:
    """The samples at PART positions from `start` on (fewer at the end of the epoch).

    Attributes:
        datasets, rows: where they stand; int64 (n,).
        tokens, tiles: their sizes; int64 (n,), 0 where refused.
        notes: by offset: of rows that must be cut, and of rows that are refused.
    """

    start: int
    datasets: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    tiles: np.ndarray
    notes: Mapping[int, Note] = field(default_factory=dict)


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
            lengths, _ = self._lookup(part.datasets, part.rows)
            if (lengths == MISSING).any():
                self._work_round(mixture, number)
            return self._measured(part)
        name = f"{mixture.epoch}/{number}"
        payload = self.exchange.get(name)
        if payload is None:
            self._work_round(mixture, number)
            payload = self.exchange.get(name)
            assert payload is not None, "it was published or found while measuring the block"
        return _unpacked(part, payload)

    def _work_round(self, mixture: Mixture, number: int) -> None:
        """Measure the parts of a block that are missing, from this reader's own on."""
        first = number - number % self.num_readers
        last = min(first + self.num_readers, -(-len(mixture) // PART))
        size = last - first
        for turn in range(size):
            each = first + (self.reader + turn) % size
            name = f"{mixture.epoch}/{each}"
            if self.exchange is None:
                self._measured(self._located(mixture, each))
            elif self.exchange.get(name) is None:
                self.exchange.publish(name, _packed(self._measured(self._located(mixture, each))))

    @staticmethod
    def _located(mixture: Mixture, number: int) -> Part:
        start = number * PART
        datasets, rows = mixture.locate_range(start, min(start + PART, len(mixture)))
        nothing = np.zeros(len(rows), np.int64)
        return Part(start, datasets, rows, nothing, nothing)

    # -- rows ----------------------------------------------------------------------------------------

    def _lookup(self, datasets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """(verdicts, (tokens, tiles)) as the tables have them; rows beyond the room count only with their note."""
        verdicts = np.zeros(len(rows), np.uint8)
        tokens, tiles = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for dataset in np.unique(datasets).tolist():
            chosen = datasets == dataset
            tokens[chosen], tiles[chosen], verdicts[chosen] = self.tables[dataset].lengths(rows[chosen])
        verdicts[(verdicts == PLAIN) & ~self.room.holds(tokens, tiles)] = MISSING
        return verdicts, (tokens, tiles)

    def _measured(self, part: Part) -> Part:
        """The part with its lengths, from the tables where they have them."""
        verdicts, (tokens, tiles) = self._lookup(part.datasets, part.rows)
        notes: dict[int, Note] = {}
        measured: dict[int, list[tuple[int, Measured]]] = {}
        noted = (verdicts != PLAIN) & (
            (verdicts != MISSING) & ((verdicts == REFUSED) | ~self.room.holds(tokens, tiles))
        )
        for offset in np.flatnonzero((verdicts == MISSING) | noted).tolist():
            dataset, row = int(part.datasets[offset]), int(part.rows[offset])
            one = self._known(dataset, row, verdicts[offset], tokens[offset], tiles[offset])
            if one is None:
                one = self.measure(dataset, row)
                measured.setdefault(dataset, []).append((row, one))
            tokens[offset], tiles[offset] = one.num_tokens, one.num_tiles
            if one.note is not None:
                notes[offset] = one.note
        for dataset, found in measured.items():
            self.tables[dataset].put(*zip(*found, strict=True))
        return Part(part.start, part.datasets, part.rows, tokens, tiles, notes)

    def _known(self, dataset: int, row: int, verdict: Any, tokens: Any, tiles: Any) -> Measured | None:
        """A row with its note, as the table has it; None where it has to be measured."""
        if verdict == MISSING:
            return None
        if verdict == PLAIN:
            return Measured(int(tokens), int(tiles), PLAIN)
        one = Measured(int(tokens), int(tiles), int(verdict), self.tables[dataset].note(row))
        return one if one.fits_note() else None

    def measure(self, dataset: int, row: int) -> Measured:
        """Read and encode one row, without pixels."""
        return self.measured(dataset, row)[0]

    def measured(self, dataset: int, row: int) -> tuple[Measured, Encoded | None]:
        """As `measure`, with the encoded sample, or None where the row is refused."""
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
        return Measured.of_record(record, cuttable=cuttable), encoded

    def missing(self, dataset: int, rows: np.ndarray) -> np.ndarray:
        """Those of a dataset's rows, int64 (n,), that are not known."""
        verdicts, _ = self._lookup(np.full(len(rows), dataset, np.int64), rows)
        return rows[verdicts == MISSING]

    def measure_rows(self, dataset: int, rows: np.ndarray) -> int:
        """Measure those of these rows that are not known, for the table. Returns how many were measured."""
        missing = self.missing(dataset, rows).tolist()
        if missing:
            self.tables[dataset].put(missing, [self.measure(dataset, row) for row in missing])
        return len(missing)

    def rows(self, dataset: int, rows: np.ndarray, *, look_again: bool = False) -> list[Measured]:
        """These rows of a dataset, int64 (n,), measured where they are not known.

        Args:
            look_again: measure again the rows whose images are separate files, which the content mark does not cover.
        """
        verdicts, (tokens, tiles) = self._lookup(np.full(len(rows), dataset, np.int64), rows)
        apart = look_again and self.samples.specs[dataset].shards is None
        out: list[Measured] = []
        new: list[tuple[int, Measured]] = []
        for row, verdict, *size in zip(*(column.tolist() for column in (rows, verdicts, tokens, tiles)), strict=True):
            one = None if apart and size[1] else self._known(dataset, row, verdict, *size)
            if one is None:
                one = self.measure(dataset, row)
                new.append((row, one))
            out.append(one)
        if new:
            self.tables[dataset].put(*zip(*new, strict=True))
        return out

    @property
    def is_complete(self) -> bool:
        """Whether every row is known."""
        return all(
            table.num_known == len(source) for table, source in zip(self.tables, self.samples.sources, strict=True)
        )

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
    """A part's lengths for the exchange: uint32 tokens, uint16 tiles, and notes as JSON."""
    notes = json.dumps({offset: note.to_json() for offset, note in part.notes.items()}).encode()
    return zlib.compress(part.tokens.astype("<u4").tobytes() + part.tiles.astype("<u2").tobytes() + notes, 1)


def _unpacked(part: Part, payload: bytes) -> Part:
    data, n = zlib.decompress(payload), len(part.rows)
    tokens = np.frombuffer(data, "<u4", n).astype(np.int64)
    tiles = np.frombuffer(data, "<u2", n, 4 * n).astype(np.int64)
    notes = {int(offset): Note.from_json(text) for offset, text in json.loads(data[6 * n :]).items()}
    return Part(part.start, part.datasets, part.rows, tokens, tiles, notes)
