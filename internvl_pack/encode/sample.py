"""One raw sample to token ids, labels and planned images, without decoding a pixel.

raw record -> turns (conversation.py) -> parts (chat.py) -> outline -> ids and labels (text.py)
                                                                 -> image headers (images.py) -> grids (tiles.py)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SampleError, isolate_sample_errors
from ..options import count
from ..records import Branch, Fragment, Record, Span
from .augment import recompress
from .chat import PlainText, without_answers
from .config import EncodeConfig
from .conversation import COMMON_ROLES, PLACEHOLDER, bind_images, image_names_of, turns_of
from .families import make_family
from .fields import refuse_fields, tools_of, trained_answers
from .formats import make_template
from .images import decode_pixels, decode_tiles, empty_tiles, image_size_of
from .outline import Outline, spans_of
from .text import TextEncoder
from .tiles import TileGrid
from .tokenizer_template import TokenizerTemplate
from .trees import Answer, answers_of, with_those_that_leave
from .video import (
    PlannedFrame,
    PlannedVideo,
    decode_video,
    frame_lines,
    number_of_frames,
    plan_clip,
    upright_size,
    video_of,
    with_video,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..sources import DatasetSpec, ImageRef, RawSample, Source

IGNORE = -100


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
    images: in the order of their blocks; of a video its frames, or the video.
    data_augment: re-compress the tiles when they are decoded.
    first_tile: the first tile's place in the sample; not 0 in parts of one.
    """

    record: Record
    input_ids: np.ndarray
    labels: np.ndarray
    images: tuple[PlannedImage, ...] | tuple[PlannedFrame, ...] | tuple[PlannedVideo, ...] = ()
    data_augment: bool = False
    first_tile: int = 0

    @property
    def has_video(self) -> bool:
        """Whether its pictures are all of one video."""
        return any(not isinstance(image, PlannedImage) for image in self.images)

    @property
    def has_pairs(self) -> bool:
        """Whether its tiles are of two frames each."""
        return any(isinstance(image, PlannedVideo) for image in self.images)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Of a tree, what its last tokens are; empty for an ordinary sample."""
        return self.record.branches


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
        self.family = make_family(config, tokenizer)

    @property
    def image_context_id(self) -> int:
        """Of the tokens that image features replace."""
        return self.family.image_token_id

    @property
    def picture_token_ids(self) -> tuple[int, ...]:
        """Of all tokens that features replace: those of images, and of videos where these are others."""
        return self.family.picture_token_ids

    @property
    def grid_positions(self) -> bool:
        """Whether positions are made from the grids of images, see `packed_collate_fn`."""
        return self.family.grid_positions

    def fingerprint(self) -> dict[str, Any]:
        """What lengths and grids depend on, by option, as JSON values: a saved run checks it."""
        options = asdict(self.config) | {"markup_tokens": list(self.config.markup_tokens)}
        options = {name: value for name, value in options.items() if name not in self.family.unused_options}
        if self.config.objective == "sft":
            del options["objective"]  # as before there were others
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
            try:
                return self._encode(raw, spec)
            except SampleError as error:
                if not raw.joined:
                    raise
                raise with_those_that_leave(error, [row.sample_id for row in raw.joined[1:]]) from error

    def _encode(self, raw: RawSample, spec: DatasetSpec) -> Encoded:
        outline = self.outline(raw, spec)
        return self._assemble_tree(outline) if outline.answers else self._assemble(outline, 0, len(outline.spans))

    def encode_part(self, outline: Outline, fragment: Fragment) -> Encoded:
        """A part of a sample that was cut, from the spans that it lies in; what comes twice is not trained again.

        Its record counts the part's tokens and tiles, and the supervised tokens of the whole sample.

        Raises:
            SampleError: what a sample's encoding raises, and `changed_since_survey` where the spans are not those that
                were measured.
        """
        if outline.answers:
            return self._part_of_tree(self._assemble_tree(outline), fragment)
        part = self._assemble(outline, fragment.span_start, fragment.span_stop)
        found = (part.record.num_tokens, part.record.num_tiles)
        begin = fragment.span_offset - fragment.num_context_tokens
        ids = part.input_ids[begin : fragment.span_offset + fragment.token_stop - fragment.token_start]
        labels = part.labels[begin : begin + len(ids)].copy()
        labels[: fragment.num_context_tokens] = IGNORE
        if fragment.num_prefix_tokens:
            prefix = self._assemble(outline, 0, outline.num_system_spans)
            ids = np.concatenate([prefix.input_ids[: prefix.record.num_system_tokens], ids])
            labels = np.concatenate([np.full(len(ids) - len(labels), IGNORE, dtype=labels.dtype), labels])
        if found != (fragment.span_tokens, fragment.num_tiles) or len(ids) != fragment.num_tokens:
            raise SampleError(
                "changed_since_survey",
                f"its part {fragment.index + 1} of {fragment.count} lies in {count(found[0], 'tokens')} and "
                f"{count(found[1], 'tiles')} now, and was surveyed in {count(fragment.span_tokens, 'tokens')} and "
                f"{count(fragment.num_tiles, 'tiles')}",
            )
        record = Record(outline.raw.sample_id, len(ids), part.record.num_tiles, fragment.num_loss_tokens)
        return Encoded(record, ids, labels, part.images, outline.data_augment, first_tile=fragment.tile_start)

    def outline(self, raw: RawSample, spec: DatasetSpec) -> Outline:
        """What a sample is made of: its turns in the chat format, cut where it may be.

        Raises:
            SampleError: it cannot be encoded.
        """
        if raw.joined:
            rows = [
                (self._outline(row, row.data, spec), Answer(row.data, sample_id=row.sample_id)) for row in raw.joined
            ]
            return replace(rows[0][0], raw=raw, answers=tuple(rows))
        answers = answers_of(raw.data, self.config.objective)
        if answers is None:
            return self._outline(raw, raw.data, spec)
        outlines = [self._outline_of_answer(raw, number, answer, spec) for number, answer in enumerate(answers, 1)]
        return replace(outlines[0], answers=tuple(zip(outlines, answers, strict=True)))

    def _outline_of_answer(self, raw: RawSample, number: int, answer: Answer, spec: DatasetSpec) -> Outline:
        """The outline of one of a record's answers, by itself."""
        try:
            return self._outline(raw, answer.data, spec)
        except SampleError as error:
            if error.reason != "no_trained_token":
                raise
            which = f"answer {number}" if self.config.objective == "sft" else ("'chosen'", "'rejected'")[number - 1]
            raise SampleError("no_trained_token", f"{which} has no answer with text in it") from error

    def _outline(self, raw: RawSample, data: Mapping[str, Any], spec: DatasetSpec) -> Outline:
        """The outline of a record with the fields `data`."""
        refuse_fields(data)
        turns = turns_of(data, self._roles, breaks_after_images=self.family.breaks_after_images)
        flags = trained_answers(data, turns)
        names = image_names_of(data)
        video = video_of(data)
        frames: tuple[PlannedFrame, ...] | tuple[PlannedVideo, ...] = ()
        if video is not None:
            frames, shown = self._plan_video(raw, *video)
            turns = with_video(turns, shown)
        template = self._plain_text if turns[0][0] == "pretrain" else self._template
        bound = bind_images(turns, len(frames) or len(names), data)
        if isinstance(template, TokenizerTemplate):
            parts = template.layout(bound, tools_of(data, written=True))
        else:
            tools_of(data, written=False)
            parts = template.layout(bound)
        if flags is not None:
            parts = without_answers(parts, flags)
        if not any(part.trained for part in parts):
            raise SampleError("no_trained_token", "no answer with text in it, so there is nothing to train on")
        max_tiles = spec.max_dynamic_patch or self.config.max_dynamic_patch
        return Outline(raw, tuple(spans_of(parts)), names, frames, max_tiles, bool(spec.data_augment))

    def most_tokens(self, outline: Outline, images: Sequence[PlannedImage]) -> int:
        """Tokens that a sample with these images has at most: a token is no less than a byte of text."""
        total = sum(len(self.family.block(image.grid)) for image in images)
        for kind, value, _ in (part for span in outline.spans for part in span.parts):
            if kind == "text":
                total += len(str(value).encode()) + 1
            elif isinstance(value, np.ndarray):
                total += len(value)
        return total

    def plan_images(self, outline: Outline, start: int = 0, stop: int | None = None) -> tuple[PlannedImage, ...]:
        """Images [start, stop) of a sample, by their headers.

        Raises:
            SampleError: one of them cannot be used.
        """
        images = []
        for name in outline.names[start:stop]:
            ref = outline.raw.resolve(name)
            size = image_size_of(ref, self._rules)
            grid = self.family.plan(size, len(outline.names), outline.max_dynamic_patch)
            images.append(PlannedImage(ref, size, grid))
        return tuple(images)

    def _plan_video(
        self, raw: RawSample, name: str, clip: tuple[float, float] | None
    ) -> tuple[tuple[PlannedFrame, ...] | tuple[PlannedVideo, ...], str]:
        """The pictures of a video, and the text that they stand in."""
        ref = raw.resolve(name)
        part = plan_clip(ref, clip, self._rules.max_image_pixels)
        if not self.config.takes_videos:
            raise SampleError("unsupported_field", "a video, and --family_check compares pictures alone")
        if self.family.plans_videos:
            grid = self.family.plan_video(upright_size(ref), part.frames, part.rate)
            return (PlannedVideo(ref, part, grid),), PLACEHOLDER
        count = number_of_frames(part, raw.sample_id, self.config.min_num_frame, self.config.max_num_frame)
        return tuple(PlannedFrame(ref, part, number, count) for number in range(count)), frame_lines(count)

    def _assemble_tree(self, outline: Outline) -> Encoded:
        """The prefix that the answers have in common, and a branch for each: the ids that it has alone, from there on.

        Raises:
            SampleError: `answers`, an image is not before all of them, or those of a pair are the same.
        """
        alone: list[Encoded] = []
        for each, _ in outline.answers:
            alone.append(self._assemble(each, 0, len(each.spans), alone[0].images if alone else ()))
        first = alone[0]
        shared = min(int(np.flatnonzero(one.labels != IGNORE)[0]) for one in alone)
        for one in alone[1:]:
            different = np.flatnonzero(one.input_ids[:shared] != first.input_ids[:shared])
            shared = int(different[0]) if len(different) else shared
        begin = shared - 1  # what the prefix ends before is the first token of each branch
        is_image = np.isin(first.input_ids, self.picture_token_ids)
        if begin < 1 or is_image[begin:].any() or any(one.images != first.images for one in alone):
            raise SampleError("answers", "the answers do not begin with the same prompt and images")
        is_pair = self.config.objective != "sft"
        if is_pair and np.array_equal(alone[0].input_ids, alone[1].input_ids):
            raise SampleError("answers", "'chosen' and 'rejected' are the same answer, so neither is preferred")
        branches = tuple(
            Branch(
                len(one.input_ids) - begin, one.record.num_loss_tokens, answer.weight, answer.reward, answer.sample_id
            )
            for one, (_, answer) in zip(alone, outline.answers, strict=True)
        )
        input_ids = np.concatenate([first.input_ids[:begin], *(one.input_ids[begin:] for one in alone)])
        labels = np.concatenate([first.labels[:begin], *(one.labels[begin:] for one in alone)])
        record = Record(
            outline.raw.sample_id,
            len(input_ids),
            first.record.num_tiles,
            sum(branch.num_loss_tokens for branch in branches),
            (Span(begin, first.record.num_tiles), *(Span(b.num_tokens, ends_turn=True) for b in branches)),
            branches=branches,
            is_pair=is_pair,
        )
        return Encoded(record, input_ids, labels, first.images, outline.data_augment)

    @staticmethod
    def _part_of_tree(tree: Encoded, fragment: Fragment) -> Encoded:
        """The prefix, and the branches that lie in [token_start, token_stop) of the tree."""
        prefix = tree.record.num_prefix_tokens
        ends = np.cumsum([prefix, *(branch.num_tokens for branch in tree.branches)]).tolist()
        begin = max(fragment.token_start, prefix)
        if begin not in ends or fragment.token_stop not in ends or fragment.num_tiles != tree.record.num_tiles:
            raise SampleError("changed_since_survey", "its answers have other lengths now than when they were surveyed")
        chosen = tree.branches[ends.index(begin) : ends.index(fragment.token_stop)]
        ids, labels = (
            np.concatenate([a[:prefix], a[begin : fragment.token_stop]]) for a in (tree.input_ids, tree.labels)
        )
        record = replace(tree.record, num_tokens=len(ids), branches=chosen, spans=())
        return replace(tree, record=record, input_ids=ids, labels=labels)

    def _assemble(self, outline: Outline, start: int, stop: int, planned: tuple[Any, ...] = ()) -> Encoded:
        """Encode spans [start, stop) of a sample and lay them out in one row; `planned` are its images, if known."""
        chosen = outline.spans[start:stop]
        first = sum(span.is_image for span in outline.spans[:start])
        last = first + sum(span.is_image for span in chosen)
        images = planned or outline.frames[first:last] or self.plan_images(outline, first, last)
        text_ids, counts = self._text.encode(
            [str(part.value) for span in chosen for part in span.parts if part.kind == "text"]
        )
        runs: list[np.ndarray] = [np.empty(0, np.int32)]
        trained: list[tuple[int, int]] = []
        spans: list[Span] = []
        length = text_start = num_system_tokens = 0
        next_text, next_grid = iter(counts), iter([image.grid for image in images])
        for span in chosen:
            span_start, num_tiles = length, 0
            for kind, value, is_trained in span.parts:
                if kind == "end":
                    num_system_tokens = num_system_tokens or length
                    continue
                if kind == "image":
                    grid = next(next_grid)
                    num_tiles, block = grid.num_tiles, self.family.block(grid)
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
            spans.append(Span(length - span_start, num_tiles, span.ends_turn))
        input_ids = np.concatenate(runs)
        labels = np.full(length, IGNORE, dtype=np.int32)
        for begin, end in trained:
            labels[begin:end] = input_ids[begin:end]
        record = Record(
            sample_id=outline.raw.sample_id,
            num_tokens=length,
            num_tiles=sum(image.grid.num_tiles for image in images),
            num_loss_tokens=sum(end - begin for begin, end in trained),
            spans=tuple(spans),
            num_system_tokens=num_system_tokens,
        )
        return Encoded(record, input_ids, labels, images, outline.data_augment)

    def decode(
        self,
        encoded: Encoded,
        tile_start: int = 0,
        tile_stop: int | None = None,
        *,
        epoch: int = 0,
        out: np.ndarray | None = None,
        second: np.ndarray | None = None,
    ) -> np.ndarray:
        """Tiles [tile_start, tile_stop) of a sample, (tiles, 3, image_size, image_size) uint8 RGB.

        Both ends must lie at borders of images. They are written into `out`, an array of that shape, where one is
        given; see images.tiles_over for the order of memory.

        Args:
            epoch: of the option data_augment, and of the frames of a video that is not a picture of pairs.
            second: of a sample that `has_pairs`, an array like `out` for the second frames.

        Raises:
            SampleError: an image cannot be decoded.
        """
        size = self.config.image_size
        if tile_stop is None:
            tile_stop = encoded.record.num_tiles
        tiles = empty_tiles(tile_stop - tile_start, size) if out is None else out
        assert tiles.shape == (tile_stop - tile_start, 3, size, size) and tiles.dtype == np.uint8
        sample_id, first = encoded.record.sample_id, 0
        chosen: list[tuple[Any, np.ndarray]] = []
        for image in encoded.images:
            last = first + image.grid.num_tiles
            if tile_start <= first and last <= tile_stop:
                chosen.append((image, tiles[first - tile_start : last - tile_start]))
            else:
                assert last <= tile_start or tile_stop <= first, "a fragment that cuts an image"
            first = last
        if encoded.has_video and chosen:  # all of one video
            assert (second is not None) == encoded.has_pairs, "given for pairs"
            with isolate_sample_errors(chosen[0][0].ref.name):
                halves = (tiles,) if second is None else (tiles, second)
                decode_video([image for image, _ in chosen], sample_id, epoch, halves, self._rules.max_image_pixels)
        else:
            for image, part in chosen:
                with isolate_sample_errors(image.ref.name):
                    decode_tiles(image.ref, image.grid, size, self._rules, size=image.size, out=part)
        if encoded.data_augment:
            with isolate_sample_errors(f"data_augment of {sample_id}"):
                recompress(tiles, sample_id, epoch, encoded.first_tile + tile_start)
        return tiles

    def check_pixels(self, encoded: Encoded) -> None:
        """Decode all images of a sample as `decode` does, without keeping a tile; of a video, the frames of epoch 0.

        Raises:
            SampleError: as `decode`.
        """
        images: tuple[Any, ...] = encoded.images
        for image in images:
            with isolate_sample_errors(image.ref.name):
                if encoded.has_video:
                    decode_video(images, encoded.record.sample_id, 0, None, self._rules.max_image_pixels)
                    return
                decode_pixels(image.ref, image.grid, self.config.image_size, self._rules, size=image.size)
