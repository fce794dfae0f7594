"""From compressed bytes to RGB pixels: the one place where a decoder is chosen.

    JPEG, 1 or 3 components   simplejpeg (libjpeg-turbo): bit-equal to Pillow, a fifth faster, reports damage that
                              Pillow passes over, and can decode at 1/2, 1/4 or 1/8 of the size
    JPEG, 4 components        simplejpeg to CMYK, then Pillow's CMYK to RGB
    everything else           Pillow, restricted to the format that the signature names

Rules for what is not plain RGB stand in docs/encoding.md. Memory: at most 32 bytes a pixel besides the file's bytes
(measured: 3 for a baseline JPEG, 9 for an RGB PNG, 25 for a WebP with alpha).
"""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SampleError
from .headers import (
    PNG_SIGNATURE,
    Header,
    gif_after_blocks,
    gif_after_table,
    gif_frame,
    open_by_pillow,
    png_chunks,
    quiet,
)

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

# A scaled decode must leave this many times the target's pixels along each edge. Powers of two only: other scales are
# slower and shift pixels. On photographs the result is within 1 level of the full decode on average.
SCALED_DECODE_MARGIN = 1.5

# Complaints of libjpeg that do not touch pixels.
_HARMLESS_IN_JPEG = (
    "unknown JFIF revision",
    "Unknown Adobe color transform",
    "Invalid SOS parameters for sequential JPEG",
    "Inconsistent progression sequence",
    "bad ICC marker",
)
# Bytes between the pixels and a marker, and which one. Padding is not damage.
_EXTRANEOUS = re.compile(r"(\d+) extraneous bytes before marker 0x([0-9a-f]{2})")
_MAX_PADDINGS = 16

# Scans of a JPEG: encoders write about 10 of a progressive one, and each takes 0.6 ms a megapixel.
MAX_SCANS = 100
_START_OF_SCAN = b"\xff\xda"
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]", re.DOTALL)  # one that a length or the end follows
# Comments of a PPM in text, each of which costs Pillow a copy of what it reads.
MAX_COMMENTS = 1000

_UNUSUAL_JPEG = "Could not determine subsampling level"  # sampling factors that only Pillow takes

# Pixels of a band of rows that is converted at once: some 1 MB.
_BAND_PIXELS = 1 << 18

_pillow_lock = threading.Lock()


def decode_rgb(
    name: str,
    data: bytes,
    header: Header,
    target: tuple[int, int] | None = None,
    *,
    allow_truncated: bool = False,
    background: tuple[int, int, int] | None = None,
) -> tuple[np.ndarray, int]:
    """(pixels, scale): the first frame as stored, not turned upright, (height, width, 3) uint8, writable.

    `scale` is 1, or 2, 4, 8 for a JPEG that was decoded at that fraction of its size, rounded up: its last row and
    column then stand for fewer pixels of the original than the others.

    Args:
        target: (width, height) in stored orientation that the pixels will be resized to. A JPEG much larger than
            that comes at a fraction of its size.
        allow_truncated: accept damaged and cut-off files, what is missing grey or black.
        background: RGB that transparent pixels are composited on. None drops alpha, as Pillow's `convert("RGB")` does.

    Raises:
        SampleError: `image_truncated`, `image_corrupt`, `image_mode`, `image_too_large`.
    """
    from PIL import Image

    try:
        if header.format == "JPEG" and header.components in (1, 3, 4):
            scale = _jpeg_scale(header, target)
            pixels = _decode_jpeg(data, header, scale, allow_truncated)
            if pixels is not None:
                return pixels, scale
        elif header.format == "PNG":
            data = _checked_png(data, allow_truncated)
        elif header.format == "WEBP" and not allow_truncated and len(data) < 8 + int.from_bytes(data[4:8], "little"):
            raise SampleError("image_truncated", "shorter than its own header says")
        elif header.format == "GIF":
            data = _first_gif_frame(data, allow_truncated)
        elif header.format == "PPM" and data[1:2] in b"123" and data.count(b"#") > MAX_COMMENTS:
            raise SampleError("image_corrupt", f"more than {MAX_COMMENTS} comments")
        return _decode_by_pillow(data, header.format, allow_truncated, background), 1
    except SampleError as error:
        raise SampleError(error.reason, f"{name}: {error.detail}") from None
    except ImportError:  # of a package, not of this image
        raise
    except MemoryError:
        detail = f"{name}: no memory for {header.width} x {header.height} pixels; lower max_image_pixels"
        raise SampleError("image_too_large", detail) from None
    except Image.DecompressionBombError as error:  # some plugins check their parts by Pillow's own limit
        raise SampleError("image_too_large", f"{name}: {error}") from None
    except Exception as error:  # decoders raise whatever their plugin raises; one image must not end a worker
        reason = "image_truncated" if "truncated" in str(error) else "image_corrupt"
        raise SampleError(reason, f"{name}: {type(error).__name__}: {error}") from None


