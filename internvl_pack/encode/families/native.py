"""Qwen2.5-VL, Qwen3-VL, Qwen3.5 and GLM-4V: a picture keeps its shape, and its size within bounds of pixels.

Its sides become multiples of `image_size`, the square of pixels that a token stands for (patches of 14 or 16, merged
two by two). Such a square is a tile here: the grid of tiles is that of the tokens, in reading order, and budgets of
tiles count image tokens.

Positions are of three axes, time, height and width (M-RoPE). The tokens of a picture share the first, and count rows
and columns in the others, all from the position after the text before it; what follows goes on after its longer side.

Source of both rules: `smart_resize` (image_processing_qwen2_vl.py, image_processing_glm4v.py) and `get_rope_index`
(modeling_qwen3_vl.py) of transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import SampleError, UserError
from ..tiles import TileGrid
from .base import Bordered, register_family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..sample import EncodeConfig

Colours = tuple[float, float, float]  # red, green, blue
CLIP: tuple[Colours, Colours] = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALVES: tuple[Colours, Colours] = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
MERGE = 2  # patches along a token's side
MAX_RATIO = 200  # of a picture's sides
# Options that cut pictures into tiles of one size.
TILE_OPTIONS = ("dynamic_image_size", "use_thumbnail", "min_dynamic_patch", "max_dynamic_patch")


@lru_cache(maxsize=1 << 16)
def fitted_grid(width: int, height: int, side: int, min_pixels: int, max_pixels: int) -> TileGrid:
    """The grid of tokens of a picture.

    Args:
        width, height: pixels, both at least 1.
        side: pixels along a token's square.
        min_pixels, max_pixels: bounds of width x height after resizing.

    Raises:
        SampleError: one side is more than 200 times the other.
    """
    if max(width, height) > MAX_RATIO * min(width, height):
        raise SampleError(
            "image_shape", f"{width} x {height} pixels: a side is more than {MAX_RATIO} times as long as the other"
        )
    rows, columns = (max(1, round(n / side)) for n in (height, width))
    if round(height / side) * round(width / side) * side**2 > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        rows, columns = (max(1, math.floor(n / shrink / side)) for n in (height, width))
    elif round(height / side) * round(width / side) * side**2 < min_pixels:
        grow = math.sqrt(min_pixels / (width * height))
        rows, columns = (math.ceil(n * grow / side) for n in (height, width))
    return TileGrid(columns, rows)


class NativePictures(Bordered):
    """See PictureFamily. `MIN_PIXELS` and `MAX_PIXELS` are what the options are by default."""

    TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")  # before, of, and after a picture
    CONV_STYLE = "chat_template"  # by default
    MIN_PIXELS: int
    MAX_PIXELS: int
    STATISTICS: tuple[Colours, Colours]  # mean and standard deviation
    COUNTED = 1  # times that a picture's pixels count in the processor's bounds
    IMAGE_PROCESSOR = "Qwen2VLImageProcessor"
    PROCESSOR: str
    VIDEO_PROCESSOR: str

    unused_options = frozenset({*TILE_OPTIONS, "min_num_frame", "max_num_frame"})
    grid_positions = True
    takes_videos = False

    def __init__(self, config: EncodeConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer, *self.TOKENS)
        if config.tokens_per_tile != 1:
            raise UserError(
                f"family {config.family!r} has tiles of one token: make its EncodeConfig by "
                "checkpoints.encoding.encode_config from the checkpoint's config"
            )
        self._rule = (config.image_size, *self._bounds(config.min_pixels, config.max_pixels))

    @classmethod
    def _bounds(cls, low: int | None, high: int | None) -> tuple[int, int]:
        """Of pixels, the family's where none are given."""
        return cls.MIN_PIXELS if low is None else low, cls.MAX_PIXELS if high is None else high

    @classmethod
    def encoding(
        cls, config: type[EncodeConfig], options: Mapping[str, Any], checkpoint: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Fields of EncodeConfig that a checkpoint of the family decides on.

        Args:
            config: the class, for its defaults.
            options: by their names on a command line.
            checkpoint: config.json.

        Raises:
            UserError: an option of tiles is given.
        """
        family = checkpoint["model_type"]
        given = [name for name in ("force_image_size", "down_sample_ratio") if options.get(name) is not None]
        usual = {name: getattr(config, name) for name in TILE_OPTIONS}
        given += [name for name in TILE_OPTIONS if options.get(name) not in (None, usual[name])]
        if given:
            raise UserError(
                f"--{given[0]} {options[given[0]]} with {family!r}, whose pictures are not cut into tiles of one size: "
                "leave it out, and bound their size by --min_pixels and --max_pixels"
            )
        vision = checkpoint["vision_config"]
        low, high = cls._bounds(options.get("min_pixels"), options.get("max_pixels"))
        return {
            "family": family,
            "image_size": vision["patch_size"] * vision["spatial_merge_size"],
            "tokens_per_tile": 1,
            "min_pixels": low,
            "max_pixels": high,
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
        return {
            "preprocessor_config.json": image,
            "video_preprocessor_config.json": video | {"processor_class": cls.PROCESSOR},
            "processor_config.json": {"processor_class": cls.PROCESSOR},
        }

    def plan(self, size: tuple[int, int], num_images: int, max_dynamic_patch: int) -> TileGrid:
        return fitted_grid(*size, *self._rule)


@register_family("qwen2_5_vl")
class Qwen25Pictures(NativePictures):
    """Tokens of 28 x 28 pixels; 4 to 1,280 of them, as transformers' image processor has it by default."""

    MIN_PIXELS = 56 * 56
    MAX_PIXELS = 1280 * 28 * 28
    STATISTICS = CLIP
    PROCESSOR, VIDEO_PROCESSOR = "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"


@register_family("qwen3_5_moe")
@register_family("qwen3_5")
@register_family("qwen3_vl_moe")
@register_family("qwen3_vl")
class Qwen3Pictures(NativePictures):
    """Tokens of 32 x 32 pixels; 64 to 1,280 of them. Published checkpoints allow 16,384, more than a row holds."""

    MIN_PIXELS = 256 * 256
    MAX_PIXELS = 1280 * 32 * 32
    STATISTICS = HALVES
    PROCESSOR, VIDEO_PROCESSOR = "Qwen3VLProcessor", "Qwen3VLVideoProcessor"


@register_family("glm4v")
class Glm4vPictures(NativePictures):
    """Tokens of 28 x 28 pixels; 8 to 1,280 of them. Its processor counts a picture as two frames of a video."""

    TOKENS = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")
    MIN_PIXELS = 112 * 112 // 2
    MAX_PIXELS = 1280 * 28 * 28
    STATISTICS = CLIP
    COUNTED = 2
    IMAGE_PROCESSOR = "Glm4vImageProcessor"
    PROCESSOR, VIDEO_PROCESSOR = "Glm4vProcessor", "Glm4vVideoProcessor"

    def plan(self, size: tuple[int, int], num_images: int, max_dynamic_patch: int) -> TileGrid:
        side = self._rule[0]
        if min(size) < side:  # grown first, so that the ratio of sides is that of whole pixels
            scale = max(side / size[1], side / size[0])
            size = int(size[0] * scale), int(size[1] * scale)
        return super().plan(size, num_images, max_dynamic_patch)


def grid_positions(
    input_ids: np.ndarray, image_token_id: int, grids: Sequence[tuple[int, int]], start: int = 0
) -> np.ndarray:
    """Positions of a segment's tokens by time, height and width, int64 (3, n).

    Args:
        input_ids: (n,).
        grids: (rows, columns) of its pictures, in order; each is a run of rows * columns image tokens.
        start: position of the first token.

    Raises:
        ValueError: image tokens and grids do not agree.
    """
    positions = np.empty((3, len(input_ids)), dtype=np.int64)
    places = np.flatnonzero(input_ids == image_token_id)
    if len(places) != sum(rows * columns for rows, columns in grids):
        raise ValueError(f"{len(places)} image tokens for pictures of {list(grids)} rows and columns of tokens")
    done = used = 0
    for rows, columns in grids:
        first = int(places[used])
        positions[:, done:first] = np.arange(start, start + first - done)
        start += first - done
        used += rows * columns
        done = first + rows * columns
        if places[used - 1] != done - 1:
            raise ValueError(f"the image tokens of a picture of {rows} x {columns} do not lie together")
        row, column = np.divmod(np.arange(rows * columns), columns)
        positions[:, first:done] = start + np.stack([np.zeros_like(row), row, column])
        start += max(rows, columns)
    positions[:, done:] = np.arange(start, start + len(input_ids) - done)
    return positions
