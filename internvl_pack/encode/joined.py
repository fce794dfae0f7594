"""Neighbouring rows that begin alike, joined to prefix trees (`--share_prefix`).

    row 0  a.jpg  "<image>\\nWhat is it?"      \\
    row 1  a.jpg  "<image>\\nHow many?"         }  one tree: the image once, a branch for each row
    row 2  a.jpg  "<image>\\nIs it raining?"   /
    row 3  b.jpg  ...                             as it is

Rows are joined where they have the same images, none of them after an answer, and the same text up to the last image;
without images, where the whole prompt is the same. Every row keeps its ids, its labels, its weight in the loss and its
own id. Which rows are joined is found when the source is opened, by reading every record once, and kept on disk beside
the survey. It is part of the data's content mark: with another budget it is other data to a resume and to the survey.

Not joined are rows that already are trees, those with a video (its frames are drawn by the row's id), those of a
dataset with `data_augment` (drawn likewise), and those that alone would not fit into a pack or could not be encoded, so
that each is cut, or named, as it would be alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SampleError, isolate_sample_errors, without_traces
from ..options import count
from ..packing.budget import Room
from ..sources import DatasetSpec, FileRef, ImageRef, RawSample, SliceRef, Source
from ..sources.content import new_hash
from ..sources.image_refs import RemoteRef
from .outline import Outline
from .sample import Encoder, PlannedImage

logger = logging.getLogger(__name__)

MAX_ROWS = 32  # of a tree: more would be cut again, and are read and lost together
_HEAD_BYTES = 1024
_VERSION = 2  # of the rules by which rows are joined


class JoinedSource(Source):
    """The rows of `source`, those that begin alike joined: a row here is one row there, or several.

    Args:
        source, spec, encoder: the rows, and how they become tokens.
        room: the largest sample that need not be cut.
        folder: where what was found is kept for later runs; None keeps nothing.
    """

    def __init__(
        self, source: Source, spec: DatasetSpec, encoder: Encoder, room: Room, folder: Path | None = None
    ) -> None:
        self.source, self.name = source, source.name
        path = None
        if folder is not None and not spec.data_augment:
            facts = [_VERSION, source.content, len(source), spec.max_dynamic_patch, encoder.fingerprint(), room]
            digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
            path = folder / "joined" / f"{digest}.npy"
        found = None if path is None else _read(path, len(source))
        if found is None:
            starts = range(len(source)) if spec.data_augment else _starts(source, spec, encoder, room)
            found = np.array([*starts, len(source)], np.int64)
            if path is not None:
                _write(path, found)
        self._starts = found
        trees = int((np.diff(self._starts) > 1).sum())
        joined = len(source) - len(self) + trees
        logger.info("dataset %r: %d of %d rows are joined to %s", self.name, joined, len(source), count(trees, "trees"))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def rows(self, row: int) -> range:
        """Which rows of the source it is."""
        return range(int(self._starts[row]), int(self._starts[row + 1]))

    def read(self, row: int) -> RawSample:
        self.check_row(row)
        found = [self.source.read(each) for each in self.rows(row)]
        return found[0] if len(found) == 1 else replace(found[0], joined=tuple(found))

    def sample_id(self, row: int) -> str:
        return self.source.sample_id(int(self._starts[row]))

    def origin(self, row: int) -> str:
        return self.source.origin(int(self._starts[row]))

    @property
    def damage(self) -> Sequence[SampleError]:
        return self.source.damage

    @property
    def content(self) -> str:
        """The source's, with which of its rows are joined."""
        digest = new_hash()
        digest.update(self.source.content.encode() + self._starts.tobytes())
        return digest.hexdigest()

    @property
    def block_starts(self) -> Sequence[int]:
        return np.searchsorted(self._starts, np.asarray(self.source.block_starts)).tolist()


def _read(path: Path, num_rows: int) -> np.ndarray | None:
    """What an earlier run found; None where there is nothing, or nothing whole."""
    try:
        starts = np.load(path)
    except (OSError, ValueError, EOFError, SyntaxError):
        return None
    if starts.dtype != np.int64 or starts.ndim != 1 or not len(starts):
        return None
    sizes = np.diff(starts)
    whole = starts[0] == 0 and starts[-1] == num_rows and ((sizes > 0) & (sizes <= MAX_ROWS)).all()
    return starts if whole else None