def _decode_jpeg(data: bytes, header: Header, scale: int, allow_truncated: bool) -> np.ndarray | None:
    """By simplejpeg; None where it cannot (rare codings), which Pillow then decides."""
    import simplejpeg

    # Counted where there may be as many; what follows the picture, a film say, may hold the marker by chance.
    if data.count(_START_OF_SCAN) > MAX_SCANS and _num_scans(data) > MAX_SCANS:
        raise SampleError("image_too_large", f"more than {MAX_SCANS} scans, each of which is a pass over the picture")
    if not allow_truncated and data.rfind(b"\xff\xd9") < header.num_bytes:
        # Decoders take a progressive JPEG without its last scans for whole. Coded pixels never hold this marker.
        raise SampleError("image_truncated", "the file ends before the picture does")
    colorspace = "CMYK" if header.components == 4 else "RGB"

    def decode(data: bytes, strict: bool) -> np.ndarray:
        return simplejpeg.decode_jpeg(
            data,
            colorspace,
            min_height=-(-header.height // scale),
            min_width=-(-header.width // scale),
            min_factor=scale,
            strict=strict,
        )

    try:
        pixels = _past_padding(data, partial(decode, strict=not allow_truncated))
    except ValueError as error:
        message = str(error)
        if _UNUSUAL_JPEG in message or allow_truncated:
            return None
        if "Premature end" in message:
            raise SampleError("image_truncated", message) from None
        if not any(text in message for text in _HARMLESS_IN_JPEG):
            raise SampleError("image_corrupt", message) from None
        pixels = decode(data, strict=False)
    return _cmyk_to_rgb(pixels) if header.components == 4 else pixels


def _num_scans(data: bytes) -> int:
    """Scans before the end marker, counted to MAX_SCANS + 1."""
    position, count = 2, 0
    while count <= MAX_SCANS and (found := _MARKER.search(data, position)) is not None:
        position = found.end()
        if found[0][-1] == 0xD9:
            break
        if found[0] == _START_OF_SCAN:
            count += 1
        position += int.from_bytes(data[position : position + 2], "big")
    return count


def _past_padding(data: bytes, decode: Callable[[bytes], np.ndarray]) -> np.ndarray:
    """`decode` of a JPEG, without the zeros that some cameras write in front of a marker.

    The decoder reports them as it reports coded pixels that are left over. Those are not zeros.
    """
    for _ in range(_MAX_PADDINGS):
        try:
            return decode(data)
        except ValueError as error:
            found = _EXTRANEOUS.search(str(error))
            padding = found and bytes(int(found[1])) + b"\xff" + bytes.fromhex(found[2])
            if not padding or len(padding) > len(data) or (place := data.rfind(padding)) < 0:
                raise
            data = data[:place] + data[place + len(padding) - 2 :]
    return decode(data)


def _jpeg_scale(header: Header, target: tuple[int, int] | None) -> int:
    """The largest of 1, 2, 4, 8 by which the decoder may shrink."""
    if target is None:
        return 1
    room = min(header.width / target[0], header.height / target[1]) / SCALED_DECODE_MARGIN
    return next(scale for scale in (8, 4, 2, 1) if scale <= room or scale == 1)


def _cmyk_to_rgb(pixels: np.ndarray) -> np.ndarray:
    """JPEG's CMYK is read by Adobe's convention, 0 for full ink, with and without the Adobe marker.

    That is what Pillow and browsers do; nothing in a file shows that it means the opposite.
    """
    from PIL import Image

    height, width, _ = pixels.shape
    return np.array(Image.frombuffer("CMYK", (width, height), pixels, "raw", "CMYK;I", 0, 1).convert("RGB"))


_PNG_KEPT = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))


