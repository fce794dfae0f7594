"""Packs as people can read them: one page of the rows that a loader gives.

    PackLoader -> batch -> `RowView` (segments, decoded text, thumbnails) -> HTML

Everything on the page is read from the batch itself, so that it shows what training gets. The page's size is bounded,
whatever the data: pictures, text and segments beyond a limit are left out, and it says so where they are missing.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np

from ..batch.collate import FILLER_ID, PAD_ID, PREFIX_ID, row_boundaries
from ..batch.loss_weights import IGNORE_INDEX
from . import page

MAX_PICTURE_BYTES = 6_000_000
# Characters of text on a page; each row has an equal share of them, and each of its segments of the row's.
MAX_TEXT = 3_000_000
MIN_TEXT = 300
# Segments whose text is shown; later rows are shown by their bars and figures.
MAX_SEGMENTS = 4000
MAX_EVENTS = 200
OPEN_SEGMENTS = 12  # of the first row
ANSWERS = ("chosen", "rejected")  # as a pair has them
_JPEG_QUALITY = 68
_BORDER_COLUMNS = [
    *("#", "sample", "part", "tokens from", "to", "length", "positions", "tiles from", "to"),
    *("trained", "weight a token", "weight", "of the row's"),
]


# -- from batches to plain values ------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A run of tokens that are shown alike.

    kind: `text`, `special` (one token), `image` (context tokens of one image), or `cut` (not shown).
    tiles: of an image: JPEG bytes, or None for those that found no room.
    """

    kind: str
    trained: bool
    num_tokens: int
    text: str = ""
    tiles: tuple[bytes | None, ...] = ()


@dataclass(frozen=True)
class SegmentView:
    """Tokens [start, stop) of the row; `pad` more follow before the next segment (pad_seq_to_mult).

    sample_id: of a tree's prefix that of its first branch.
    prefix: of a branch, the place of its prefix in the row, from 0.
    branches: of a prefix, how many follow it.
    answer: of a pair's branch, "chosen" or "rejected".
    """

    sample_id: str
    fragment: tuple[int, int]
    start: int
    stop: int
    pad: int
    tiles: tuple[int, int]
    tiles_per_image: tuple[int, ...]
    positions: tuple[int, int]
    num_trained: int
    token_weight: float
    weight: float
    pieces: tuple[Piece, ...] | None
    prefix: int | None = None
    branches: int = 0
    answer: str = ""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_sample(self) -> bool:
        return self.sample_id not in (PAD_ID, FILLER_ID)

    @property
    def filling(self) -> str:
        """What a segment is that is no sample."""
        return "padding" if self.sample_id == PAD_ID else "filler"

    @property
    def part(self) -> int:
        """Which one of `num_parts`, from 1."""
        return self.fragment[0] + 1

    @property
    def num_parts(self) -> int:
        return self.fragment[1]

    def role(self, place: int) -> str:
        """What it is of a tree, at this place in the row; "" of an ordinary sample."""
        if self.branches:
            return (
                f"prefix of {place + 2} to {place + 1 + self.branches}" if self.branches > 1 else "prefix of the next"
            )
        return "" if self.prefix is None else f"{self.answer or 'branch'} of {self.prefix + 1}"

    def colour(self, place: int) -> str:
        """The classes of its colour, by its place in the row; a tree has one colour, its branches are paler."""
        if self.prefix is not None:
            return f"c{self.prefix % 6} branch"
        return f"c{place % 6}" if self.is_sample else "pad"


@dataclass(frozen=True)
class RowView:
    """One batch: a row of one or more packs, `number` from 1; `step` and `micro_batch` are its place in the epoch.

    counts: the batch's whole numbers, as `packed_collate_fn` names them.
    boundaries: its boundaries by name, cu_seqlens and, with pads within segments, cu_seqlens_padded.
    trained_runs, image_runs: [start, stop) of the runs of trained and of image tokens.
    """

    number: int
    step: int
    micro_batch: int
    segments: tuple[SegmentView, ...]
    counts: dict[str, int]
    weight: float
    boundaries: dict[str, list[int]]
    trained_runs: tuple[tuple[int, int], ...]
    image_runs: tuple[tuple[int, int], ...]

    @property
    def anchor(self) -> str:
        return f"r{self.number - 1}"

    @property
    def samples(self) -> tuple[SegmentView, ...]:
        return tuple(segment for segment in self.segments if segment.is_sample)

    @property
    def is_detailed(self) -> bool:
        """Whether texts and pictures are shown."""
        return bool(self.segments) and self.segments[0].pieces is not None


@dataclass
class Preview:
    """What the page shows."""

    rows: list[RowView]
    budget: dict[str, int]  # tokens and tiles of a row
    ledger_lines: list[str]
    events: list[dict[str, Any]]
    epoch: int
    ended: bool
    pictures_left_out: int = 0


