"""Qwen2.5-VL, Qwen3-VL, Qwen3.5 and GLM-4V: a picture keeps its shape, and its size within bounds of pixels.

Its sides become multiples of `image_size`, the square of pixels that a token stands for (patches of 14 or 16, merged
two by two). Such a square is a tile here: the grid of tiles is that of the tokens, in reading order, and budgets of
tiles count image tokens.

Positions are of three axes, time, height and width (M-RoPE). The tokens of a picture share the first, and count rows
and columns in the others, all from the position after the text before it; what follows goes on after its longer side.

A video is pairs of frames, each as a picture of one size, which depends on the number of frames. Which frames these are
depends on the video alone, not on the epoch: the text between them says when they are shown.

Source of the rules, in transformers 5.24: `smart_resize` of image and video processors, `sample_frames` of video
processors, `replace_video_token` of processors, `get_rope_index` of models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import SampleError, UserError
from ..chat import single_token
from ..config import EncodeConfig
from ..tiles import TileGrid, VideoGrid
from .base import Bordered, register_family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Colours = tuple[float, float, float]  # red, green, blue
CLIP: tuple[Colours, Colours] = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALVES: tuple[Colours, Colours] = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
MERGE = 2  # patches along a token's side
MAX_RATIO = 200  # of a picture's sides
FRAMES_A_SECOND = 2  # of a video
MAX_FRAME_TOKENS = 768  # of a frame of a video at most, in Qwen's
MAX_VIDEO_TOKENS = 4096  # of a video at most, where nothing else is said
# Options that cut pictures into tiles of one size.
TILE_OPTIONS = ("dynamic_image_size", "use_thumbnail", "min_dynamic_patch", "max_dynamic_patch")


@lru_cache(maxsize=1 << 16)
def fitted_grid(
    width: int, height: int, side: int, min_pixels: int, max_pixels: int, frames: int = 1, counted: int = 1
) -> TileGrid:
    """The grid of tokens of a picture, or of each of the frames of a video.

    Args:
        width, height: pixels, both at least 1.
        side: pixels along a token's square.
        min_pixels, max_pixels: bounds of width x height after resizing, of all frames together.
        frames: how many they are; counted: as how many they count before resizing.

    Raises:
        SampleError: one side is more than 200 times the other.
    """
    if max(width, height) > MAX_RATIO * min(width, height):
        raise SampleError(
            "image_shape", f"{width} x {height} pixels: a side is more than {MAX_RATIO} times as long as the other"
        )
    rows, columns = (max(1, round(n / side)) for n in (height, width))
    pixels = counted * round(height / side) * round(width / side) * side**2
    if pixels > max_pixels:
        shrink = math.sqrt(frames * width * height / max_pixels)
        rows, columns = (max(1, math.floor(n / shrink / side)) for n in (height, width))
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (frames * width * height))
        rows, columns = (math.ceil(n * grow / side) for n in (height, width))
    return TileGrid(columns, rows)


def grown(size: tuple[int, int], side: int) -> tuple[int, int]:
    """A picture's size, both sides at least `side` pixels: the ratio of sides is then that of whole pixels."""
    if min(size) >= side:
        return size
    scale = max(side / size[1], side / size[0])
    return int(size[0] * scale), int(size[1] * scale)


