"""Whole epochs packed from lengths alone, by the very plan that trains: how full, fair, dear and even packs are.

lengths of a file, or of META's survey -> LengthTable -> OnlinePacks -> StepPlan -> PackingEstimate
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import numpy as np

from ..config import PackingConfig
from ..errors import UserError
from ..order.mixture import Mixture, MixturePart
from ..packing.cost import CostModel
from ..packing.tally import quantile
from ..records import Span
from ..survey.survey import PART, Part, Survey
from ..survey.table import MAX_TILES, MAX_TOKENS, REFUSED, TREE, Note, crowds_of, tile_pairs
from .epochs import Spread, estimate_spread
from .figures import PackingEstimate

TOKENS_A_TILE = 256
TILES_A_PICTURE = 256  # in a family of native resolution, whose tiles are tokens, where the number of images is unknown


class LengthTable:
    """Lengths of an epoch's samples, in its order: what `OnlinePacks` reads where there is no data.

    A row of lengths does not say where its images lie or its turns end. One that has to be cut is taken as text with
    its images spread evenly over it and its tiles evenly over its images (one tile an image where the number of images
    is not known), TOKENS_A_TILE tokens a tile, text cut anywhere. Rows of a survey have their own notes.

    Args:
        tokens, tiles: int64 (rows,).
        images: int64 (rows,), 0 where not known; None where notes have it.
        note: of a row that may have to be cut, is a tree, or is refused.
        trees: bool (rows,), which rows are trees; None where there is none.
        order: int64 (samples,), which row stands at each position; None takes all as they come.
        crowds: uint8 (rows,), how tiles are shared among pictures; None where it does not matter.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        tiles: np.ndarray,
        images: np.ndarray | None = None,
        *,
        note: Callable[[int], Note | None] | None = None,
        trees: np.ndarray | None = None,
        order: np.ndarray | None = None,
        crowds: np.ndarray | None = None,
    ) -> None:
        self.tokens, self.tiles, self.images = tokens, tiles, images
        self._note = note or self._spread
        self._trees = trees
        self._order = np.arange(len(tokens)) if order is None else order
        self._crowds = crowds

    def __len__(self) -> int:
        return len(self._order)

    def drawn(self, num_samples: int, seed: int) -> LengthTable:
        """So many samples of these, each drawn anew.

        Raises:
            UserError: there is none to draw.
        """
        if not len(self):
            raise UserError("--samples: there are no lengths to draw from")
        places = np.random.default_rng(seed).integers(0, len(self), num_samples)
        known: dict[str, Any] = {"note": self._note, "trees": self._trees, "crowds": self._crowds}
        return LengthTable(self.tokens, self.tiles, self.images, order=self._order[places], **known)

    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 (samples,) tokens and tiles in the order of the epoch."""
        return self.tokens[self._order], self.tiles[self._order]

    def tile_pairs(self) -> np.ndarray:
        """int64 (samples,), as a `Fragment` has them."""
        if self._crowds is None:
            return np.zeros(len(self), np.int64)
        sizes = zip(self.sizes()[1].tolist(), self._crowds[self._order].tolist(), strict=True)
        return np.array([tile_pairs(tiles, crowd) for tiles, crowd in sizes], np.int64)

    def part(self, mixture: Mixture, number: int) -> Part:
        rows = self._order[number * PART : (number + 1) * PART]
        tokens, tiles = self.tokens[rows], self.tiles[rows]
        trees = frozenset() if self._trees is None else frozenset(np.flatnonzero(self._trees[rows]).tolist())
        crowds = None if self._crowds is None else self._crowds[rows]
        return Part(np.zeros(len(rows), np.int64), rows, tokens, tiles, _Notes(self._note, rows), trees, crowds)

    def sample_id(self, dataset: int, row: int) -> str:
        return f"row {row + 1}"

    def where_images_are(self, dataset: int) -> str:
        return ""  # there are no images

    def mixture(self) -> Mixture:
        """The order of the epoch: as the samples come."""
        return Mixture([MixturePart(name="lengths", num_rows=len(self))], seed=0, shuffle=False)

    def _spread(self, row: int) -> Note | None:
        num_tokens, num_tiles = int(self.tokens[row]), int(self.tiles[row])
        if not num_tokens:
            return None
        if not 0 < num_tiles <= num_tokens:
            # more tiles than tokens is no sample that was ever encoded: one block, which cannot be cut
            return Note()
        images = min(int(self.images[row]) if self.images is not None else 0, num_tiles) or num_tiles
        a_tile = min(TOKENS_A_TILE, num_tokens // num_tiles)
        text = num_tokens - a_tile * num_tiles
        spans = []
        for i in range(images):
            spans.append(Span(text * (i + 1) // (images + 1) - text * i // (images + 1)))
            held = num_tiles * (i + 1) // images - num_tiles * i // images
            spans.append(Span(a_tile * held, held))
        spans.append(Span(text - text * images // (images + 1)))
        return Note(tuple(span for span in spans if span.num_tokens))


class _Notes(dict[int, Note]):
    """The notes of some rows by their offset, made when they are asked for."""

    def __init__(self, note: Callable[[int], Note | None], rows: np.ndarray) -> None:
        super().__init__()
        self._note, self._rows = note, rows

    def get(self, offset: int, default: Any = None) -> Any:
        return self._note(int(self._rows[offset])) or default


def surveyed_lengths(survey: Survey, mixture: Mixture) -> LengthTable:
    """The lengths of an epoch of data of which all rows are known (`measure_all`)."""
    starts = np.cumsum([0, *(table.key.num_rows for table in survey.tables)])
    known = [table.lengths(np.arange(table.key.num_rows)) for table in survey.tables]
    tokens, tiles, verdicts, crowds = (np.concatenate(column) for column in zip(*known, strict=True))
    datasets, rows = mixture.locate_range(0, len(mixture))

    def note(row: int) -> Note | None:
        dataset = int(np.searchsorted(starts, row, "right")) - 1
        found = survey.tables[dataset].note(row - int(starts[dataset]))
        return found if found is None or (found.error is not None) == (verdicts[row] == REFUSED) else None

    return LengthTable(
        tokens,
        tiles,
        note=note,
        trees=verdicts == TREE,
        order=starts[datasets] + rows,
        crowds=crowds if survey.counts_pictures else None,
    )


def report(epoch: PackingEstimate) -> dict[str, int | float]:
    """What `internvl-pack simulate --json` prints."""
    return {
        "samples": epoch.num_planned,
        "packs": int(epoch.packs),
        "lower_bound": int(epoch.bound),
        "packs_over_bound": epoch.packs_over_bound,
        "token_fill": epoch.aligned_tokens / max(1, epoch.packs * epoch.budget[0]),
        "tile_fill": epoch.tiles / max(1, epoch.packs * epoch.budget[1]),
        "us_per_sample": 1e6 * epoch.plan_seconds / max(1, epoch.num_planned),
        "max_wait_samples": max(epoch.waits, default=0),
        "p99_wait_samples": quantile(epoch.waits, 0.99),
        "split": int(epoch.split),
        "dropped": epoch.refused.total(),
        "fragments": int(epoch.segments),
        "trees": round(epoch.trees),
        "branches": round(epoch.branches),
        "saved_tokens": round(epoch.saved_tokens),
        "steps": epoch.steps,
        "steps_over_bound": epoch.steps_over_bound,
        "steps_not_full": epoch.steps_not_full,
        "steps_empty": epoch.steps_empty,
        "rank_efficiency": epoch.rank_efficiency or epoch.epoch_efficiency or 1.0,
        "epoch_efficiency": epoch.epoch_efficiency or 1.0,
    }


def simulate(
    lengths: LengthTable,
    config: PackingConfig,
    cost: CostModel,
    *,
    num_ranks: int = 64,
    packs_per_step: int | None = None,
) -> PackingEstimate:
    """An epoch of these lengths, in their order.

    Args:
        cost: of packs.
        num_ranks: that step together.
        packs_per_step: ranks x accumulation x packs a batch; None: a pack a rank.

    Raises:
        UserError: a number of ranks or packs that makes no sense, or a sample that must stop the run.
    """
    if num_ranks < 1:
        raise UserError(f"--ranks is {num_ranks}: give at least 1")
    if packs_per_step is None:
        packs_per_step = num_ranks
    if packs_per_step < num_ranks:
        raise UserError(
            f"--global_batch {packs_per_step} is less than --ranks {num_ranks}: each rank trains a pack a step"
        )
    return estimate_spread(
        lengths,
        Spread(lengths.mixture(), len(lengths)),
        config,
        cost,
        packs_per_step=packs_per_step,
        num_ranks=num_ranks,
    )


def read_lengths(lines: TextIO, name: str) -> LengthTable:
    """Rows of a CSV file with the columns num_tokens and num_tiles, and num_images if it has it.

    Raises:
        UserError: a column is missing, a row's number is none, or it is no text; it names the line.
    """
    rows = _rows(csv.reader(lines), name)
    _, header = next(rows, (0, None))
    if header is None:
        raise UserError(f"{name} is empty: give a CSV file with the columns num_tokens and num_tiles")
    header = [column.strip().lstrip("\ufeff") for column in header]
    for column in ("num_tokens", "num_tiles"):
        if column not in header:
            raise UserError(f"{name} has no column {column}: it has {', '.join(header)}")
    tokens, tiles = header.index("num_tokens"), header.index("num_tiles")
    images = header.index("num_images") if "num_images" in header else None
    columns = array("l"), array("l"), array("l")
    for line, row in rows:
        if not row:
            continue
        try:
            size = int(row[tokens]), int(row[tiles])
            known = images is not None and len(row) > images and row[images].isdecimal()
            num_images = min(int(row[images]), MAX_TILES) if images is not None and known else 0
        except (IndexError, ValueError):
            raise UserError(f"{name}:{line}: num_tokens and num_tiles must be whole numbers") from None
        if min(size) < 0:
            raise UserError(f"{name}:{line}: num_tokens and num_tiles cannot be negative")
        if size[0] > MAX_TOKENS or size[1] > MAX_TILES:
            raise UserError(f"{name}:{line}: a sample has {MAX_TOKENS:,} tokens and {MAX_TILES:,} tiles at most")
        for values, value in zip(columns, (*size, num_images), strict=True):
            values.append(value)
    arrays = [np.frombuffer(column, np.int64) for column in columns]
    pictures = np.where(arrays[2] > 0, arrays[2], np.maximum(1, arrays[1] // TILES_A_PICTURE))
    return LengthTable(*arrays, crowds=np.where(arrays[1] > 0, crowds_of(pictures), 0).astype(np.uint8))


def _rows(reader: Any, name: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, row) of a CSV reader."""
    try:
        for row in reader:
            yield reader.line_num, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{name}:{reader.line_num + 1}: this is no CSV file in UTF-8 ({error})") from None
