"""Size and orientation of an image from the first bytes of its file, without an image library where it matters.

JPEG, PNG and WebP, which nearly all training images are, are read here: 10 us, no plugin that might allocate or parse
more than it must (Pillow's WebP plugin sets up a whole canvas, its PNG plugin inflates every comment). The other
formats go through Pillow's header reader. Planning and decoding both use this module, so the grid that is planned is
the grid that is produced.
"""

from __future__ import annotations

import io
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from internvl_pack.errors import SampleError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

#: First bytes read of a file; enough for a JPEG with an EXIF preview and a colour profile.
HEAD_BYTES = 1 << 16

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

#: Formats left to Pillow: (signature, its offset, Pillow's name). Formats without a signature (TGA, ...) and formats
#: that run programs or scripts (EPS, PDF, WMF) are not accepted.
_OTHERS = (
    (b"GIF87a", 0, "GIF"),
    (b"GIF89a", 0, "GIF"),
    (b"BM", 0, "BMP"),
    (b"II*\x00", 0, "TIFF"),
    (b"MM\x00*", 0, "TIFF"),
    (b"II+\x00", 0, "TIFF"),
    (b"MM\x00+", 0, "TIFF"),
    (b"ftypavif", 4, "AVIF"),
    (b"ftypavis", 4, "AVIF"),
    (b"ftypmif1", 4, "AVIF"),  # as written by some encoders; with HEIC inside Pillow refuses it
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", 0, "JPEG2000"),
    (b"\xff\x4f\xff\x51", 0, "JPEG2000"),
    (b"\x00\x00\x01\x00", 0, "ICO"),
    *((b"P%d" % number, 0, "PPM") for number in range(1, 7)),
)


#: What people take for images, or get instead of them: (signature, its offset, what to say).
_KNOWN_OTHERWISE = (
    *((b"ftyp" + brand, 4, "is HEIC, which is not read: convert it") for brand in (b"heic", b"heix", b"hevc", b"heim")),
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


def read_header(name: str, head: bytes, read_all: Callable[[], bytes], max_pixels: int) -> Header:
    """The header of an image.

    Args:
        name: of the image, for messages.
        head: the first bytes of the file (all of them, or at least 64).
        read_all: called for all bytes where `head` does not hold the whole header.
        max_pixels: width x height above which the image is refused.

    Raises SampleError: `image_empty`, `image_not_an_image`, `image_truncated`, `image_corrupt`, `image_too_large`.
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
    except ValueError as error:
        raise SampleError("image_corrupt", f"{name}: {error}") from None
    if header.width < 1 or header.height < 1:
        raise SampleError("image_corrupt", f"{name} says it is {header.width} x {header.height} pixels")
    if header.width * header.height > max_pixels:
        raise SampleError(
            "image_too_large",
            f"{name} is {header.width} x {header.height} pixels, more than max_image_pixels={max_pixels}",
        )
    return header


def _parser_of(name: str, head: bytes) -> Callable[[bytes], Header]:
    if head.startswith(b"\xff\xd8\xff"):
        return _jpeg
    if head.startswith(PNG_SIGNATURE):
        return _png
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _webp
    if (pillow_name := _found(_OTHERS, head)) is not None:
        return lambda data: _by_pillow(name, pillow_name, data)
    raise SampleError("image_not_an_image", f"{name} is in no known image format: it {_looks(head)}")


def _found(table: Iterable[tuple[bytes, int, str]], head: bytes) -> str | None:
    """What a table of (signature, its offset, value) says of the file that begins so."""
    return next((value for signature, offset, value in table if head.startswith(signature, offset)), None)


def _looks(head: bytes) -> str:
    """What a file that is no image seems to be, for the message."""
    if (words := _found(_KNOWN_OTHERWISE, head)) is not None:
        return words
    if head.lstrip()[:1] in (b"<", b"{"):
        return "looks like a web page or text"
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head[:64]):
        return f"looks like text: {head[:40].decode('ascii')!r}"
    return f"begins with {head[:8].hex(' ')}"


def _jpeg(data: bytes) -> Header:
    """Walk the segments up to the frame header."""
    position, orientation = 2, 0
    while True:
        position = data.find(b"\xff", position)
        if position < 0 or position + 4 > len(data):
            raise _More
        marker = data[position + 1]
        if marker == 0xFF:  # padding
            position += 1
            continue
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
            orientation = exif_orientation(data[position + 10 : stop])
        position = stop


def _png(data: bytes) -> Header:
    """Walk the chunks up to the pixels. An EXIF chunk after the pixels is not seen, here and at decoding alike."""
    position, size, orientation = len(PNG_SIGNATURE), None, 1
    while True:
        if position + 8 > len(data):
            raise _More
        length = int.from_bytes(data[position : position + 4], "big")
        kind = data[position + 4 : position + 8]
        stop = position + 12 + length
        if size is None:
            if kind != b"IHDR" or length != 13:
                raise ValueError("a PNG that does not begin with its header")
            if stop > len(data):
                raise _More
            if zlib.crc32(data[position + 4 : stop - 4]) != int.from_bytes(data[stop - 4 : stop], "big"):
                raise ValueError("the checksum of the PNG header is wrong")
            size = (int.from_bytes(data[position + 8 : position + 12], "big"),
                    int.from_bytes(data[position + 12 : position + 16], "big"))  # fmt: skip
        elif kind in (b"IDAT", b"IEND"):
            return Header("PNG", *size, orientation)
        elif kind == b"eXIf":
            if stop > len(data):
                raise _More
            orientation = exif_orientation(data[position + 8 : stop - 4])
        position = stop


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
    while position + 8 <= end:
        if position + 8 > len(data):
            raise _More
        stop = position + 8 + int.from_bytes(data[position + 4 : position + 8], "little")
        if data[position : position + 4] == b"EXIF":
            if stop > len(data):
                raise _More
            return exif_orientation(data[position + 8 : stop].removeprefix(b"Exif\x00\x00"))
        position = stop + (stop & 1)
    return 1


#: How the numbers of a TIFF header are written, by its first bytes.
_TIFF_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\x00": "little", b"MM\x00*": "big"}


def exif_orientation(block: bytes) -> int:
    """The orientation tag of an EXIF block (a TIFF header and its first directory); 1 for anything broken."""
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
        orientation = 1 if pillow_name == "TIFF" else exif_orientation(_exif_of(image))  # Pillow turns TIFF itself
        width, height = image.size
        return Header(pillow_name, width, height, orientation)
    except Image.DecompressionBombError as error:
        raise SampleError("image_too_large", f"{name}: {error}") from None
    except Exception as error:  # a plugin may raise anything
        if len(data) == HEAD_BYTES:
            raise _More from None
        raise ValueError(f"a {pillow_name} file that cannot be read ({type(error).__name__}: {error})") from None


def _exif_of(image: PillowImage) -> bytes:
    block = image.info.get("exif")
    return block.removeprefix(b"Exif\x00\x00") if isinstance(block, bytes) else b""


@contextmanager
def quiet(pillow_name: str) -> Iterator[None]:
    """Pillow's TIFF reader warns of what it then raises, line by line; a rejected sample is reported once."""
    if pillow_name != "TIFF":
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
