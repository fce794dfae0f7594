"""Size and orientation of an image from the first bytes of its file, without an image library where it matters.

JPEG, PNG and WebP, which nearly all training images are, are read here: 10 us, no plugin that might allocate or parse
more than it must (Pillow's WebP plugin sets up a whole canvas, its PNG plugin inflates every comment). So are formats
whose reader in Pillow takes time without bound: it reads a PPM's comment byte by byte, keeps all of a GIF's, and
decodes an ICO to learn its size. The others go through Pillow's header reader. Planning and decoding both use this
module, so the grid that is planned is the grid that is produced.
"""

from __future__ import annotations

import io
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import SampleError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

# First bytes read of a file; enough for a JPEG with an EXIF preview and a colour profile.
HEAD_BYTES = 1 << 16

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

# Segments, chunks or blocks that are walked of a file: many times what any encoder writes, half a second's work.
MAX_BLOCKS = 1 << 20

# Numbers that a PPM may hold where Pillow decodes it in Python: 1 us each.
MAX_SLOW_VALUES = 1 << 21

# A longer side is refused: decoders take time by the row, and real pictures end at a tenth of it.
MAX_SIDE_PIXELS = 1 << 20

# Formats left to Pillow: (signature, its offset, Pillow's name). Formats without a signature (TGA, ...) and formats
# that run programs or scripts (EPS, PDF, WMF) are not accepted.
_OTHERS = (
    (b"BM", 0, "BMP"),
    (b"II*\x00", 0, "TIFF"),
    (b"MM\x00*", 0, "TIFF"),
    (b"II+\x00", 0, "TIFF"),
    (b"MM\x00+", 0, "TIFF"),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", 0, "JPEG2000"),
    (b"\xff\x4f\xff\x51", 0, "JPEG2000"),
)


