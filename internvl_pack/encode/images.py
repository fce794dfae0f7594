"""Image headers and pixels: from bytes to upright size, and from bytes to uint8 tiles."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np

from internvl_pack.encode.tiles import TileGrid
from internvl_pack.errors import SampleError


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What an image may be.

    max_image_pixels: width x height above which an image is refused from its header, undecoded.
    allow_truncated_images: decode what there is of a cut-off file and fill the rest grey, instead of refusing it.
    """

    max_image_pixels: int = 89_478_485  # Pillow's own warning limit: 256 MiB of RGB
    allow_truncated_images: bool = False


DEFAULT_LIMITS = ImageLimits()


def image_size_of(ref, limits: ImageLimits = DEFAULT_LIMITS) -> tuple[int, int]:
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(ref.read()))
        return ImageOps.exif_transpose(image).size
    except SampleError:
        raise
    except Exception as error:
        raise SampleError("image_not_an_image", f"{ref.name}: {error}") from None


def decode_tiles(
    ref, grid: TileGrid, image_size: int, limits: ImageLimits = DEFAULT_LIMITS, size: tuple[int, int] | None = None
) -> np.ndarray:
    """The tiles of an image, (grid.num_tiles, 3, image_size, image_size) uint8, RGB."""
    from PIL import Image, ImageOps

    try:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(ref.read()))).convert("RGB")
    except SampleError:
        raise
    except Exception as error:
        raise SampleError("image_corrupt", f"{ref.name}: {error}") from None
    whole = image.resize((grid.columns * image_size, grid.rows * image_size), Image.Resampling.BICUBIC)
    pixels = np.asarray(whole).reshape(grid.rows, image_size, grid.columns, image_size, 3)
    tiles = np.empty((grid.num_tiles, 3, image_size, image_size), dtype=np.uint8)
    tiles[: grid.columns * grid.rows] = pixels.transpose(0, 2, 4, 1, 3).reshape(-1, 3, image_size, image_size)
    if grid.thumbnail:
        tiles[-1] = np.asarray(image.resize((image_size, image_size), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    return tiles
