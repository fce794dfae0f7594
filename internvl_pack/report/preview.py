"""Packs as people can read them: one page of the rows that a loader gives.

    PackLoader -> batch -> `RowView` (segments, decoded text, thumbnails) -> HTML

Everything on the page is read from the batch itself, so that it shows what training gets. The page's size is bounded,
whatever the data: pictures, text and segments beyond a limit are left out, and it says so where they are missing.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np

from ..batch.collate import FILLER_ID, PAD_ID, row_boundaries
from ..batch.loss_weights import IGNORE_INDEX
from . import page

MAX_PICTURE_BYTES = 6_000_000
MAX_TEXT = 3_000_000
"""Characters of text on a page; each row has an equal share of them, and each of its segments of the row's."""
MIN_TEXT = 300
MAX_SEGMENTS = 4000
"""Segments whose text is shown; later rows are shown by their bars and figures."""
MAX_EVENTS = 200
OPEN_SEGMENTS = 12  # of the first row
_JPEG_QUALITY = 68
_BORDER_COLUMNS = [
    *("#", "sample", "part", "tokens from", "to", "length", "positions", "tiles from", "to"),
    *("trained", "weight a token", "weight", "of the row's"),
]


# -- from batches to plain values ------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A run of tokens that is shown in one way.

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
    """Tokens [start, stop) of the row; `pad` more follow before the next segment (pad_seq_to_mult)."""

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

    def colour(self, place: int) -> str:
        """The class of its colour, by its place in the row."""
        return f"c{place % 6}" if self.is_sample else "pad"


@dataclass(frozen=True)
class RowView:
    """One batch: a row of one or more packs, `number` from 1; `step` and `micro_batch` are its place in the epoch."""

    number: int
    step: int
    micro_batch: int
    segments: tuple[SegmentView, ...]
    num_tokens: int
    num_real_tokens: int
    num_tiles: int
    num_samples: int
    num_loss_tokens: int
    max_seqlen: int
    sum_squared_lengths: int
    weight: float
    cu_seqlens: tuple[int, ...]
    cu_seqlens_padded: tuple[int, ...] | None
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
    budget: tuple[int, int]
    ledger_lines: list[str]
    events: list[dict[str, Any]]
    epoch: int
    ended: bool
    tile_pixels: int
    pictures_left_out: int = 0


@dataclass
class _Room:
    """What still fits on the page."""

    tile_pixels: int
    pictures: int = field(default_factory=lambda: MAX_PICTURE_BYTES)
    segments: int = field(default_factory=lambda: MAX_SEGMENTS)
    left_out: int = field(default=0)

    def thumbnail(self, tile: np.ndarray) -> bytes | None:
        """A tile (3, S, S) as a small JPEG, or None where the page is full."""
        from PIL import Image

        if self.pictures <= 0:
            self.left_out += 1
            return None
        image = Image.fromarray(np.ascontiguousarray(tile.transpose(1, 2, 0)))
        side = min(self.tile_pixels, image.width)
        out = io.BytesIO()
        image.resize((side, side), Image.Resampling.BOX).save(out, "JPEG", quality=_JPEG_QUALITY, optimize=True)
        self.pictures -= len(out.getvalue())
        return out.getvalue()


