"""`data_augment`: every tile is compressed as JPEG once more, at a quality from 75 to 100.

InternVL draws the quality at random per tile; here it is a function of (sample id, epoch, tile), so that a resumed or
repeated run sees the same pixels, whatever worker decodes them.
"""

from __future__ import annotations

import hashlib

import numpy as np

MIN_QUALITY, MAX_QUALITY = 75, 100


def draw(below: int, *seed: object) -> int:
    """A number in range(below), a function of `seed`."""
    digest = hashlib.blake2b("\n".join(map(str, seed)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % below


def jpeg_quality(sample_id: str, epoch: int, tile: int) -> int:
    """The quality of a sample's tile in an epoch, uniform over 75 to 100."""
    return MIN_QUALITY + draw(MAX_QUALITY - MIN_QUALITY + 1, sample_id, epoch, tile)


def recompress(tiles: np.ndarray, sample_id: str, epoch: int, first_tile: int = 0) -> None:
    """Re-compress (n, 3, size, size) uint8 tiles in place; `first_tile` is the first one's place in the sample.

    4:2:0 chroma, as Pillow saves; 3 ms a tile of 448 pixels.
    """
    import simplejpeg

    for index, tile in enumerate(tiles, first_tile):
        data = simplejpeg.encode_jpeg(
            np.ascontiguousarray(tile.transpose(1, 2, 0)),
            quality=jpeg_quality(sample_id, epoch, index),
            colorspace="RGB",
            colorsubsampling="420",
            fastdct=False,
        )
        tile[:] = simplejpeg.decode_jpeg(data, "RGB").transpose(2, 0, 1)
