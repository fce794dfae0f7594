"""Packs as people can read them: one page of the rows that a loader gives.

    PackLoader -> batch -> `RowView` (segments, decoded text, thumbnails) -> HTML

Everything on the page is read from the batch itself, so that it shows what training gets. The page's size is bounded,
whatever the data: pictures, text and segments beyond a limit are left out, and it says so where they are missing.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np

from ..collate import FILLER_ID, PAD_ID, row_boundaries
from ..loss import IGNORE_INDEX
from .page import asset, document, figures, marked, table, text

MAX_PICTURE_BYTES = 6_000_000
MAX_TEXT = 3_000_000
"""Characters of text on a page; each row has an equal share of them, and each of its segments of the row's."""
MIN_TEXT = 300
MAX_SEGMENTS = 4000
"""Segments whose text is shown; later rows are shown by their bars and figures."""
MAX_EVENTS = 200
MAX_NAME = 100
OPEN_SEGMENTS = 12  # of the first row
_JPEG_QUALITY = 68


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


@dataclass(frozen=True)
class RowView:
    """One batch: a row of one or more packs. `packs` are their places in the global sequence."""

    packs: tuple[int, ...]
    lanes: tuple[int, ...]
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
    most_tiles = num_rows * loader.budget[1] * loader._feed.packs_per_batch
    room = _Room(tile_pixels=112 if most_tiles <= 480 else 80 if most_tiles <= 1600 else 56)
    decoder = _Decoder(tokenizer, dataset.encoder.image_context_id, room)
    rows: list[RowView] = []
    for number, batch in enumerate(islice(loader, num_rows)):
        rows.append(_row(batch, number, loader, decoder, max_text=MAX_TEXT // num_rows))
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
    packs = loader._feed.packs_per_batch
    return tokens * packs, tiles * packs


def _row(batch: dict[str, Any], number: int, loader: Any, decoder: _Decoder, *, max_text: int) -> RowView:
    dataset, per_row = loader.packed_dataset, loader._feed.packs_per_batch
    packs = tuple((number * per_row + i) * dataset.world_size + dataset.rank for i in range(per_row))
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
        packs=packs,
        lanes=tuple(pack % dataset.num_lanes for pack in packs),
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
    """The page as HTML.

    Args:
        options: of the run, (name, value), told at the top.
        notes: warnings, one sentence each.
    """
    told = " ".join(f"<code>{text(name)} {text(value)}</code>" for name, value in options)
    body = [
        f"<h1>{text(title)}</h1>",
        f'<details class="options"><summary>Options of the run</summary><p class="soft">{told}</p></details>',
        *(f'<p class="warn">{text(note)}</p>' for note in notes),
        _summary(preview),
        _legend(),
        _contents(preview),
    ]
    if not preview.rows:
        body.append('<section class="card"><p>The epoch holds no row: see the ledger.</p></section>')
    body += [_row_html(row, number, preview) for number, row in enumerate(preview.rows)]
    body.append(_ledger(preview))
    script = asset("preview.js")
    return document(title, "\n".join(body), styles=["preview.css"], script=script)


def _summary(p: Preview) -> str:
    rows, (tokens, tiles) = p.rows, p.budget
    real, packed_tiles = sum(r.num_real_tokens for r in rows), sum(r.num_tiles for r in rows)
    samples, segments = sum(r.num_samples for r in rows), sum(s.is_sample for r in rows for s in r.segments)
    trained = sum(r.num_loss_tokens for r in rows)
    capacity = max(1, len(rows))
    kinds = "all of the epoch" if p.ended else f"the first of epoch {p.epoch}"
    pairs = [
        ("rows", f"{len(rows):,}", kinds),
        ("samples", f"{samples:,}", f"in {segments:,} segments"),
        ("tokens filled", f"{real / capacity / tokens:.1%}", f"{real:,} of {len(rows)} x {tokens:,}"),
        (
            "tiles filled",
            f"{packed_tiles / capacity / max(1, tiles):.1%}",
            f"{packed_tiles:,} of {len(rows)} x {tiles:,}",
        ),
        ("trained tokens", f"{trained:,}", f"{trained / max(1, real):.1%} of all"),
    ]
    out = figures(pairs)
    if p.pictures_left_out:
        out += f'<p class="soft">{p.pictures_left_out:,} tiles are not pictured, so that the page stays small.</p>'
    return f'<section class="card">{out}</section>'


def _legend() -> str:
    return """<section class="card" aria-label="Legend"><ul class="legend">
<li><span class="swatch s-seg"></span>segments of the row, each a sample or a part of one</li>
<li><span class="swatch s-strip"></span>strip below: full height is trained, half height are image tokens</li>
<li><span class="swatch free"></span>free room of the budget</li>
<li><span class="swatch s-pad"></span>padding</li>
<li><span class="text" style="padding:0 6px;margin:0"><span class="t">trained, underlined</span></span>
 the model learns to write this</li>
<li><span class="text" style="padding:0 6px;margin:0">not trained</span> the model only reads this</li>
<li><span class="sp">&lt;|token|&gt;</span>special token</li>
<li><span class="ctl">U+200B</span>character that cannot be seen</li>
</ul></section>"""


def _contents(p: Preview) -> str:
    links = "".join(f'<a href="#r{n}">{n + 1}</a>' for n in range(len(p.rows)))
    return (
        f'<div class="top"><nav class="rows" aria-label="Rows">{links}<a href="#ledger">ledger</a></nav>'
        '<button class="js-only" data-open="1">open all texts</button>'
        '<button class="js-only" data-open="0">close all</button></div>'
    )


def _row_html(row: RowView, number: int, p: Preview) -> str:
    tokens, tiles = p.budget
    packs = ", ".join(f"{pack:,}" for pack in row.packs)
    lanes = ", ".join(str(lane) for lane in dict.fromkeys(row.lanes))
    samples = [s for s in row.segments if s.is_sample]
    pads = row.num_tokens - row.num_real_tokens if samples else 0
    pairs = [
        ("tokens", f"{row.num_real_tokens:,}", f"of {tokens:,}, {row.num_real_tokens / tokens:.1%}"),
        ("tiles", f"{row.num_tiles:,}", f"of {tiles:,}, {row.num_tiles / max(1, tiles):.1%}"),
        ("segments", f"{len(samples):,}", f"of {row.num_samples:,} samples that begin here"),
        ("trained tokens", f"{row.num_loss_tokens:,}", f"{row.num_loss_tokens / max(1, row.num_real_tokens):.1%}"),
        ("sum of loss weights", f"{row.weight:,.4g}", ""),
        ("padding", f"{pads:,}", "tokens"),
        ("longest segment", f"{row.max_seqlen:,}", "tokens (max_seqlen)"),
        ("squared lengths", f"{row.sum_squared_lengths:,}", "what attention costs"),
    ]
    plural = "s" if len(row.packs) > 1 else ""
    out = [
        f'<article class="card row" id="r{number}">',
        f"<h2>Row {number + 1} <small>global pack{plural} {packs}, lane{'s' * (',' in lanes)} {lanes}</small></h2>",
        figures(pairs),
        _bar(row, number, tokens),
        _borders(row, number),
    ]
    if not samples:
        out.append("<p>No sample: a filler row of weight zero, while other ranks still have data.</p>")
    elif row.segments[0].pieces is None:
        out.append('<p class="soft">Texts are left out, so that the page stays small: show fewer packs.</p>')
    else:
        out += [_segment(s, number, i, i < OPEN_SEGMENTS and not number) for i, s in enumerate(row.segments)]
    out.append("</article>")
    return "\n".join(out)


def _colour(segment: SegmentView, place: int) -> str:
    return f"c{place % 6}" if segment.is_sample else "pad"


def _bar(row: RowView, number: int, budget: int) -> str:
    whole = max(row.num_tokens, budget)
    cells = []
    detailed = bool(row.segments) and row.segments[0].pieces is not None
    for i, s in enumerate(row.segments):
        width = (s.num_tokens + s.pad) / whole * 100
        pad = f'<i class="in-pad" style="width:{s.pad / (s.num_tokens + s.pad):.2%}"></i>' if s.pad else ""
        target = f"r{number}s{i}" if detailed else f"r{number}"
        label = (str(i + 1) if s.is_sample else "pad") if width > 2.2 else ""
        narrow = " narrow" if width < 9 else ""
        place = f"left:{s.start / whole:.4%};width:{width:.4f}%"
        cells.append(
            f'<a class="seg {_colour(s, i)}{narrow}" style="{place}" href="#{target}" '
            f'data-tip="tip{number}" title="{text(_tip(s, i))}">{label}{pad}</a>'
        )
    free = whole - row.num_tokens
    told = f"{free:,} tokens free" if free else ""
    return (
        f'<div class="bar" role="group" aria-label="segments of row {number + 1}">{"".join(cells)}</div>'
        f'<svg class="strip" viewBox="0 0 {whole} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="trained and image tokens of row {number + 1}">'
        f'<path class="i" d="{_path(row.image_runs, 5, whole)}"/>'
        f'<path class="t" d="{_path(row.trained_runs, 10, whole)}"/>'
        f'</svg><div class="scale"><span>0</span><span>{told}</span><span>{whole:,}</span></div>'
        f'<p class="tip" id="tip{number}" aria-live="polite">Point at a segment, or tap it, for its details; it leads '
        "to its text below.</p>"
    )


def _path(runs: Sequence[tuple[int, int]], height: int, whole: int) -> str:
    """Rectangles over the runs; gaps too small to be seen are closed, so that the path stays short."""
    joined: list[list[int]] = []
    for start, stop in runs:
        if joined and start - joined[-1][1] < whole / 4000:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return "".join(f"M{a} 10h{max(b - a, whole // 2000)}v-{height}H{a}z" for a, b in joined)


def _tip(s: SegmentView, place: int) -> str:
    if not s.is_sample:
        return f"{'padding' if s.sample_id == PAD_ID else 'filler'}: {s.num_tokens:,} tokens, not trained"
    part = f", part {s.fragment[0] + 1} of {s.fragment[1]}" if s.fragment[1] > 1 else ""
    pad = f" and {s.pad:,} of padding" if s.pad else ""
    return (
        f"{place + 1}: {_cut(s.sample_id)}{part}: tokens {s.start:,} to {s.stop:,} ({s.num_tokens:,}{pad}), "
        f"{s.num_trained:,} trained, {_images(s)}, weight {s.weight:.4g}"
    )


def _cut(name: str) -> str:
    """A long name without its middle: what tells samples apart stands at its end."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME // 2]}…{name[-MAX_NAME // 2 :]}"


def _images(s: SegmentView) -> str:
    tiles, images = sum(s.tiles_per_image), len(s.tiles_per_image)
    if not images:
        return "text only"
    return f"{tiles:,} tile{'s' * (tiles != 1)} of {images:,} image{'s' * (images != 1)}"


def _borders(row: RowView, number: int) -> str:
    header = ["#", "sample", "part", "tokens from", "to", "length", "positions", "tiles from", "to"]
    header += ["trained", "weight a token", "weight", "of the row's"]
    rows = []
    for i, s in enumerate(row.segments):
        rows.append(
            [
                f"{i + 1}",
                (f'<td class="left id">{text(_cut(s.sample_id))}</td>',),
                f"{s.fragment[0] + 1} of {s.fragment[1]}" if s.fragment[1] > 1 else "",
                f"{s.start:,}",
                f"{s.stop:,}",
                f"{s.num_tokens:,}" + (f" + {s.pad}" if s.pad else ""),
                f"{s.positions[0]} … {s.positions[1]:,}",
                *((f"{s.tiles[0]:,}", f"{s.tiles[1]:,}") if s.tiles[1] > s.tiles[0] else ("", "")),
                f"{s.num_trained:,}",
                f"{s.token_weight:.4g}",
                f"{s.weight:.4g}",
                f"{s.weight / row.weight:.1%}" if row.weight else "",
            ]
        )
    lists = [("cu_seqlens", row.cu_seqlens)]
    if row.cu_seqlens_padded is not None:
        lists.append(("cu_seqlens_padded", row.cu_seqlens_padded))
    code = "".join(
        f'<p><code class="bounds">{name} = [{", ".join(map(str, values))}]</code></p>' for name, values in lists
    )
    if row.segments[0].pieces is None and row.num_samples:  # left out with the texts
        return f'<details class="more"><summary>Boundaries</summary>{code}</details>'
    return (
        '<details class="more"><summary>Boundaries, positions and loss weights</summary>'
        f"{code}{table(header, rows, label=f'segments of row {number + 1}', left=[1])}</details>"
    )


def _segment(s: SegmentView, row: int, place: int, is_open: bool) -> str:
    if not s.is_sample:
        name = "padding" if s.sample_id == PAD_ID else "filler"
        return (
            f'<details class="segment" id="r{row}s{place}"><summary><span class="number pad">{place + 1}</span>'
            f'<span class="name">{name}</span><span class="facts">{s.num_tokens:,} tokens, isolated, not trained'
            "</span></summary></details>"
        )
    part = ""
    if s.fragment[1] > 1:
        part = f'<span class="part">part {s.fragment[0] + 1} of {s.fragment[1]} of a split sample</span>'
    pad = f" + {s.pad:,} padding" if s.pad else ""
    facts = (
        f"{s.num_tokens:,} tokens{pad} · {s.num_trained:,} trained · {_images(s)} · positions {s.positions[0]} to "
        f"{s.positions[1]:,} · weight {s.weight:.4g}"
    )
    return (
        f'<details class="segment" id="r{row}s{place}"{" open" if is_open else ""}><summary>'
        f'<span class="number {_colour(s, place)}">{place + 1}</span><bdi class="name">{text(_cut(s.sample_id))}</bdi>'
        f'{part}<span class="facts">{facts}</span></summary>'
        f'<div class="text" dir="auto">{"".join(_piece(piece) for piece in s.pieces or ())}</div></details>'
    )


def _piece(piece: Piece) -> str:
    if piece.kind == "cut":
        more = f"{piece.num_tokens:,} more tokens are" if piece.num_tokens else "the rest of the text is"
        return f'<span class="cut">… {more} not shown, so that the page stays small</span>'
    if piece.kind == "image":
        return _image(piece)
    kind = "t" if piece.trained else "u"
    if piece.kind == "special":
        return f'<span class="{kind} sp">{marked(piece.text)}</span>'
    return f'<span class="{kind}">{marked(piece.text)}</span>'


def _image(piece: Piece) -> str:
    count = len(piece.tiles)
    pictures = []
    for i, tile in enumerate(piece.tiles):
        if tile is not None:
            data = base64.b64encode(tile).decode()
            pictures.append(f'<img alt="tile {i + 1} of {count}" src="data:image/jpeg;base64,{data}">')
    missing = count - len(pictures)
    if missing:
        pictures.append(f'<span class="none">{missing:,} tile{"s" * (missing != 1)} not pictured</span>')
    tiles = f"{count:,} tile{'s' * (count != 1)}"
    return (
        f'<span class="image"><span class="cap">{piece.num_tokens:,} image tokens of {tiles}</span>'
        f'<span class="tiles">{"".join(pictures)}</span></span>'
    )


def _ledger(p: Preview) -> str:
    lines = "\n".join(text(line) for line in p.ledger_lines)
    out = [
        '<section class="card" id="ledger"><h2 style="margin-top:0">Ledger</h2>',
        '<p class="soft">What became of every sample that was read for these rows. Those that still wait are in the '
        "packer's look-ahead.</p>",
        f'<pre class="scroll" tabindex="0" role="region" aria-label="ledger">{lines}</pre>',
    ]
    if p.events:
        rows = [
            [
                (f'<td class="wrap left">{text(_cut(str(e["id"])))}</td>',),
                (f'<td class="left">{text(e["reason"])}</td>',),
                (f'<td class="wrap">{text("{source}: {detail}".format(**e)[:1000])}</td>',),
            ]
            for e in p.events[:MAX_EVENTS]
        ]
        out.append(f"<h2>Samples that left: {len(p.events):,}</h2>")
        out.append(table(["sample", "reason", "detail"], rows, label="samples that left", left=[1, 2]))
        if len(p.events) > MAX_EVENTS:
            out.append(f'<p class="soft">{len(p.events) - MAX_EVENTS:,} more are not shown.</p>')
    out.append("</section>")
    return "\n".join(out)