# What people take for images, or get instead of them: (signature, its offset, what to say).
_KNOWN_OTHERWISE = (
    (b"ftyp", 4, "is a video or another container of ISO media"),
    (b"\xff\x0a", 0, "is JPEG XL, which is not read: convert it"),
    (b"\x00\x00\x00\x0cJXL ", 0, "is JPEG XL, which is not read: convert it"),
    (b"8BPS", 0, "is a Photoshop file: export it"),
    (b"%PDF", 0, "is a PDF document"),
    (b"%!PS", 0, "is a PostScript program"),
    (b"\x1f\x8b", 0, "is compressed by gzip"),
    (b"PK\x03\x04", 0, "is a zip archive"),
    (b"version https://git-lfs", 0, "is a pointer of Git LFS, not the file: git lfs pull"),
)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of its picture.

    format: "JPEG", "PNG", "WEBP" or Pillow's name.
    width, height: pixels as stored.
    orientation: EXIF orientation, 1 (upright) to 8.
    components: colour components of a JPEG, else 0.
    num_bytes: bytes before the pixels of a JPEG, else 0.
    """

    format: str
    width: int
    height: int
    orientation: int = 1
    components: int = 0
    num_bytes: int = 0

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) once the orientation is applied."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


class _More(Exception):
    """The header goes on beyond the bytes at hand."""


class _TooCostlyError(Exception):
    """Decoding would take more time or memory than a picture may."""


def read_header(name: str, head: bytes, read_all: Callable[[], bytes], max_pixels: int) -> Header:
    """The header of an image.

    Args:
        name: of the image, for messages.
        head: the first bytes of the file (all of them, or at least 64).
        read_all: called for all bytes where `head` does not hold the whole header.
        max_pixels: width x height above which the image is refused.

    Raises:
        SampleError: `image_empty`, `image_not_an_image`, `image_truncated`, `image_corrupt`, `image_too_large`.
    """
    if not head:
        raise SampleError("image_empty", f"{name} has 0 bytes")
    parse = _parser_of(name, head)
    try:
        try:
            header = parse(head)
        except _More:
            header = parse(read_all())
    except _More:
        raise SampleError("image_truncated", f"{name} ends within its header") from None
    except _TooCostlyError as error:
        raise SampleError("image_too_large", f"{name}: {error}") from None
    except ValueError as error:
        raise SampleError("image_corrupt", f"{name}: {error}") from None
    if header.width < 1 or header.height < 1:
        raise SampleError("image_corrupt", f"{name} says it is {header.width} x {header.height} pixels")
    if max(header.width, header.height) > MAX_SIDE_PIXELS:
        detail = f"{name} is {header.width} x {header.height} pixels, a side of more than {MAX_SIDE_PIXELS}"
        raise SampleError("image_too_large", detail)
    if header.width * header.height > max_pixels:
        raise SampleError(
            "image_too_large",
            f"{name} is {header.width} x {header.height} pixels, more than max_image_pixels={max_pixels}",
        )
    return header


def file_ending(content: bytes) -> str:
    """The usual ending of an image file, `jpg`, `png` ..., by its header; `img` where that cannot be read."""
    try:
        name = read_header("", content, lambda: content, sys.maxsize).format
    except SampleError:
        return "img"
    return {"JPEG": "jpg", "JPEG2000": "jp2", "TIFF": "tif"}.get(name, name.lower())


def _parser_of(name: str, head: bytes) -> Callable[[bytes], Header]:
    if head.startswith(b"\xff\xd8\xff"):
        return _jpeg
    if head.startswith(PNG_SIGNATURE):
        return _png
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _webp
    if head.startswith((b"GIF87a", b"GIF89a")):
        return _gif
    if head.startswith(b"\x00\x00\x01\x00"):
        return _ico
    if head[:1] == b"P" and head[1:2] in (b"1", b"2", b"3", b"4", b"5", b"6"):
        return _pnm
    pillow_name = "AVIF" if _iso_kind(head) == "AVIF" else _found(_OTHERS, head)
    if pillow_name is not None:
        return lambda data: _by_pillow(name, pillow_name, data)
    raise SampleError("image_not_an_image", f"{name} is in no known image format: it {_looks(head)}")


def _found(table: Iterable[tuple[bytes, int, str]], head: bytes) -> str | None:
    """What a table of (signature, its offset, value) says of the file that begins so."""
    return next((value for signature, offset, value in table if head.startswith(signature, offset)), None)


_HEIC_BRANDS = frozenset((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis"))


def _iso_kind(head: bytes) -> str | None:
    """ "AVIF" or "HEIC" by the brands of a file of ISO media, whichever is named first; None for anything else."""
    if head[4:8] != b"ftyp":
        return None
    stop = min(int.from_bytes(head[:4], "big"), len(head), 1024)
    for brand in (head[8:12], *(head[at : at + 4] for at in range(16, stop - 3, 4))):
        if brand in (b"avif", b"avis"):
            return "AVIF"
        if brand in _HEIC_BRANDS:
            return "HEIC"
    return None


def _looks(head: bytes) -> str:
    """What a file that is no image seems to be, for messages. Reports repeat these, so its contents are not quoted."""
    if _iso_kind(head) == "HEIC":
        return "is HEIC, which is not read: convert it"
    if (words := _found(_KNOWN_OTHERWISE, head)) is not None:
        return words
    if head.lstrip()[:1] in (b"<", b"{"):
        return "looks like a web page or text"
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head[:64]):
        return "looks like text"
    return f"begins with {head[:4].hex(' ')}"


_NOT_PADDING = re.compile(rb"[^\xff]", re.DOTALL)


def _jpeg(data: bytes) -> Header:
    """Walk the segments up to the frame header."""
    position, orientation = 2, 0
    for _ in range(MAX_BLOCKS):
        position = data.find(b"\xff", position)
        after = None if position < 0 else _NOT_PADDING.search(data, position)
        if after is None or after.start() + 3 > len(data):
            raise _More
        position = after.start() - 1
        marker = data[position + 1]
        if marker <= 0x01 or 0xD0 <= marker <= 0xD8:  # no length follows
            position += 2
            continue
        if marker in (0xD9, 0xDA):
            raise ValueError("a JPEG without a frame header")
        length = int.from_bytes(data[position + 2 : position + 4], "big")
        stop = position + 2 + length
        if length < 2:
            raise ValueError("a JPEG segment of impossible length")
        if stop > len(data):
            raise _More
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if length < 8:
                raise ValueError("a JPEG frame header of impossible length")
            height, width = (int.from_bytes(data[position + at : position + at + 2], "big") for at in (5, 7))
            return Header("JPEG", width, height, orientation or 1, data[position + 9], stop)
        if marker == 0xE1 and not orientation and data.startswith(b"Exif\x00\x00", position + 4):
            orientation = exif_orientation(data[position + 4 : stop])
        position = stop
    raise ValueError(f"more than {MAX_BLOCKS} segments before the frame header")


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, stop) of the chunks of a PNG, as bytes of the file; the last one may end beyond the data.

    Raises:
        ValueError: more chunks than any encoder writes.
    """
    position = len(PNG_SIGNATURE)
    for _ in range(MAX_BLOCKS):
        if position + 8 > len(data):
            return
        stop = position + 12 + int.from_bytes(data[position : position + 4], "big")
        yield data[position + 4 : position + 8], position, stop
        position = stop
    raise ValueError(f"more than {MAX_BLOCKS} chunks")