def _write(path: Path, starts: np.ndarray) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            np.save(file, starts)
        os.replace(beside, path)
    except OSError as error:
        logger.warning("%s cannot be kept (%s): the next run looks again", path, error.strerror)


class _Row:
    """A row that may begin a tree or go on with one.

    Attributes:
        beginning: what rows of a tree have in common, images aside; None where it is not to be joined.
    """

    def __init__(self, raw: RawSample, spec: DatasetSpec, encoder: Encoder, room: Room) -> None:
        self._raw, self._spec, self._encoder, self._room = raw, spec, encoder, room
        self._outline = outline = encoder.outline(raw, spec)
        self.beginning = None if outline.answers or outline.frames else _beginning(outline)
        self._digests: dict[int, bytes] = {}

    @cached_property
    def images(self) -> list[ImageRef]:
        return [self._raw.resolve(name) for name in self._outline.names]

    @cached_property
    def planned(self) -> tuple[PlannedImage, ...]:
        """Its images, by their headers."""
        return self._encoder.plan_images(self._outline)

    def fits(self, planned: tuple[PlannedImage, ...]) -> bool:
        """Whether it need not be cut; `planned` are its images."""
        tiles = sum(image.grid.num_tiles for image in planned)
        if self._room.holds(self._encoder.most_tokens(self._outline, planned), tiles):
            return True
        record = self._encoder.encode(self._raw, self._spec).record
        return bool(self._room.holds(record.num_tokens, record.num_tiles))

    def goes_on_with(self, other: _Row) -> bool:
        """Whether the other is to be in this one's tree.

        Raises:
            SampleError: an image cannot be read.
        """
        if self.beginning is None or self.beginning != other.beginning or len(self.images) != len(other.images):
            return False
        if not all(self._has_image(other, place) for place in range(len(self.images))):
            return False
        return self.fits(self.planned) and other.fits(self.planned)

    def _has_image(self, other: _Row, place: int) -> bool:
        one, two = self.images[place], other.images[place]
        if one == two or isinstance(one, FileRef | RemoteRef) or isinstance(two, FileRef | RemoteRef):
            return one == two
        if isinstance(one, SliceRef) and isinstance(two, SliceRef) and one.size != two.size:
            return False
        return one.head(_HEAD_BYTES) == two.head(_HEAD_BYTES) and self._digest(place) == other._digest(place)

    def _digest(self, place: int) -> bytes:
        if place not in self._digests:
            self._digests[place] = hashlib.blake2b(self.images[place].read(), digest_size=16).digest()
        return self._digests[place]


def _starts(source: Source, spec: DatasetSpec, encoder: Encoder, room: Room) -> Iterator[int]:
    """The first row of each row of a `JoinedSource`."""
    blocks = set(map(int, source.block_starts))  # rows of two shards would be read from both
    first: _Row | None = None
    start = 0
    for row in range(len(source)):
        found, alike = None, False
        # What is wrong with a row is said when it is surveyed.
        with without_traces(), contextlib.suppress(SampleError), isolate_sample_errors():
            found = _Row(source.read(row), spec, encoder, room)
            within = row - start < MAX_ROWS and row not in blocks
            alike = within and first is not None and first.goes_on_with(found)
        if not alike:
            yield row
            start, first = row, found


def _beginning(outline: Outline) -> tuple[Any, ...] | None:
    """The parts up to the last image, without images up to the first answer; None where an answer is among them."""
    last = max((at for at, span in enumerate(outline.spans, 1) if span.is_image), default=0)
    found: list[Any] = []
    for at, span in enumerate(outline.spans, 1):
        for kind, value, trained in span.parts:
            if trained:
                return None if last or not found else tuple(found)
            found.append((kind, value.tobytes() if isinstance(value, np.ndarray) else value))
        if at == last:
            return tuple(found)
    return None