class NativePictures(Bordered):
    """See PictureFamily. `MIN_PIXELS` and `MAX_PIXELS` are what the options are by default."""

    TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")  # before, of, and after a picture
    VIDEO_TOKENS = ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>")  # before, of, and after a video
    CONV_STYLE = "chat_template"  # by default
    MIN_PIXELS: int
    MAX_PIXELS: int
    VIDEO_MIN_PIXELS: int  # of all frames together, of Qwen2.5-VL of one
    POSITIONS_PER_SECOND: int | None = None  # of a video, where the checkpoint does not say and times are positions
    STATISTICS: tuple[Colours, Colours]  # mean and standard deviation
    COUNTED = 1  # times that a picture's pixels count in the processor's bounds
    IMAGE_PROCESSOR = "Qwen2VLImageProcessor"
    PROCESSOR: str
    VIDEO_PROCESSOR: str

    unused_options = frozenset({*TILE_OPTIONS, "takes_videos"})
    grid_positions = True
    breaks_after_images = False
    plans_videos = True

    def __init__(self, config: EncodeConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer, *self.TOKENS)
        if config.tokens_per_tile != 1:
            raise UserError(
                f"family {config.family!r} has tiles of one token: make its EncodeConfig by "
                "encode_config_of(checkpoint)"
            )
        self._side = config.image_size
        self._rule = (self._side, *self._bounds(config.min_pixels, config.max_pixels))
        self._video_max_pixels = config.video_max_pixels or self._most_of_video(self._side)
        self._num_frames = config.min_num_frame, config.max_num_frame
        self._positions_per_second = config.positions_per_second or self.POSITIONS_PER_SECOND
        self._tokenizer = tokenizer
        self._video_ids = [single_token(tokenizer, token, config.conv_style) for token in self.VIDEO_TOKENS]

    @property
    def picture_token_ids(self) -> tuple[int, ...]:
        return self.image_token_id, self._video_ids[1]

    @classmethod
    def _bounds(cls, low: int | None, high: int | None) -> tuple[int, int]:
        """Least and most pixels: those that are given, else the family's."""
        return cls.MIN_PIXELS if low is None else low, cls.MAX_PIXELS if high is None else high

    @staticmethod
    def _most_of_video(side: int) -> int:
        """Pixels of all frames of a video; two of them share a token."""
        return 2 * MAX_VIDEO_TOKENS * side**2

    @classmethod
    def encoding(cls, options: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Its tokens and bounds; see PictureFamily.

        Raises:
            UserError: an option of tiles is given.
        """
        family = checkpoint["model_type"]
        given = [name for name in ("force_image_size", "down_sample_ratio") if options.get(name) is not None]
        usual = {name: getattr(EncodeConfig, name) for name in TILE_OPTIONS}
        given += [name for name in TILE_OPTIONS if options.get(name) not in (None, usual[name])]
        if given:
            raise UserError(
                f"--{given[0]} {options[given[0]]} with {family!r}, whose pictures are not cut into tiles of one size: "
                "leave it out, and bound their size by --min_pixels and --max_pixels"
            )
        vision = checkpoint["vision_config"]
        low, high = cls._bounds(options.get("min_pixels"), options.get("max_pixels"))
        side = vision["patch_size"] * vision["spatial_merge_size"]
        return {
            "family": family,
            "image_size": side,
            "tokens_per_tile": 1,
            "min_pixels": low,
            "max_pixels": high,
            "video_max_pixels": options.get("video_max_pixels") or cls._most_of_video(side),
            "positions_per_second": vision.get("tokens_per_second", cls.POSITIONS_PER_SECOND),
        }

    @classmethod
    def _video_bounds(cls, config: EncodeConfig) -> dict[str, Any]:
        """How the family's processor for videos bounds their size and number of frames."""
        most = config.video_max_pixels or cls._most_of_video(config.image_size)
        return {
            "size": {"shortest_edge": cls.VIDEO_MIN_PIXELS, "longest_edge": most},
            "cap_pixels_per_frame": True,
            "min_frames": config.min_num_frame,
            "max_frames": config.max_num_frame,
        }

    @classmethod
    def processor_files(cls, config: EncodeConfig) -> dict[str, dict[str, Any]]:
        """Files by which transformers' processor prepares pictures as they were in training, by name."""
        low, high = cls._bounds(config.min_pixels, config.max_pixels)
        mean, std = cls.STATISTICS
        image = {
            "image_processor_type": cls.IMAGE_PROCESSOR,
            "processor_class": cls.PROCESSOR,
            "patch_size": config.image_size // MERGE,
            "merge_size": MERGE,
            "temporal_patch_size": 2,
            "image_mean": list(mean),
            "image_std": list(std),
            "size": {"shortest_edge": cls.COUNTED * low, "longest_edge": cls.COUNTED * high},
        }
        video = {name: image[name] for name in ("patch_size", "merge_size", "temporal_patch_size", "image_mean")}
        video |= {"image_std": image["image_std"], "video_processor_type": cls.VIDEO_PROCESSOR}
        video |= {"do_sample_frames": True, "fps": FRAMES_A_SECOND} | cls._video_bounds(config)
        return {
            "preprocessor_config.json": image,
            "video_preprocessor_config.json": video | {"processor_class": cls.PROCESSOR},
            "processor_config.json": {"processor_class": cls.PROCESSOR},
        }

    def plan(self, size: tuple[int, int], num_images: int, max_dynamic_patch: int) -> TileGrid:
        return fitted_grid(*size, *self._rule)

    def plan_video(self, size: tuple[int, int], frames: int, rate: float) -> VideoGrid:
        """A video's pairs of frames; of an odd number the last one is there twice.

        Args:
            size: upright (width, height) in pixels.
            frames: how many it has.
            rate: frames a second.

        Raises:
            SampleError: the family takes no frames of this size.
        """
        low, high = (min(n, frames) for n in self._num_frames)
        chosen = self._chosen_frames(frames, rate, low, high)
        grid = self._frame_grid(size, max(2, len(chosen)))
        pairs = chosen + chosen[-1:] * (len(chosen) % 2)
        timed = self._timed([frame / rate for frame in pairs], frames / rate / len(chosen))
        return VideoGrid(grid.columns, grid.rows, tuple(pairs), **timed)

    def _chosen_frames(self, frames: int, rate: float, low: int, high: int) -> list[int]:
        """Which ones of `frames` are taken: two a second, but `low` to `high`, from the first to the last."""
        number = min(max(int(frames / rate * FRAMES_A_SECOND), low), high)
        return np.linspace(0, frames - 1, number).round().astype(int).tolist()

    def _frame_grid(self, size: tuple[int, int], num_frames: int) -> TileGrid:
        """Of each frame: its share of the video's pixels, but 768 tokens at most."""
        share = min(MAX_FRAME_TOKENS * self._side**2, self._video_max_pixels // num_frames)
        return self._shared_grid(size, num_frames, max(share, int(1.05 * self.VIDEO_MIN_PIXELS)) * num_frames)

    def _shared_grid(self, size: tuple[int, int], num_frames: int, max_pixels: int) -> TileGrid:
        """Of each frame, by bounds of all frames together."""
        side, counted = self._side, 2 * round(num_frames / 2)
        return fitted_grid(*grown(size, side), side, self.VIDEO_MIN_PIXELS, max_pixels, num_frames, counted)

    def _timed(self, seconds: list[float], step: float) -> dict[str, tuple[Any, ...]]:
        """Fields of a VideoGrid that say when its pairs are shown: here in the middle between their frames.

        Args:
            seconds: when each frame is shown; step: from one to the next.
        """
        middles = [(first + second) / 2 for first, second in zip(seconds[::2], seconds[1::2], strict=True)]
        return {"stamps": tuple(f"<{middle:.1f} seconds>" for middle in middles)}

    def block(self, grid: TileGrid | VideoGrid) -> np.ndarray:
        if isinstance(grid, TileGrid):
            return super().block(grid)
        start, _, end = self._video_ids
        return np.array([start, *self._frames_block(grid), end], dtype=np.int32)

    def _frames_block(self, grid: VideoGrid) -> list[int]:
        """Between start and end of a video: here each pair is a picture, after its time."""
        pair = [self.start_id, *[self._video_ids[1]] * (grid.columns * grid.rows), self.end_id]
        return [token for stamp in self._stamps(grid) for token in stamp + pair]

    def _stamps(self, grid: VideoGrid) -> list[list[int]]:
        """Ids of the text at each pair."""
        return self._tokenizer(list(grid.stamps), add_special_tokens=False)["input_ids"]


@register_family("qwen2_5_vl")
class Qwen25Pictures(NativePictures):
    """Tokens of 28 x 28 pixels; 4 to 1,280 of them, as transformers' image processor has it by default."""

    MIN_PIXELS = 56 * 56
    MAX_PIXELS = 1280 * 28 * 28
    VIDEO_MIN_PIXELS = 56 * 56
    POSITIONS_PER_SECOND = 4  # of transformers' config; published checkpoints say 2
    STATISTICS = CLIP
    PROCESSOR, VIDEO_PROCESSOR = "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"

    def _chosen_frames(self, frames: int, rate: float, low: int, high: int) -> list[int]:
        """An even number of them, at equal distances from the first one on."""
        number = min(max(frames / rate * FRAMES_A_SECOND, low), high // 2 * 2)
        number = max(int(number) // 2 * 2, min(2, frames))
        return (np.arange(number) * (frames / number)).astype(int).tolist()

    def _frame_grid(self, size: tuple[int, int], num_frames: int) -> TileGrid:
        all_frames = 2 * int(self._budget(self._video_max_pixels) * self._side**2 * 0.9)
        share = min(MAX_FRAME_TOKENS * self._side**2, all_frames // num_frames)
        return fitted_grid(*size, self._side, self.VIDEO_MIN_PIXELS, max(share, int(1.05 * self.VIDEO_MIN_PIXELS)))

    @staticmethod
    def _budget(video_max_pixels: int) -> int:
        """The bound as its processor has it: tokens of a context of which a video gets nine tenths."""
        return int(video_max_pixels / (2 * 28**2 * 0.9))

    @classmethod
    def _video_bounds(cls, config: EncodeConfig) -> dict[str, Any]:
        bounds = super()._video_bounds(config)
        most = cls._budget(bounds["size"]["longest_edge"])
        bounds["size"]["longest_edge"] = MAX_FRAME_TOKENS * config.image_size**2
        return bounds | {"max_video_tokens": most}

    def _timed(self, seconds: list[float], step: float) -> dict[str, tuple[Any, ...]]:
        """By positions alone. The model multiplies in float32, as here."""
        pairs = np.arange(len(seconds) // 2, dtype=np.float32)
        times = pairs * (np.float32(2 * step) * np.float32(self._positions_per_second))
        return {"times": tuple(times.astype(int).tolist())}

    def _frames_block(self, grid: VideoGrid) -> list[int]:
        return [self._video_ids[1]] * grid.num_tiles


@register_family("qwen3_5_moe")
@register_family("qwen3_5")
@register_family("qwen3_vl_moe")
@register_family("qwen3_vl")
class Qwen3Pictures(NativePictures):
    """Tokens of 32 x 32 pixels; 64 to 1,280 of them. Published checkpoints allow 16,384, more than a row holds."""

    MIN_PIXELS = 256 * 256
    MAX_PIXELS = 1280 * 32 * 32
    VIDEO_MIN_PIXELS = 64 * 64
    STATISTICS = HALVES
    PROCESSOR, VIDEO_PROCESSOR = "Qwen3VLProcessor", "Qwen3VLVideoProcessor"


@register_family("glm4v")
class Glm4vPictures(NativePictures):
    """Tokens of 28 x 28 pixels; 8 to 1,280 of them. Its processor counts a picture as two frames of a video."""

    TOKENS = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")
    VIDEO_TOKENS = ("<|begin_of_video|>", "<|image|>", "<|end_of_video|>")
    MIN_PIXELS = 112 * 112 // 2
    MAX_PIXELS = 1280 * 28 * 28
    VIDEO_MIN_PIXELS = 112 * 112
    STATISTICS = CLIP
    COUNTED = 2
    IMAGE_PROCESSOR = "Glm4vImageProcessor"
    PROCESSOR, VIDEO_PROCESSOR = "Glm4vProcessor", "Glm4vVideoProcessor"

    def plan(self, size: tuple[int, int], num_images: int, max_dynamic_patch: int) -> TileGrid:
        return super().plan(grown(size, self._side), num_images, max_dynamic_patch)

    def _chosen_frames(self, frames: int, rate: float, low: int, high: int) -> list[int]:
        """One each half a second, as long as their number is allowed.

        The one that makes their number even counts in their size.
        """
        number = min(int(frames / rate * FRAMES_A_SECOND), frames)
        if low <= number <= high:
            step = max(rate / FRAMES_A_SECOND, 1)
            chosen = list(dict.fromkeys(min(frames - 1, math.ceil(i * step)) for i in range(number)))
        else:
            chosen = super()._chosen_frames(frames, rate, low, high)
        return chosen + chosen[-1:] * (len(chosen) % 2)

    def _frame_grid(self, size: tuple[int, int], num_frames: int) -> TileGrid:
        return self._shared_grid(size, num_frames, self._video_max_pixels)

    @classmethod
    def _video_bounds(cls, config: EncodeConfig) -> dict[str, Any]:
        return {"size": super()._video_bounds(config)["size"]}

    def _timed(self, seconds: list[float], step: float) -> dict[str, tuple[Any, ...]]:
        return {"stamps": tuple(str(int(first)) for first in seconds[::2])}

    def _frames_block(self, grid: VideoGrid) -> list[int]:
        """Each pair is an image, before its time."""
        pair = super().block(TileGrid(grid.columns, grid.rows)).tolist()
        return [token for stamp in self._stamps(grid) for token in pair + stamp]


def grid_positions(
    input_ids: np.ndarray, token_ids: int | Sequence[int], grids: Sequence[Sequence[int]], start: int = 0
) -> np.ndarray:
    """Positions of a segment's tokens by time, height and width, int64 (3, n).

    Args:
        input_ids: (n,).
        token_ids: of pictures.
        grids: of its pictures, in order, as in `image_grids` (batch/collate.py): each is a run of picture tokens.
        start: position of the first token.

    Raises:
        ValueError: picture tokens and grids do not agree.
    """
    positions = np.empty((3, len(input_ids)), dtype=np.int64)
    places = np.flatnonzero(np.isin(input_ids, token_ids))
    sizes = [rows * columns * max(1, len(times)) for rows, columns, *times in grids]
    if len(places) != sum(sizes):
        raise ValueError(f"{len(places)} image tokens for pictures of {list(grids)} rows and columns of tokens")
    done = used = 0
    for size, (rows, columns, *times) in zip(sizes, grids, strict=True):
        first = int(places[used])
        positions[:, done:first] = np.arange(start, start + first - done)
        start += first - done
        used += size
        done = first + size
        if places[used - 1] != done - 1:
            raise ValueError(f"the image tokens of a picture of {rows} x {columns} do not lie together")
        pair, place = np.divmod(np.arange(size), rows * columns)
        positions[:, first:done] = start + np.stack([np.array(times or [0])[pair], *np.divmod(place, columns)])
        start += max(rows, columns)
    positions[:, done:] = np.arange(start, start + len(input_ids) - done)
    return positions