def _png(data: bytes) -> Header:
    """Walk the chunks up to the pixels. An EXIF chunk after the pixels is not seen, here and at decoding alike."""
    size, orientation = None, 1
    for kind, start, stop in png_chunks(data):
        if size is not None and kind in (b"IDAT", b"IEND"):
            return Header("PNG", *size, orientation)
        if size is None and (kind, stop - start) != (b"IHDR", 25):
            raise ValueError("a PNG that does not begin with its header")
        if stop > len(data) and (size is None or kind == b"eXIf"):
            raise _More
        if size is None:
            if zlib.crc32(data[start + 4 : stop - 4]) != int.from_bytes(data[stop - 4 : stop], "big"):
                raise ValueError("the checksum of the PNG header is wrong")
            size = (
                int.from_bytes(data[start + 8 : start + 12], "big"),
                int.from_bytes(data[start + 12 : start + 16], "big"),
            )
        elif kind == b"eXIf":
            orientation = exif_orientation(data[start + 8 : stop - 4])
    raise _More


def _webp(data: bytes) -> Header:
    """The canvas of an extended file, else the one bitstream's size."""
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise _More
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(body[at : at + 3], "little") for at in (4, 7))
        return Header("WEBP", width, height, _webp_orientation(data) if body[0] & 0x08 else 1)
    if kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return Header("WEBP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = (int.from_bytes(body[at : at + 2], "little") & 0x3FFF for at in (6, 8))
        return Header("WEBP", width, height)
    raise ValueError("a WebP without a picture")


def _webp_orientation(data: bytes) -> int:
    """From the EXIF chunk, which comes after the pixels."""
    position = 12
    end = 8 + int.from_bytes(data[4:8], "little")
    for _ in range(MAX_BLOCKS):
        if position + 8 > end:
            break
        if position + 8 > len(data):
            raise _More
        stop = position + 8 + int.from_bytes(data[position + 4 : position + 8], "little")
        if data[position : position + 4] == b"EXIF":
            if stop > len(data):
                raise _More
            return exif_orientation(data[position + 8 : stop])
        position = stop + (stop & 1)
    return 1


def _gif(data: bytes) -> Header:
    """The screen, or more where the first frame reaches beyond it, as Pillow has it."""
    frame, _ = gif_frame(data)
    left, top, width, height = (int.from_bytes(data[frame + at : frame + at + 2], "little") for at in (1, 3, 5, 7))
    across, down = (int.from_bytes(data[at : at + 2], "little") for at in (6, 8))
    return Header("GIF", max(across, left + width), max(down, top + height))


def gif_frame(data: bytes) -> tuple[int, bytes]:
    """(where the first frame's descriptor begins, the graphic control extension before it or nothing).

    Raises _More where the data ends before; ValueError where there is no frame.
    """
    if len(data) < 13:
        raise _More
    position, control = gif_after_table(13, data[10]), b""
    for _ in range(MAX_BLOCKS):
        if position + 10 > len(data):
            raise _More
        kind = data[position]
        if kind == 0x2C:
            return position, control
        if kind == 0x3B:
            raise ValueError("a GIF without a picture")
        if kind != 0x21:  # junk, which decoders pass over
            position += 1
            continue
        stop = gif_after_blocks(data, position + 2)
        if stop is None:
            raise _More
        if data[position + 1] == 0xF9:
            control = data[position:stop]
        position = stop
    raise ValueError(f"more than {MAX_BLOCKS} blocks before the picture")


def gif_after_table(position: int, flags: int) -> int:
    """Where a table of colours ends that may begin at `position`."""
    return position + (3 << (flags & 7) + 1 if flags & 0x80 else 0)


def gif_after_blocks(data: bytes, position: int) -> int | None:
    """Where a run of sub-blocks ends; None where the data ends first. ValueError for more than any encoder writes."""
    for _ in range(4 * MAX_BLOCKS):
        if position >= len(data):
            return None
        if not data[position]:
            return position + 1
        position += 1 + data[position]
    raise ValueError("a picture in more blocks than any encoder writes")


def _ico(data: bytes) -> Header:
    """The picture that Pillow takes, the largest by the directory: its own header says how large it is."""
    count = int.from_bytes(data[4:6], "little")
    directory = data[6 : 6 + 16 * count]
    if len(directory) < 16 * count:
        raise _More
    if not count:
        raise ValueError("an ICO without a picture")
    entries = [directory[at : at + 16] for at in range(0, len(directory), 16)]
    largest = max((entry[0] or 256) * (entry[1] or 256) for entry in entries)
    # Of several of a size Pillow takes one by its depth; whichever it is, none may be larger than the size given here.
    sizes = [
        _ico_size(data, int.from_bytes(entry[12:16], "little"))
        for entry in entries
        if (entry[0] or 256) * (entry[1] or 256) == largest
    ]
    if len(set(sizes)) > 1:
        raise ValueError("an ICO whose pictures are not as large as its directory says")
    return Header("ICO", *sizes[0])


def _ico_size(data: bytes, offset: int) -> tuple[int, int]:
    if offset + 40 > len(data):
        raise _More
    if data.startswith(PNG_SIGNATURE, offset):
        return tuple(int.from_bytes(data[offset + at : offset + at + 4], "big") for at in (16, 20))  # type: ignore[return-value]
    if int.from_bytes(data[offset : offset + 4], "little") == 12:  # OS/2
        width, height = (int.from_bytes(data[offset + at : offset + at + 2], "little") for at in (4, 6))
    else:
        width, height = (int.from_bytes(data[offset + at : offset + at + 4], "little", signed=True) for at in (4, 8))
    return width, abs(height) // 2  # the picture and its mask, one upon the other


_PNM_GAP = rb"(?:\s|#[^\r\n]*[\r\n])+"
_PNM = re.compile(rb"P([1-6])" + 2 * (_PNM_GAP + rb"([0-9]{1,10})") + rb"(?:" + _PNM_GAP + rb"([0-9]{1,10}))?[\s#]")


def _pnm(data: bytes) -> Header:
    """PBM, PGM and PPM. The header, comments included, must lie within HEAD_BYTES."""
    found = _PNM.match(data, 0, HEAD_BYTES)
    if found is None:
        if len(data) < HEAD_BYTES:
            raise _More
        raise ValueError(f"a PPM header that is damaged, or longer than {HEAD_BYTES} bytes")
    kind, (width, height) = int(found[1]), (int(found[2]), int(found[3]))
    is_plain, num_values = kind <= 3, width * height * (3 if kind in (3, 6) else 1)
    raw_levels = (255, 65535) if kind == 5 else (255,)
    if (is_plain or (kind != 4 and int(found[4] or 0) not in raw_levels)) and num_values > MAX_SLOW_VALUES:
        raise _TooCostlyError(f"a PPM of this kind may hold {MAX_SLOW_VALUES} numbers, not {num_values}: convert it")
    return Header("PPM", width, height)


# How the numbers of a TIFF header are written, by its first bytes.
_TIFF_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\x00": "little", b"MM\x00*": "big"}


def exif_orientation(block: bytes) -> int:
    """The orientation tag of an EXIF block (a TIFF header and its first directory); 1 for anything broken."""
    block = block.removeprefix(b"Exif\x00\x00")  # with which some formats begin it
    order = _TIFF_ORDERS.get(block[:4])
    if order is None:
        return 1

    def number(at: int, size: int) -> int:
        return int.from_bytes(block[at : at + size], order)

    directory = number(4, 4)
    if directory < 8 or directory + 2 > len(block):
        return 1
    for entry in range(directory + 2, directory + 2 + 12 * number(directory, 2), 12):
        if entry + 12 > len(block):
            break
        if number(entry, 2) == 0x0112:
            kind = number(entry + 2, 2)
            value = number(entry + 8, 2 if kind == 3 else 4)
            return value if kind in (3, 4) and 1 <= value <= 8 else 1
    return 1


def _by_pillow(name: str, pillow_name: str, data: bytes) -> Header:
    from PIL import Image

    try:
        with quiet(pillow_name):
            image = open_by_pillow(pillow_name, data)
        if pillow_name == "TIFF":  # which Pillow turns itself
            _check_tiff_tiles(image)
            return Header(pillow_name, *image.size)
        exif = image.info.get("exif")
        return Header(pillow_name, *image.size, exif_orientation(exif if isinstance(exif, bytes) else b""))
    except Image.DecompressionBombError as error:
        raise SampleError("image_too_large", f"{name}: {error}") from None
    except _TooCostlyError:
        raise
    except Exception as error:  # a plugin may raise anything
        if len(data) == HEAD_BYTES:
            raise _More from None
        raise ValueError(f"a {pillow_name} file that cannot be read ({type(error).__name__}: {error})") from None


def _check_tiff_tiles(image: PillowImage) -> None:
    """Refuse tiles far larger than the picture: a tile is decoded whole, however little of it shows."""
    across, down = (image.tag_v2.get(tag, 0) for tag in (322, 323))  # type: ignore[attr-defined]
    if (
        isinstance(across, int)
        and isinstance(down, int)
        and across * down > max(4 * image.width * image.height, 1 << 22)
    ):
        raise _TooCostlyError(f"its tiles are {across} x {down} pixels, the picture is {image.width} x {image.height}")


@contextmanager
def quiet(pillow_name: str) -> Iterator[None]:
    """Silence Pillow's warnings of a TIFF or ICO: it raises, too, and a rejected sample is reported once."""
    if pillow_name not in ("TIFF", "ICO"):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def open_by_pillow(pillow_name: str, data: bytes) -> PillowImage:
    """A lazily opened Pillow image of one given format.

    Not by `Image.open`, which warns of and refuses large images by a process-wide limit: `max_image_pixels` decides.
    """
    from PIL import Image

    if pillow_name not in Image.OPEN:
        Image.preinit()
    if pillow_name not in Image.OPEN:
        Image.init()
    if pillow_name not in Image.OPEN:
        raise ValueError(f"this Pillow cannot read {pillow_name}")
    factory, _ = Image.OPEN[pillow_name]
    return factory(io.BytesIO(data), "")
