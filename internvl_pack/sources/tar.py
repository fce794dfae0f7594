"""Headers of tar archives by position: ustar, GNU and pax, checked, and found again after damage.

Written here rather than taken from `tarfile`, which stops without a word at the first damaged header and reads only
from front to back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .addresses import pread_all

BLOCK = 512
# Hard and symbolic links, devices, pipes, parts of archives over several volumes.
LINKS_AND_DEVICES = b"12346M"
FOLDERS_AND_LABELS = b"5DV"
_EXTENSIONS = b"LKxXg"
_MAX_EXTENSION_BYTES = 1 << 20  # a long name or pax header that says it is longer is damage
_RESYNC_BYTES = 1 << 20
_WINDOW_BYTES = 4096


class DamagedHeaderError(Exception):
    """No header can be read at `position`."""

    def __init__(self, position: int, text: str) -> None:
        super().__init__(text)
        self.position, self.text = position, text


class Member(NamedTuple):
    """One member: where its first header starts, its name as stored, type byte, where its data is and what follows."""

    header: int
    name: str
    type: bytes
    data: int
    size: int
    next: int
    sparse: bool


# (offset, number of bytes) -> bytes, fewer only at the end of the file.
Reader = Callable[[int, int], bytes]


def windowed(read: Reader) -> Reader:
    """Reads a little more than asked and keeps it: after a header comes the record, or soon the next header."""
    base, held = 0, b""

    def read_window(offset: int, num_bytes: int) -> bytes:
        nonlocal base, held
        at = offset - base
        if at < 0 or at + num_bytes > len(held):
            base, held = offset, read(offset, max(num_bytes, _WINDOW_BYTES))
            at = 0
        return held[at : at + num_bytes]

    return read_window


def _number(raw: bytes) -> int | None:
    """An octal or base-256 field; None where it is neither."""
    if raw[0] & 0x80:
        return int.from_bytes(raw[1:], "big") if raw[0] == 0x80 else None  # 0xff: negative
    text = raw.split(b"\0", 1)[0].strip(b" ")
    if not text:
        return 0
    if text.strip(b"01234567"):
        return None
    return int(text, 8)


def _is_header(block: bytes) -> bool:
    """Whether the checksum fits (of unsigned bytes, or of signed ones as some old programs wrote it)."""
    stored = _number(block[148:156])
    if stored is None:
        return False
    others = block[:148] + block[156:]
    if stored == sum(others.translate(None, b"\0")) + 8 * 32:  # its own field counts as spaces
        return True
    signed = sum(byte - 256 if byte > 127 else byte for byte in others)
    return stored == signed + 256


def _round_up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _pax_fields(raw: bytes, position: int) -> dict[str, str]:
    """Records `length key=value\\n` of an extended header."""
    fields = {}
    at = 0
    while at < len(raw) and raw[at] != 0:
        space = raw.find(b" ", at, at + 20)
        length = raw[at:space] if space > 0 else b""
        stop = at + int(length) if length.isdigit() else 0
        if not at < stop <= len(raw) or raw[stop - 1 : stop] != b"\n":
            raise DamagedHeaderError(position, "damaged extended header")
        key, _, value = raw[space + 1 : stop - 1].partition(b"=")
        fields[key.decode("utf-8", "backslashreplace")] = value.decode("utf-8", "backslashreplace")
        at = stop
    return fields


def read_member(read: Reader, position: int) -> Member | None:
    """The member whose headers start at `position`, long-name (GNU) and extended (pax) headers joined.

    Returns None for a block of zeros (or what a cut left of it), which ends an archive.

    Raises:
        DamagedHeaderError: the bytes there are no header.
    """
    start = position
    long_name: str | None = None
    extended: dict[str, str] = {}
    while True:
        block = read(position, BLOCK)
        if position == start and block and not block.strip(b"\0"):
            return None
        if len(block) < BLOCK:
            raise DamagedHeaderError(position, "the archive is cut inside a header")
        if not _is_header(block):
            raise DamagedHeaderError(position, "damaged header")
        kind = block[156:157]
        size = _number(block[124:136])
        if size is None:
            raise DamagedHeaderError(position, "damaged size in a header")
        data = position + BLOCK
        if kind not in _EXTENSIONS:
            break
        if size > _MAX_EXTENSION_BYTES:
            raise DamagedHeaderError(position, f"an extended header of {size} bytes")
        payload = read(data, size)
        if len(payload) < size:
            raise DamagedHeaderError(position, "the archive is cut inside an extended header")
        if kind == b"L":
            long_name = _text(payload)
        elif kind in b"xX":
            extended = _pax_fields(payload, position)
        position = data + _round_up(size)  # global headers hold comments; links are not followed
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and block[345]:
        name = f"{_text(block[345:500])}/{name}"
    name = extended.get("path", long_name if long_name is not None else name)
    if "size" in extended:
        if not extended["size"].isdecimal() or len(extended["size"]) > 20:
            raise DamagedHeaderError(position, "damaged size in an extended header")
        size = int(extended["size"])
    if kind in b"0\0" and name.endswith("/"):
        kind = b"5"  # how old programs wrote folders
    sparse = kind == b"S" or any(key.startswith("GNU.sparse.") for key in extended)
    if kind == b"S":
        more = block[482]
        while more:
            extension = read(data, BLOCK)
            if len(extension) < BLOCK:
                raise DamagedHeaderError(position, "the archive is cut inside a sparse header")
            more = extension[504]
            data += BLOCK
    if kind in b"123456":
        size = 0  # links, devices and folders have no data
    return Member(start, name, kind, data, size, data + _round_up(size), sparse)


def find_header(fd: int, start: int, size: int) -> int | None:
    """Where the next intact header starts at or after `start`, at any byte: damage may have shifted the rest.

    Headers without the ustar mark (before 1988) are not found.
    """
    position = start
    while position < size:
        chunk = pread_all(fd, _RESYNC_BYTES + BLOCK, position)
        at = chunk.find(b"ustar", 257)
        while 0 <= at - 257 < _RESYNC_BYTES:
            block = chunk[at - 257 : at + 255]
            # a full name field with no long-name header before it may be the stump of a longer name
            if len(block) == BLOCK and block[0] and block[99] == 0 and _is_header(block):
                return position + at - 257
            at = chunk.find(b"ustar", at + 1)
        position += _RESYNC_BYTES
    return None