def _checked_png(data: bytes, allow_truncated: bool) -> bytes:
    """The PNG with its checksums verified, and nothing but its first picture in it.

    Pillow does not verify the checksums of pixel data, refuses files with comments or profiles above a process-wide
    limit, and would look for animation frames; what is not needed for the picture is left out before it sees it.
    """
    kept, end, stripped = [PNG_SIGNATURE], len(PNG_SIGNATURE), False
    for kind, start, stop in png_chunks(data):
        if stop > len(data):
            break
        if kind in _PNG_KEPT:
            checksum = zlib.crc32(memoryview(data)[start + 4 : stop - 4])
            if checksum != int.from_bytes(data[stop - 4 : stop], "big") and not allow_truncated:
                raise SampleError(
                    "image_corrupt", f"the checksum of the {kind.decode()} chunk at byte {start} is wrong"
                )
            kept.append(data[start:stop])
        else:
            stripped = True
        if kind == b"IEND":
            return b"".join(kept) if stripped else data
        end = stop
    if not allow_truncated:
        raise SampleError("image_truncated", "the file ends before the picture does")
    return b"".join([*kept, data[end:]]) if stripped else data


_MARK_PIXELS = 1 << 16  # of a row that are marked


def _mark_last_rows(image: PillowImage) -> bytes:
    """Give an image that is to be decoded its memory, with a pattern in its last rows. Returns such a row's bytes."""
    from PIL import Image

    blank = Image.new(image.mode, image.size, None)
    width = min(image.width, _MARK_PIXELS)
    stripes = bytes(range(1, 256)) * (8 * width // 255 + 1)  # no mode takes more than 8 bytes a pixel
    num_bytes = len(Image.new(image.mode, (width, 1)).tobytes())
    mark = Image.frombytes(image.mode, (width, 1), stripes[:num_bytes])
    for row in _last_rows(image):
        blank.paste(mark, (0, row))
    image.im = blank.im
    return mark.tobytes()


def _last_rows(image: PillowImage) -> range:
    """Of an interlaced picture the last row that a decoder writes is the last odd one."""
    return range(max(0, image.height - 2), image.height)


def _png_has_all_rows(data: bytes) -> bool:
    """Inflate the pixel data and count. Costs as much as decoding: asked only where a last row was not written."""
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    bits = data[24] * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(data[25], 1)
    passes = [(0, 0, 1, 1)]
    if data[28]:  # Adam7: (left, top, step across, step down)
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    left = 0
    for x, y, across, down in passes:
        columns, rows = max(0, -(-(width - x) // across)), max(0, -(-(height - y) // down))
        left += rows * (1 + (columns * bits + 7) // 8) if columns else 0
    inflater = zlib.decompressobj()
    for kind, start, stop in png_chunks(data):
        rest = data[start + 8 : stop - 4] if kind == b"IDAT" else b""
        while rest and left > 0 and not inflater.eof:
            left -= len(inflater.decompress(rest, 1 << 20))
            rest = inflater.unconsumed_tail
    if left > 0 and not inflater.eof:
        left -= len(inflater.flush())
    return left <= 0


def _first_gif_frame(data: bytes, allow_truncated: bool) -> bytes:
    """The GIF with nothing but its first picture in it, which is all that is judged and decoded of it.

    Pillow is content with a first frame, and fills a cut one; it keeps comments of any length.
    """
    frame, control = gif_frame(data)
    stop = gif_after_blocks(data, gif_after_table(frame + 10, data[frame + 9]) + 1)
    if stop is None and not allow_truncated:
        raise SampleError("image_truncated", "the file ends before the picture does")
    return data[: gif_after_table(13, data[10])] + control + data[frame:stop] + b";"


@contextmanager
def _lenient_pillow() -> Iterator[None]:
    """Pillow knows truncation tolerance only as a process-wide switch: on for one decode, under a lock, then back."""
    from PIL import ImageFile

    with _pillow_lock:
        before = ImageFile.LOAD_TRUNCATED_IMAGES
        ImageFile.LOAD_TRUNCATED_IMAGES = True
        try:
            yield
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = before


def _decode_by_pillow(
    data: bytes, pillow_name: str, allow_truncated: bool, background: tuple[int, int, int] | None
) -> np.ndarray:
    with _lenient_pillow() if allow_truncated else nullcontext(), quiet(pillow_name):
        image = open_by_pillow(pillow_name, data)
        # Pillow takes a PNG stream that ends well but early for a picture, with the rest as it was before.
        mark = _mark_last_rows(image) if pillow_name == "PNG" and not allow_truncated else None
        image.load()
    unwritten = mark is not None and (
        image.height == 1  # a single row is written in parts where the picture is interlaced
        or any(_rows(image, row, row + 1, _MARK_PIXELS).tobytes() == mark for row in _last_rows(image))
    )
    if unwritten and not _png_has_all_rows(data):
        raise SampleError("image_truncated", "its pixel data ends before the picture does")
    return _to_rgb(image, background)


def _to_rgb(image: PillowImage, background: tuple[int, int, int] | None) -> np.ndarray:
    """Any Pillow mode to (height, width, 3) uint8.

    Band by band, so that what lies between the decoded image and the result stays in the cache and out of memory.
    """
    mode = image.mode
    if mode == "I" or mode.startswith("I;16"):
        return _grey(_integers_to_bytes(np.asarray(image)))
    if mode == "F":
        return _grey(_floats_to_bytes(np.asarray(image)))
    as_rgb = _opaque_rgb
    if background is None:
        image.info.pop("transparency", None)  # of no use any more, and Pillow warns of it
    elif image.has_transparency_data:
        as_rgb = partial(_on_background, background=background)
    pixels = np.empty((image.height, image.width, 3), dtype=np.uint8)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        stop = min(top + rows, image.height)
        pixels[top:stop] = np.asarray(as_rgb(_rows(image, top, stop)))
    return pixels


def _rows(image: PillowImage, top: int, stop: int, max_width: int = 1 << 30) -> PillowImage:
    """Rows [top, stop) of a loaded image. Not by `crop`, which heeds a process-wide limit of pixels."""
    return image._new(image.im.crop((0, top, min(image.width, max_width), stop)))


def _grey(levels: np.ndarray) -> np.ndarray:
    return np.repeat(levels[:, :, None], 3, axis=2)


def _opaque_rgb(image: PillowImage) -> PillowImage:
    """The colours without alpha: what lies under transparent pixels shows."""
    return image if image.mode == "RGB" else _converted(image, "RGB")


def _on_background(image: PillowImage, background: tuple[int, int, int]) -> PillowImage:
    """Transparent pixels show the background, half transparent ones are mixed with it."""
    from PIL import Image

    rgba = _converted(image, "RGBA")
    paper = Image.new("RGB", rgba.size, background)
    paper.paste(rgba, mask=rgba.getchannel("A"))
    return paper


_WITHOUT_PREMULTIPLICATION = {"La": "LA", "RGBa": "RGBA"}  # the only way on that Pillow knows


def _converted(image: PillowImage, mode: str) -> PillowImage:
    try:
        return image.convert(_WITHOUT_PREMULTIPLICATION.get(image.mode, image.mode)).convert(mode)
    except ValueError as error:
        raise SampleError("image_mode", f"pixels of mode {image.mode}: {error}") from None


def _integers_to_bytes(values: np.ndarray) -> np.ndarray:
    """16-bit levels to 8 bits by the depth in use: white is 65535, or 4095 or 255 where nothing is brighter.

    Sensors write 12 bits, and label maps 8, into 16-bit files; by 65535 both would turn black.
    """
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 0xFFFF:
        raise SampleError("image_mode", f"grey levels from {low} to {high}; integers must lie in 0 to 65535")
    shift = 8 if high > 0xFFF else 4 if high > 0xFF else 0
    return (values >> shift).astype(np.uint8)


def _floats_to_bytes(values: np.ndarray) -> np.ndarray:
    """Floats in 0 to 1 are scaled by 255, floats in 0 to 255 are levels; rounded to the nearest."""
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 255):  # false for NaN, too
        raise SampleError("image_mode", f"grey levels from {low:g} to {high:g}; floats must lie in 0 to 1 or 0 to 255")
    levels = values * np.float32(255 if high <= 1 else 1)
    return np.rint(levels, out=levels).astype(np.uint8)