def collect(loader: Any, tokenizer: Any, *, num_rows: int) -> Preview:
    """The first `num_rows` rows of the loader's epoch.

    Args:
        loader: of `build_loader`, of the dataset's rank.
        tokenizer: decodes the text.

    Raises:
        UserError: as the loader.
    """
    dataset = loader.packed_dataset
    most_tiles = num_rows * loader.budget[1] * loader.packs_per_batch
    room = _Room(tile_pixels=112 if most_tiles <= 480 else 80 if most_tiles <= 1600 else 56)
    decoder = _Decoder(tokenizer, dataset.encoder.image_context_id, room)
    rows: list[RowView] = []
    for batch in islice(loader, num_rows):
        rows.append(_row(batch, len(rows), decoder, max_text=MAX_TEXT // num_rows))
    return Preview(
        rows=rows,
        budget=_row_budget(loader),
        ledger_lines=loader.ledger.lines(),
        events=loader.take_events(),
        epoch=loader.epoch,
        ended=len(rows) < num_rows,
        tile_pixels=room.tile_pixels,
        pictures_left_out=room.left_out,
    )


def _row_budget(loader: Any) -> tuple[int, int]:
    tokens, tiles = loader.budget
    packs = loader.packs_per_batch
    return tokens * packs, tiles * packs


def _row(batch: dict[str, Any], number: int, decoder: _Decoder, *, max_text: int) -> RowView:
    ids, labels, positions, weights = (
        batch[key][0].numpy() for key in ("input_ids", "labels", "position_ids", "loss_weight")
    )
    places = row_boundaries(batch).tolist()
    lengths = batch["cu_seqlens"].diff().tolist()
    tile_offsets = batch["segment_tile_offsets"].tolist()
    image_offsets = batch["image_offsets"].tolist()
    detailed = decoder.room.segments >= len(lengths)
    decoder.room.segments -= len(lengths)
    pixels = batch["pixel_values"].numpy()
    segments, image = [], 0
    for i, (sample_id, fragment) in enumerate(zip(batch["sample_ids"], batch["fragments"], strict=True)):
        start, stop = places[i], places[i] + lengths[i]
        first, last = tile_offsets[i], tile_offsets[i + 1]
        images = []
        while image < len(image_offsets) - 1 and image_offsets[image + 1] <= last:
            images.append((image_offsets[image], image_offsets[image + 1]))
            image += 1
        weight = weights[start:stop]
        pieces = None
        if detailed and sample_id not in (PAD_ID, FILLER_ID):
            pieces = decoder.pieces(
                ids[start:stop],
                labels[start:stop] != IGNORE_INDEX,
                [pixels[a:b] for a, b in images],
                max_text=max(MIN_TEXT, max_text // max(1, len(lengths))),
            )
        segments.append(
            SegmentView(
                sample_id=sample_id,
                fragment=tuple(fragment),
                start=start,
                stop=stop,
                pad=places[i + 1] - stop,
                tiles=(first, last),
                tiles_per_image=tuple(b - a for a, b in images),
                positions=(int(positions[start]), int(positions[stop - 1])),
                num_trained=int((labels[start:stop] != IGNORE_INDEX).sum()),
                token_weight=float(weight.max(initial=0.0)),
                weight=float(weight.sum(dtype=np.float64)),
                pieces=pieces,
            )
        )
    padded = batch.get("cu_seqlens_padded")
    return RowView(
        number=number + 1,
        step=batch["progress"].step,
        micro_batch=batch["progress"].micro_batch,
        segments=tuple(segments),
        num_tokens=batch["num_tokens"],
        num_real_tokens=batch["num_real_tokens"],
        num_tiles=batch["num_tiles"],
        num_samples=batch["num_samples"],
        num_loss_tokens=batch["num_loss_tokens"],
        max_seqlen=batch["max_seqlen"],
        sum_squared_lengths=batch["sum_squared_lengths"],
        weight=float(weights.sum(dtype=np.float64)),
        cu_seqlens=tuple(batch["cu_seqlens"].tolist()),
        cu_seqlens_padded=None if padded is None else tuple(padded.tolist()),
        trained_runs=runs_of(labels != IGNORE_INDEX),
        image_runs=runs_of(ids == decoder.context_id),
    )


def runs_of(flags: np.ndarray) -> tuple[tuple[int, int], ...]:
    """[start, stop) of every run of True in (n,) bool."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))


class _Decoder:
    """Ids of a segment to pieces."""

    def __init__(self, tokenizer: Any, context_id: int, room: _Room) -> None:
        self.tokenizer, self.context_id, self.room = tokenizer, context_id, room
        self._special = np.array(sorted(tokenizer.added_tokens_decoder), dtype=np.int64)

    def pieces(
        self, ids: np.ndarray, trained: np.ndarray, images: Sequence[np.ndarray], *, max_text: int
    ) -> tuple[Piece, ...]:
        """Args: ids, trained: (n,); images: (tiles, 3, S, S) each, in the order of their blocks."""
        kinds = np.zeros(len(ids), dtype=np.int8)
        kinds[np.isin(ids, self._special)] = 1
        kinds[ids == self.context_id] = 2
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
        rows=preview.rows,
        budget={"tokens": preview.budget[0], "tiles": preview.budget[1]},
        total=_totals(preview),
        epoch=preview.epoch,
        ended=preview.ended,
        pictures_left_out=preview.pictures_left_out,
        ledger_lines=preview.ledger_lines,
        events=preview.events,
        max_events=MAX_EVENTS,
        open_segments=OPEN_SEGMENTS,
        border_columns=_BORDER_COLUMNS,
        path=_path,
    )


def _totals(p: Preview) -> dict[str, Any]:
    rows, (tokens, tiles) = p.rows, p.budget
    real, packed_tiles = sum(r.num_real_tokens for r in rows), sum(r.num_tiles for r in rows)
    trained = sum(r.num_loss_tokens for r in rows)
    capacity = max(1, len(rows))
    return {
        "samples": sum(r.num_samples for r in rows),
        "segments": sum(len(r.samples) for r in rows),
        "tokens": real,
        "token_fill": real / capacity / tokens,
        "tiles": packed_tiles,
        "tile_fill": packed_tiles / capacity / max(1, tiles),
        "trained": trained,
        "trained_share": trained / max(1, real),
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