@dataclass
class _Room:
    """What still fits on the page."""

    tile_pixels: int
    pictures: int = field(default_factory=lambda: MAX_PICTURE_BYTES)
    segments: int = field(default_factory=lambda: MAX_SEGMENTS)
    left_out: int = 0

    def thumbnail(self, tile: np.ndarray) -> bytes | None:
        """A tile or picture (3, height, width) as a small JPEG, or None where the page is full."""
        from PIL import Image

        if self.pictures <= 0:
            self.left_out += 1
            return None
        image = Image.fromarray(np.ascontiguousarray(tile.transpose(1, 2, 0)))
        scale = min(1.0, self.tile_pixels / max(image.size))
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        out = io.BytesIO()
        image.resize(size, Image.Resampling.BOX).save(out, "JPEG", quality=_JPEG_QUALITY, optimize=True)
        self.pictures -= len(out.getvalue())
        return out.getvalue()


def collect(
    loader: Any, tokenizer: Any, *, num_rows: int, follow: Callable[[Iterable[Any]], Iterable[Any]] = iter
) -> Preview:
    """The first `num_rows` rows of the loader's epoch.

    Args:
        loader: of `build_loader`, of the dataset's rank.
        tokenizer: decodes the text.
        follow: shows progress over the batches.

    Raises:
        UserError: as the loader.
    """
    dataset, packs = loader.packed_dataset, loader.packs_per_batch
    config = dataset.config
    budget = {"tokens": config.max_packed_tokens * packs, "tiles": config.num_images_expected * packs}
    most_tiles = num_rows * budget["tiles"]
    room = _Room(tile_pixels=112 if most_tiles <= 480 else 80 if most_tiles <= 1600 else 56)
    decoder = _Decoder(tokenizer, dataset.encoder.picture_token_ids, room)
    rows: list[RowView] = []
    for batch in follow(islice(loader, num_rows)):
        rows.append(_row(batch, len(rows) + 1, decoder, max_text=MAX_TEXT // num_rows))
    return Preview(
        rows=rows,
        budget=budget,
        ledger_lines=loader.ledger.lines(),
        events=loader.take_events(),
        epoch=loader.epoch,
        ended=len(rows) < num_rows,
        pictures_left_out=room.left_out,
    )


def _row(batch: dict[str, Any], number: int, decoder: _Decoder, *, max_text: int) -> RowView:
    segments = _segments(batch, decoder, max_text)
    trained = batch["labels"][0].numpy() != IGNORE_INDEX
    return RowView(
        number=number,
        step=batch["progress"].step,
        micro_batch=batch["progress"].micro_batch,
        segments=tuple(segments),
        counts={name: value for name, value in batch.items() if isinstance(value, int)},
        weight=float(batch["loss_weight"].numpy().sum(dtype=np.float64)),
        boundaries={name: batch[name].tolist() for name in ("cu_seqlens", "cu_seqlens_padded") if name in batch},
        trained_runs=runs_of(trained),
        image_runs=runs_of(np.isin(batch["input_ids"][0].numpy(), decoder.picture_ids)),
    )


def _segments(batch: dict[str, Any], decoder: _Decoder, max_text: int) -> Iterator[SegmentView]:
    names = ("input_ids", "labels", "position_ids", "loss_weight")
    ids, labels, positions, weights = (batch[name].flatten(0, -2)[0].numpy() for name in names)
    places, lengths = row_boundaries(batch).tolist(), batch["cu_seqlens"].diff().tolist()
    tile_offsets = batch["segment_tile_offsets"].tolist()
    images = [*pairwise(batch["image_offsets"].tolist())]
    pixels = batch["pixel_values"].numpy()
    grids = dict(zip((first for first, _ in images), batch.get("image_grids", ()), strict=False))
    detailed = decoder.room.segments >= len(lengths)
    decoder.room.segments -= len(lengths)
    answers = {at: name for pair in batch.get("pairs", ()) for at, name in zip(pair.tolist(), ANSWERS, strict=True)}
    prefix_of = batch["prefix_of"].tolist() if "prefix_of" in batch else [-1] * len(lengths)
    for i, (sample_id, fragment) in enumerate(zip(batch["sample_ids"], batch["fragments"], strict=True)):
        row = slice(places[i], places[i] + lengths[i])
        tiles = tile_offsets[i], tile_offsets[i + 1]
        own = [(a, b) for a, b in images if tiles[0] <= a and b <= tiles[1]]
        trained, weight = labels[row] != IGNORE_INDEX, weights[row]
        pieces = None
        if detailed and sample_id not in (PAD_ID, FILLER_ID):
            most = max(MIN_TEXT, max_text // max(1, len(lengths)))
            shown = [_joined(pixels[a:b], grids.get(a)) for a, b in own]
            pieces = decoder.pieces(ids[row], trained, shown, max_text=most)
        yield SegmentView(
            sample_id=batch["sample_ids"][i + 1] if sample_id == PREFIX_ID else sample_id,
            fragment=tuple(fragment),
            start=row.start,
            stop=row.stop,
            pad=places[i + 1] - row.stop,
            tiles=tiles,
            tiles_per_image=tuple(b - a for a, b in own),
            positions=(int(positions[row.start]), int(positions[row.stop - 1])),
            num_trained=int(trained.sum()),
            token_weight=float(weight.max(initial=0.0)),
            weight=float(weight.sum(dtype=np.float64)),
            pieces=pieces,
            prefix=prefix_of[i] if prefix_of[i] >= 0 else None,
            branches=prefix_of.count(i),
            answer=answers.get(i, ""),
        )


def _joined(tiles: np.ndarray, grid: tuple[int, ...] | None) -> np.ndarray:
    """Tiles (t, 3, S, S) of an image; of one with a grid (rows, columns, ...) the picture that they are of, as one.

    Of pairs of a video's frames it is the first frames, one below the other.
    """
    if grid is None:
        return tiles
    columns = grid[1]
    cells = tiles.reshape(-1, columns, *tiles.shape[1:]).transpose(2, 0, 3, 1, 4)
    return cells.reshape(1, 3, -1, columns * tiles.shape[3])


def runs_of(flags: np.ndarray) -> tuple[tuple[int, int], ...]:
    """[start, stop) of every run of True in (n,) bool."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))


class _Decoder:
    """Ids of a segment to pieces."""

    def __init__(self, tokenizer: Any, picture_ids: Sequence[int], room: _Room) -> None:
        self.tokenizer, self.picture_ids, self.room = tokenizer, picture_ids, room
        self._special = np.array(sorted(tokenizer.added_tokens_decoder), dtype=np.int64)

    def pieces(
        self, ids: np.ndarray, trained: np.ndarray, images: Sequence[np.ndarray], *, max_text: int
    ) -> tuple[Piece, ...]:
        """Args: ids, trained: (n,); images: (tiles, 3, S, S) each, in the order of their blocks."""
        kinds = np.zeros(len(ids), dtype=np.int8)
        kinds[np.isin(ids, self._special)] = 1
        kinds[np.isin(ids, self.picture_ids)] = 2
        key = kinds * 2 + trained
        breaks = np.flatnonzero((key[1:] != key[:-1]) | (kinds[1:] == 1)) + 1
        edges = [0, *breaks.tolist(), len(ids)]
        out: list[Piece] = []
        waiting, used = iter(images), 0
        for start, stop in pairwise(edges):
            kind, is_trained = int(kinds[start]), bool(trained[start])
            if used >= max_text:
                out.append(Piece("cut", False, len(ids) - start))
                break
            if kind == 2:
                tiles = next(waiting, np.empty((0, 0, 0, 0), np.uint8))
                pictures = tuple(self.room.thumbnail(tile) for tile in tiles)
                out.append(Piece("image", is_trained, stop - start, tiles=pictures))
                continue
            # Some more tokens than can be shown: what a token says is seldom longer than 16 characters.
            stop_here = min(stop, start + max_text - used)
            words = self.tokenizer.decode(
                ids[start:stop_here].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            shown = words[: max_text - used] if kind == 0 else words
            out.append(Piece("special" if kind == 1 else "text", is_trained, stop - start, shown))
            used += len(shown)
            if len(shown) < len(words) or stop_here < stop:
                used = max_text
                if stop == len(ids):
                    out.append(Piece("cut", False, 0))
        return tuple(out)


# -- the page ------------------------------------------------------------------------------------------


def render(preview: Preview, *, title: str, options: Sequence[tuple[str, str]], notes: Sequence[str] = ()) -> str:
    """The page as HTML, by the template `preview.html`.

    Args:
        options: of the run, (name, value), shown at the top.
        notes: warnings, one sentence each.
    """
    return page.render(
        "preview.html",
        title,
        styles=["preview.css"],
        script="preview.js",
        options=options,
        notes=notes,
        **vars(preview),
        total=_totals(preview),
        max_events=MAX_EVENTS,
        open_segments=OPEN_SEGMENTS,
        border_columns=_BORDER_COLUMNS,
        path=_path,
    )


def _totals(p: Preview) -> dict[str, Any]:
    rows, budget = p.rows, p.budget
    real, packed_tiles = (sum(r.counts[name] for r in rows) for name in ("num_real_tokens", "num_tiles"))
    trained = sum(r.counts["num_loss_tokens"] for r in rows)
    prefixes = [s for r in rows for s in r.segments if s.branches]
    capacity = max(1, len(rows))
    return {
        "samples": sum(r.counts["num_samples"] for r in rows),
        "segments": sum(len(r.samples) for r in rows),
        "tokens": real,
        "token_fill": real / capacity / budget["tokens"],
        "tiles": packed_tiles,
        "tile_fill": packed_tiles / capacity / max(1, budget["tiles"]),
        "trained": trained,
        "trained_share": trained / max(1, real),
        "trees": len(prefixes),
        "branches": sum(s.branches for s in prefixes),
        "saved": sum((s.branches - 1) * s.num_tokens for s in prefixes),
    }


def _path(runs: Sequence[tuple[int, int]], height: int, whole: int) -> str:
    """Rectangles over the runs; gaps too small to be seen are closed, so that the path stays short."""
    joined: list[list[int]] = []
    for start, stop in runs:
        if joined and start - joined[-1][1] < whole / 4000:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return "".join(f"M{a} 10h{max(b - a, whole // 2000)}v-{height}H{a}z" for a, b in joined)
