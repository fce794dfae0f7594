"""An image's size from its header, and its tiles from its pixels.

    bytes -> header (headers.py) -> decoder (decoders.py) -> RGB -> one resize -> turned upright -> tiles, uint8

Tiles are written once, into the array that the caller hands on. The resize is torch's antialiased bicubic on uint8,
within 2 levels of Pillow's bicubic and 3 to 4 times as fast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SampleError, UserError
from .decoders import decode_rgb
from .headers import HEAD_BYTES, Header, read_header
from .tiles import TileGrid

if TYPE_CHECKING:
    import torch

    from ..sources import ImageRef


@dataclass(frozen=True, slots=True)
class ImageRules:
    """What an image may be, and how it is read: as the options of EncodeConfig.

    background: RGB of `transparent_background`; None drops alpha.
    """

    max_image_pixels: int = 1 << 26  # 8192 x 8192: decoding stays under 2.2 GB
    allow_truncated_images: bool = False
    apply_exif_orientation: bool = True
    background: tuple[int, int, int] | None = None


DEFAULT_RULES = ImageRules()

# Pixels that may lie between the two halves of a resize, or as many as the picture has: 50 MB.
MAX_INTERMEDIATE_PIXELS = 1 << 24


def colour_of(name: str) -> tuple[int, int, int]:
    """RGB of a colour as CSS writes it: white, #ff8800, rgb(255, 136, 0).

    Raises:
        UserError: no such colour.
    """
    from PIL import ImageColor

    try:
        return ImageColor.getrgb(name)[:3]
    except ValueError:
        raise UserError(
            f"transparent_background is {name!r}: give a colour, such as white or '#ff8800', or leave it out"
        ) from None


def header_of(ref: ImageRef, rules: ImageRules = DEFAULT_RULES, data: bytes | None = None) -> Header:
    """The header of an image reference, from its first bytes, or from all of them where they are given.

    Raises:
        SampleError: as `read_header`.
    """
    head = ref.head(HEAD_BYTES) if data is None else data
    header = read_header(ref.name, head, lambda: ref.read() if data is None else data, rules.max_image_pixels)
    return header if rules.apply_exif_orientation else replace(header, orientation=1)


def image_size_of(ref: ImageRef, rules: ImageRules = DEFAULT_RULES) -> tuple[int, int]:
    """(width, height) of an image as it stands upright, from its header alone."""
    return header_of(ref, rules).upright_size


def decode_tiles(
    ref: ImageRef,
    grid: TileGrid,
    image_size: int,
    rules: ImageRules = DEFAULT_RULES,
    *,
    size: tuple[int, int] | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The tiles of an image: its grid in reading order, then the thumbnail.

    Args:
        grid: as planned from the header.
        size: upright (width, height) that was planned with; a file that has changed since is refused.
        out: (grid.num_tiles, 3, image_size, image_size) uint8 to write into, fastest as `tiles_over` lays it.

    Returns:
        `out`, or a new array of that shape.

    Raises:
        SampleError: it cannot be decoded, or has changed.
    """
    pixels, header, scale = decode_pixels(ref, grid, image_size, rules, size=size)
    if out is None:
        out = empty_tiles(grid.num_tiles, image_size)
    cut_tiles(pixels, grid, out, header.orientation, (header.width / scale, header.height / scale))
    return out


def decode_pixels(
    ref: ImageRef,
    grid: TileGrid,
    image_size: int,
    rules: ImageRules = DEFAULT_RULES,
    *,
    size: tuple[int, int] | None = None,
) -> tuple[np.ndarray, Header, int]:
    """(pixels as stored, header, scale of the pixels), see `decode_rgb`; arguments and errors as of `decode_tiles`."""
    data = ref.read()
    header = header_of(ref, rules, data)
    if size is not None and header.upright_size != tuple(size):
        raise SampleError(
            "image_changed", f"{ref.name} was {size[0]} x {size[1]} pixels when planned, now {header.upright_size}"
        )
    across, down = grid.columns * image_size, grid.rows * image_size
    pixels, scale = decode_rgb(
        ref.name,
        data,
        header,
        (down, across) if header.orientation >= 5 else (across, down),
        allow_truncated=rules.allow_truncated_images,
        background=rules.background,
    )
    return pixels, header, scale


