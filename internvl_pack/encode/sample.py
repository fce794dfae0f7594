"""One raw sample to token ids, labels and planned images, without decoding a pixel.

raw record -> turns (conversation.py) -> parts (chat.py) -> ids and labels (text.py)
           -> image headers (images.py) -> grids (tiles.py) -> image blocks
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SampleError, UserError, isolate_sample_errors
from ..records import Record, Span
from .augment import recompress
from .chat import Part, PlainText, single_token, without_answers
from .conversation import COMMON_ROLES, bind_images, image_names_of, turns_of
from .fields import refuse_fields, trained_answers
from .images import (
    ImageRules,
    check_pixels,
    colour_of,
    decode_tiles,
    empty_tiles,
    image_size_of,
)
from .templates import make_template
from .text import MARKUP_TOKENS, TextEncoder
from .tiles import ONE_TILE, TileGrid, max_tiles_per_image, plan_grid
from .video import (
    PlannedFrame,
    decode_frames,
    number_of_frames,
    plan_clip,
    video_of,
    with_frame_lines,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..sources import DatasetSpec, ImageRef, RawSample, Source

IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """How samples become tokens and tiles.

    conv_style: chat template, by its name in the registry of chat.py.
    image_size: pixels along a tile's edge (force_image_size).
    tokens_per_tile: context tokens a tile takes, see tiles.tokens_per_tile.
    min_dynamic_patch, max_dynamic_patch: tiles an image is cut into, thumbnail aside; several images of a sample share
        the maximum. A data set's own max_dynamic_patch takes precedence.
    dynamic_image_size: cut images into tiles at all; False squeezes each into one.
    min_num_frame, max_num_frame: frames taken of a video, one tile each; see video.py.
    max_image_pixels: width x height above which an image is refused from its header.
    allow_truncated_images: accept damaged and cut-off image files, the missing part grey or black.
    apply_exif_orientation: turn pictures upright; False keeps them as stored, as InternVL does.
    transparent_background: colour that transparent pixels are composited on; None drops alpha, as InternVL does.
    markup_tokens: special tokens that text may contain as tokens (grounding markup).
    """

    conv_style: str = "internvl2_5"
    image_size: int = 448
    tokens_per_tile: int = 256
    min_dynamic_patch: int = 1
    max_dynamic_patch: int = 12
    use_thumbnail: bool = True
    dynamic_image_size: bool = True
    min_num_frame: int = 8
    max_num_frame: int = 32
    max_image_pixels: int = ImageRules().max_image_pixels
    allow_truncated_images: bool = False
    apply_exif_orientation: bool = True
    transparent_background: str | None = None
    markup_tokens: tuple[str, ...] = MARKUP_TOKENS

    def __post_init__(self) -> None:
        for name, value in (
            ("force_image_size", self.image_size),
            ("min_dynamic_patch", self.min_dynamic_patch),
            ("max_dynamic_patch", self.max_dynamic_patch),
            ("min_num_frame", self.min_num_frame),
            ("max_num_frame", self.max_num_frame),
            ("max_image_pixels", self.max_image_pixels),
        ):
            if value < 1:
                raise UserError(f"{name} is {value}: give at least 1")
        assert self.tokens_per_tile >= 1
        if self.min_dynamic_patch > self.max_dynamic_patch:
            raise UserError(
                f"min_dynamic_patch={self.min_dynamic_patch} exceeds max_dynamic_patch={self.max_dynamic_patch}: "
                "lower the first or raise the second"
            )

        if self.min_num_frame > self.max_num_frame:
            raise UserError(
                f"min_num_frame={self.min_num_frame} exceeds max_num_frame={self.max_num_frame}: "
                "lower the first or raise the second"
            )

    @property
    def rules(self) -> ImageRules:
        """The options that concern an image by itself."""
        background = None if self.transparent_background is None else colour_of(self.transparent_background)
        return ImageRules(self.max_image_pixels, self.allow_truncated_images, self.apply_exif_orientation, background)


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """An image that has not been decoded: where its bytes are, its upright size in pixels, its grid of tiles."""

    ref: ImageRef
    size: tuple[int, int]
    grid: TileGrid


@dataclass(frozen=True, slots=True)
class Encoded:
    """A sample ready to be packed.

    input_ids: (n,) int32.
    labels: (n,) int32, -100 where untrained, not shifted.
    images: in the order of their blocks; of a video its frames.
    data_augment: re-compress the tiles when they are decoded.
    """

    record: Record
    input_ids: np.ndarray
    labels: np.ndarray
    images: tuple[PlannedImage, ...] | tuple[PlannedFrame, ...] = ()
    data_augment: bool = False


class Encoder:
    """Encodes samples. Deterministic, without state, picklable.

    Args:
        tokenizer: the model's Hugging Face tokenizer; it is not changed.
        config: see EncodeConfig.

    Raises:
        UserError: an unknown conv_style, or a tokenizer without the tokens that it needs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: EncodeConfig | None = None) -> None:
        self.config = config = config or EncodeConfig()
        self._rules = config.rules
        self.pad_token_id = (
            tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        )
        self._template = make_template(config.conv_style, tokenizer)
        self._roles = COMMON_ROLES | getattr(self._template, "roles", frozenset())
        self._plain_text = PlainText(tokenizer)
        self._text = TextEncoder(tokenizer, config.markup_tokens)
        self.image_start_id, self.image_end_id, self.image_context_id = (
            single_token(tokenizer, token, config.conv_style) for token in ("<img>", "</img>", "<IMG_CONTEXT>")
        )

    def fingerprint(self) -> dict[str, Any]:
        """What lengths and grids depend on, by option, as JSON values: a saved run checks it."""
        options = asdict(self.config) | {"markup_tokens": list(self.config.markup_tokens)}
        return {("force_image_size" if k == "image_size" else k): v for k, v in options.items()} | {
            "tokenizer": self._text.digest
        }

    def load(self, source: Source, row: int, spec: DatasetSpec) -> Encoded:
        """Read and encode one row of a sources.Source, that of the sources.DatasetSpec `spec`.

        Raises:
            SampleError: whatever goes wrong with it (see `isolate_sample_errors`).
        """
        with isolate_sample_errors(source=partial(source.origin, row)):
            raw = source.read(row)
        return self.encode(raw, spec)

    def encode(self, raw: RawSample, spec: DatasetSpec) -> Encoded:
        """Token ids, labels and image grids of a sample, from its text and its images' headers.

        Args:
            raw: a sources.RawSample.
            spec: the sources.DatasetSpec it comes from (max_dynamic_patch, data_augment).

        Raises:
            SampleError: it cannot be encoded; its source is `raw.origin`.
        """
        with isolate_sample_errors(source=lambda: raw.origin):
            return self._encode(raw, spec)

    def _encode(self, raw: RawSample, spec: DatasetSpec) -> Encoded:
        refuse_fields(raw.data)
        turns = turns_of(raw.data, self._roles)
        flags = trained_answers(raw.data, turns)
        names = image_names_of(raw.data)
        video = video_of(raw.data)
        frames: tuple[PlannedFrame, ...] = ()
        if video is not None:
            frames = self._plan_frames(raw, *video)
            turns = with_frame_lines(turns, len(frames))
        template = self._plain_text if turns[0][0] == "pretrain" else self._template
        parts = template.layout(bind_images(turns, len(frames) or len(names)))
        if flags is not None:
            parts = without_answers(parts, flags)
        if not any(part.trained for part in parts):
            raise SampleError("no_trained_token", "no answer with text in it, so there is nothing to train on")
        images = frames or self._plan_images(raw, names, spec.max_dynamic_patch or self.config.max_dynamic_patch)
        texts = [part.value for part in parts if part.kind == "text" and isinstance(part.value, str)]
        ids, counts = self._text.encode(texts)
        return self._assemble(raw.sample_id, parts, ids, counts, images, bool(spec.data_augment))

    def _plan_images(self, raw: RawSample, names: list[str], max_dynamic_patch: int) -> tuple[PlannedImage, ...]:
        config = self.config
        max_tiles = max_tiles_per_image(max_dynamic_patch, len(names))
        images = []
        for name in names:
            ref = raw.resolve(name)
            size = image_size_of(ref, self._rules)
            grid = ONE_TILE
            if config.dynamic_image_size:
                grid = plan_grid(
                    *size,
                    min_tiles=config.min_dynamic_patch,
                    max_tiles=max_tiles,
                    image_size=config.image_size,
                    use_thumbnail=config.use_thumbnail,
                )
            images.append(PlannedImage(ref, size, grid))
        return tuple(images)

    def _plan_frames(self, raw: RawSample, name: str, clip: tuple[float, float] | None) -> tuple[PlannedFrame, ...]:
        ref = raw.resolve(name)
        part = plan_clip(ref, clip, self._rules.max_image_pixels)
        count = number_of_frames(part, raw.sample_id, self.config.min_num_frame, self.config.max_num_frame)
        return tuple(PlannedFrame(ref, part, number, count) for number in range(count))

    def _assemble(
        self,
        sample_id: str,
        parts: list[Part],
        text_ids: np.ndarray,
        counts: list[int],
        images: tuple[PlannedImage, ...] | tuple[PlannedFrame, ...],
        data_augment: bool,
    ) -> Encoded:
        """Lay the parts out in one row, and note where it may be cut."""
        runs: list[np.ndarray] = []
        trained: list[tuple[int, int]] = []
        spans: list[Span] = []
        length = span_start = text_start = num_system_tokens = 0
        next_text = iter(counts)
        next_grid = iter([image.grid for image in images])
        following = iter([*[part.value for part in parts if part.kind == "end"][1:], None])
        for kind, value, is_trained in parts:
            if kind == "end":
                # A cut before an answer would part it from its question: no border for the splitter.
                if next(following) != "gpt" and length > span_start:
                    spans.append(Span(length - span_start, ends_turn=True))
                    span_start = length
                if value == "system" and not num_system_tokens:
                    num_system_tokens = length
                continue
            if kind == "image":
                if length > span_start:
                    spans.append(Span(length - span_start))
                grid = next(next_grid)
                block = np.full(grid.num_tiles * self.config.tokens_per_tile + 2, self.image_context_id, dtype=np.int32)
                block[0], block[-1] = self.image_start_id, self.image_end_id
                spans.append(Span(len(block), grid.num_tiles))
                span_start = length + len(block)
            elif kind == "text":
                text_stop = text_start + next(next_text)
                block = text_ids[text_start:text_stop]
                text_start = text_stop
            else:
                assert isinstance(value, np.ndarray)
                block = value
            if is_trained:
                trained.append((length, length + len(block)))
            runs.append(block)
            length += len(block)
        if length > span_start:
            spans.append(Span(length - span_start))
        input_ids = np.concatenate(runs)
        labels = np.full(length, IGNORE, dtype=np.int32)
        for start, stop in trained:
            labels[start:stop] = input_ids[start:stop]
        record = Record(
            sample_id=sample_id,
            num_tokens=length,
            num_tiles=sum(image.grid.num_tiles for image in images),
            num_loss_tokens=sum(stop - start for start, stop in trained),
            spans=tuple(spans),
            num_system_tokens=num_system_tokens,
        )
        return Encoded(record, input_ids, labels, images, data_augment)

    def decode(
        self,
        encoded: Encoded,
        tile_start: int = 0,
        tile_stop: int | None = None,
        *,
        epoch: int = 0,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Tiles [tile_start, tile_stop) of a sample, (tiles, 3, image_size, image_size) uint8 RGB.

        Both ends must lie at borders of images. `epoch` matters to the data_augment option only. They are written into
        `out`, an array of that shape, where one is given; see images.tiles_over for the order of memory.

        Raises:
            SampleError: an image cannot be decoded.
        """
        size = self.config.image_size
        if tile_stop is None:
            tile_stop = encoded.record.num_tiles
        tiles = empty_tiles(tile_stop - tile_start, size) if out is None else out
        assert tiles.shape == (tile_stop - tile_start, 3, size, size) and tiles.dtype == np.uint8
        sample_id = encoded.record.sample_id
        frames: list[PlannedFrame] = []
        first = 0
        for image in encoded.images:
            last = first + image.grid.num_tiles
            if tile_start <= first and last <= tile_stop:
                if isinstance(image, PlannedFrame):
                    frames.append(image)
                else:
                    part = tiles[first - tile_start : last - tile_start]
                    with isolate_sample_errors(image.ref.name):
                        decode_tiles(image.ref, image.grid, size, self._rules, size=image.size, out=part)
            else:
                assert last <= tile_start or tile_stop <= first, "a fragment that cuts an image"
            first = last
        if frames:  # of one video, a tile each
            with isolate_sample_errors(frames[0].ref.name):
                decode_frames(frames, sample_id, epoch, tiles, self._rules.max_image_pixels)
        if encoded.data_augment:
            with isolate_sample_errors(f"data_augment of {sample_id}"):
                recompress(tiles, sample_id, epoch, tile_start)
        return tiles

    def check_pixels(self, encoded: Encoded) -> None:
        """Decode all images of a sample as `decode` does, without keeping a tile; of a video, the frames of epoch 0.

        Raises:
            SampleError: as `decode`.
        """
        for image in encoded.images:
            with isolate_sample_errors(image.ref.name):
                if isinstance(image, PlannedFrame):  # the first of all frames of one video
                    sample_id = encoded.record.sample_id
                    frames = [frame for frame in encoded.images if isinstance(frame, PlannedFrame)]
                    decode_frames(frames, sample_id, 0, None, self._rules.max_image_pixels)
                    return
                check_pixels(image.ref, image.grid, self.config.image_size, self._rules, size=image.size)