def cut_tiles(
    pixels: np.ndarray, grid: TileGrid, out: np.ndarray, orientation: int = 1, size: tuple[float, float] | None = None
) -> None:
    """Resize pixels to the grid, turn them upright, and write the tiles into `out`, thumbnail last.

    Args:
        pixels: (height, width, 3) uint8, as stored.
        grid: of the upright picture.
        out: (grid.num_tiles, 3, edge, edge) uint8.
        orientation: EXIF orientation of `pixels`, 1 to 8. Turning comes last: there is less to turn.
        size: (width, height) of the picture in pixels of `pixels`, where its last column and row are partial.
    """
    import torch

    # The batch axis comes first: with it added last torch does not see that colours lie together, and takes thrice as
    # long.
    image = torch.from_numpy(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    tiles = torch.from_numpy(out)
    count = grid.columns * grid.rows
    _fill(image, grid.columns, grid.rows, tiles[:count], orientation, size)
    if grid.thumbnail:
        _fill(image, 1, 1, tiles[count:], orientation, size)


def empty_tiles(count: int, edge: int) -> np.ndarray:
    """(count, 3, edge, edge) uint8 with anything in it, the colours of a pixel together in memory."""
    return tiles_over(np.empty((count, edge, edge, 3), dtype=np.uint8))


def tiles_over(pixels: np.ndarray) -> np.ndarray:
    """(n, edge, edge, 3) seen as tiles, (n, 3, edge, edge): the order of memory that torch calls channels_last.

    It is what decoders and the resize give, so that cutting copies runs of bytes; to take the colours apart takes
    about three times as long, and a device does it in passing, as it normalises.
    """
    return pixels.transpose(0, 3, 1, 2)


def _fill(
    image: torch.Tensor,
    columns: int,
    rows: int,
    tiles: torch.Tensor,
    orientation: int,
    size: tuple[float, float] | None,
) -> None:
    """The whole picture as `columns` x `rows` tiles, (columns * rows, 3, edge, edge)."""
    edge = tiles.shape[-1]
    height, width = rows * edge, columns * edge
    if orientation >= 5:
        height, width = width, height
    picture = _turn(_resize(image, height, width, size), orientation)
    cells = picture.permute(1, 2, 0).unflatten(0, (rows, edge)).unflatten(2, (columns, edge))
    tiles.permute(0, 2, 3, 1).unflatten(0, (rows, columns)).copy_(cells.transpose(1, 2))


def _resize(image: torch.Tensor, height: int, width: int, size: tuple[float, float] | None) -> torch.Tensor:
    """(1, 3, h, w) uint8 to (3, height, width) by antialiased bicubic; untouched where the size is right, as in Pillow.

    With a fractional `size` the scale is taken from it: the picture ends within the last column and row.
    """
    from torch.nn.functional import interpolate

    bicubic = partial(interpolate, mode="bicubic", antialias=True, align_corners=False)
    if image.shape[2:] == (height, width):
        return image[0]
    if size is not None and size != (image.shape[3], image.shape[2]):
        resized = bicubic(image, scale_factor=_factors(height, width, size))
        assert resized.shape[2:] == (height, width), "rounding of the scale"
        return resized[0]
    if image.shape[2] * width > max(MAX_INTERMEDIATE_PIXELS, image.shape[2] * image.shape[3]):
        # torch resizes along the rows first; a picture that is thin and long must shrink before it grows.
        image = bicubic(image, (height, image.shape[3]))
    return bicubic(image, (height, width))[0]


def _factors(height: int, width: int, size: tuple[float, float]) -> tuple[float, float]:
    """Scale factors of height and width; torch rounds down the size that follows, so a hair is added."""
    hair = 1 + 1e-9
    return height / size[1] * hair, width / size[0] * hair


def _turn(picture: torch.Tensor, orientation: int) -> torch.Tensor:
    """Apply an EXIF orientation to a (3, height, width) tensor."""
    if orientation >= 5:
        picture = picture.transpose(1, 2)
    flipped = [axis for axis, values in ((1, (3, 4, 7, 8)), (2, (2, 3, 6, 7))) if orientation in values]
    return picture.flip(flipped) if flipped else picture
