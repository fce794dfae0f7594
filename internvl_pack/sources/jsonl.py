"""Annotation files of JSON lines, read by a byte-offset index.

A row is a line that holds more than spaces, tabs and line ends; lines end at `\\n` alone, so that U+2028 inside a
string is text. Row numbers skip blank lines, line numbers in messages count them.

The index costs 4 bytes a row: the low 32 bits of each row's offset, and for each multiple of 4 GiB how many rows
start before it. Building it reads the file once in pieces of 1 MiB.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..errors import SampleError, UserError
from .addresses import pread_all
from .base import RawSample, Source, own_id
from .content import PieceHashes, mark_of_pieces
from .files import COMPRESSED, Stamp, open_file, read_at, stamp_of
from .image_refs import FolderResolver
from .index import BadIndexError, IndexWriter, index_path, is_increasing, read_index
from .parse import MAX_RECORD_BYTES, parse_record

logger = logging.getLogger(__name__)

KIND = "jsonl"
COLUMNS = {"low": "u4", "high": "u8", "blank": "u8"}
CHUNK_BYTES = 1 << 20
# A piece of a large file that one worker of `internvl-pack index` scans at a time.
PART_BYTES = 64 << 20
_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_NEWLINE = 10
_HEAD_BYTES = 64 << 10
_HINT_BYTES = 4 << 30  # indexing in memory takes seconds from here on
_REFUSED_STARTS = {
    b"PAR1": "is a Parquet file: write it as JSON lines, one object a line",
    b"version https://git-lfs": "is a pointer of Git LFS, not the file: fetch it with git lfs pull",
    b"\xff\xfe\0\0": "is UTF-32 text: write it as UTF-8 (iconv -f UTF-32 -t UTF-8)",
    b"\xff\xfe": "is UTF-16 text: write it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "is UTF-16 text: write it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
}

_LINES_OF_ARRAY = 'python -c "import json, sys; [print(json.dumps(row)) for row in json.load(open(sys.argv[1]))]"'


class Part(NamedTuple):
    """The rows that start in one range of bytes.

    `low` uint32: low halves of their offsets; `high` uint64: for each multiple of 2^32 in the range, the number of the
    part's rows before it; `blank` uint64: the same for each blank line; `pieces`: hashes of its bytes, for the content
    mark, which wants parts that start at multiples of `content.PIECE_BYTES`.
    """

    low: np.ndarray
    high: np.ndarray
    blank: np.ndarray
    pieces: bytes


def scan_lines(fd: int, start: int, stop: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, memoryview]]:
    """Line starts in bytes [start, stop) of a file of `size` bytes, a chunk at a time.

    Yields:
        (rows, blank, text): offsets of the lines with content (uint64), for each blank line how many of this
        chunk's rows stand before it (int64), and the chunk's bytes until the next chunk is asked for.
    """
    position = start
    if start == 0 and _has_bom(fd):
        position = len(_BOM)
    buffer = np.empty(CHUNK_BYTES + 1, np.uint8)  # the byte before the chunk, then the chunk
    view = memoryview(buffer.data)
    first = start == 0
    stop = min(stop, size)
    while position < stop:
        length = min(CHUNK_BYTES, stop - position)
        if first:
            buffer[0] = _NEWLINE  # a line starts where the file does
            have = 1 + os.preadv(fd, [view[1 : length + 1]], position)
        else:
            have = os.preadv(fd, [view[: length + 1]], position - 1)
        length = have - 1
        if length <= 0:
            return  # the file was cut while it was read
        inside = np.flatnonzero(buffer[:length] == _NEWLINE)  # a line starts at inside + position
        heads = buffer[1 : length + 1][inside]
        suspects = np.flatnonzero(heads <= 32)
        if suspects.size:
            blank = np.zeros(inside.size, bool)
            blank[suspects] = heads[suspects] == _NEWLINE
            text = None
            for suspect in suspects[~blank[suspects]]:
                if text is None:
                    text = bytes(view[1:have])
                blank[suspect] = _is_blank(fd, text, int(inside[suspect]), position)
            rows = inside[~blank]
            gaps = np.searchsorted(rows, inside[blank])
        else:
            rows, gaps = inside, np.empty(0, np.int64)
        yield rows.astype(np.uint64) + np.uint64(position), gaps, view[1:have]
        position += length
        first = False


def _has_bom(fd: int) -> bool:
    return os.pread(fd, len(_BOM), 0) == _BOM


def _is_blank(fd: int, text: bytes, at: int, base: int) -> bool:
    """Whether the line that starts at `text[at]` has nothing but blanks; it may go on beyond `text`."""
    end = text.find(b"\n", at)
    if end >= 0:
        return not text[at:end].strip(_BLANK)
    if text[at:].strip(_BLANK):
        return False
    position = base + len(text)
    while piece := os.pread(fd, CHUNK_BYTES, position):
        end = piece.find(b"\n")
        if piece[: end if end >= 0 else None].strip(_BLANK):
            return False
        if end >= 0:
            return True
        position += len(piece)
    return True


def scan_part(path: str, start: int, stop: int, size: int) -> Part:
    """Scan bytes [start, stop) of a file; parts of one file join to the scan of the whole."""
    lows, blanks = [], []
    pieces = PieceHashes(start)
    multiples = np.arange((start >> 32) + 1, (min(stop, size) >> 32) + 1, dtype=np.uint64) << np.uint64(32)
    high = np.zeros(len(multiples), np.uint64)
    count = 0
    fd = open_file(path)
    try:
        if start == 0 and _has_bom(fd):
            pieces.update(memoryview(_BOM))
        for rows, gaps, text in scan_lines(fd, start, stop, size):
            pieces.update(text)
            lows.append(rows.astype(np.uint32))  # keeps the low 32 bits
            blanks.append(gaps.astype(np.uint64) + np.uint64(count))
            high += np.searchsorted(rows, multiples).astype(np.uint64)
            count += len(rows)
    finally:
        os.close(fd)
    return Part(
        np.concatenate(lows) if lows else np.empty(0, np.uint32),
        high,
        np.concatenate(blanks) if blanks else np.empty(0, np.uint64),
        pieces.digest(),
    )


@dataclass(frozen=True)
class JsonlIndex:
    """Where each row starts. `low` (rows,) uint32, `high` (size >> 32,) uint64, `blank` (blank lines,) uint64.

    `content` is the mark of the file's bytes (content.py).
    """

    stamp: Stamp
    low: np.ndarray
    high: np.ndarray
    blank: np.ndarray
    content: str
    from_file: bool = False

    def __len__(self) -> int:
        return len(self.low)

    def start(self, row: int) -> int:
        """Offset of a row; the file's size for the row after the last."""
        if row == len(self.low):
            return self.stamp.size
        return int(self.low[row]) | int(np.searchsorted(self.high, np.uint64(row), "right")) << 32

    def line(self, row: int) -> int:
        """Number of the row's line in the file, from 1."""
        return row + 1 + int(np.searchsorted(self.blank, np.uint64(row), "right"))


def build_index(path: str, stamp: Stamp) -> JsonlIndex:
    """Index a file in memory."""
    part = scan_part(path, 0, stamp.size, stamp.size)
    return JsonlIndex(stamp, part.low, part.high, part.blank, mark_of_pieces(stamp.size, [part.pieces]))


class JsonlIndexWriter:
    """Writes a file's index from its parts, given in order."""

    def __init__(self, path: str, stamp: Stamp) -> None:
        self._stamp = stamp
        self._writer = IndexWriter(path, KIND, stamp, COLUMNS)
        self._pieces: list[bytes] = []
        self.num_rows = 0

    def add(self, part: Part) -> None:
        self._writer.append("high", part.high + np.uint64(self.num_rows))
        self._writer.append("blank", part.blank + np.uint64(self.num_rows))
        self._writer.append("low", part.low)
        self._pieces.append(part.pieces)
        self.num_rows += len(part.low)

    def finish(self) -> None:
        self._writer.finish({}, content=mark_of_pieces(self._stamp.size, self._pieces))

    def __enter__(self) -> JsonlIndexWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.__exit__(*error)


def load_index(path: str, stamp: Stamp) -> JsonlIndex | None:
    """The index file beside `path`, memory-mapped; None where there is none.

    Raises:
        BadIndexError: it cannot be used.
    """
    found = read_index(path, KIND, stamp, COLUMNS)
    if found is None:
        return None
    index = JsonlIndex(stamp, **found.columns, content=found.content, from_file=True)
    if not _is_sound(index):
        raise BadIndexError("is damaged")
    return index


def _is_sound(index: JsonlIndex) -> bool:
    """Whether an index could be of a file of that size: rows rise and lie within it. Whether lines start there shows
    when they are read."""
    rows, size = len(index), index.stamp.size
    if len(index.high) != size >> 32 or not (is_increasing(index.high) and is_increasing(index.blank)):
        return False
    if any(len(counts) and counts[-1] > rows for counts in (index.high, index.blank)):
        return False
    bounds = [0, *index.high.tolist(), rows]
    within = all(is_increasing(index.low[a:b], strictly=True) for a, b in pairwise(bounds))
    return within and (not rows or index.start(rows - 1) < size)


def check_format(path: str, stamp: Stamp) -> None:
    """Refuse what is no file of JSON lines as a whole: compressed, UTF-16, one JSON array or object over lines.

    Raises:
        UserError: says what it is and how to convert it.
    """
    fd = open_file(path)
    try:
        head = pread_all(fd, _HEAD_BYTES, 0)
        tail = pread_all(fd, _HEAD_BYTES, max(0, stamp.size - _HEAD_BYTES))
    finally:
        os.close(fd)
    for magic, (kind, cure) in COMPRESSED.items():
        if head.startswith(magic):
            raise UserError(f"annotation {path} is {kind}-compressed; rows are read by position: unpack it with {cure}")
    for magic, what in _REFUSED_STARTS.items():
        if head.startswith(magic):
            raise UserError(f"annotation {path} {what}")
    if head[257:262] == b"ustar":
        raise UserError(f"annotation {path} is a tar archive: name it under 'shards' instead of 'annotation'")
    if len(head) >= 6 and {head[0:5:2], head[1:6:2]} & {b"\0\0\0"} and head[:2] != b"\0\0":
        raise UserError(f"annotation {path} is UTF-16 text without a mark: write it as UTF-8 (iconv -t UTF-8)")
    if head.lstrip(_BLANK)[:1] == b"<":
        raise UserError(f"annotation {path} is a web page, not JSON lines: was its download refused?")
    if b"\n" not in head and head.count(b"\r") > 1 and _is_json(head.removeprefix(_BOM).split(b"\r", 1)[0]):
        raise UserError(
            f"annotation {path} ends its lines with carriage returns alone: write line feeds "
            f"(tr '\\r' '\\n' < {path}) and name that file"
        )
    lines = [line.strip(_BLANK) for line in head.removeprefix(_BOM).split(b"\n")]
    known_whole = len(lines) - (len(head) < stamp.size)  # the last line of the head may go on
    lines = [line for line in lines[:known_whole] if line] or lines[:1]
    target = os.path.splitext(path)[0] + (".lines.jsonl" if path.endswith(".jsonl") else ".jsonl")
    if _is_array(lines, tail.rstrip(_BLANK), whole=len(head) == stamp.size):
        raise UserError(
            f"annotation {path} is a JSON array, not JSON lines: convert it with "
            f"{_LINES_OF_ARRAY} {shlex.quote(path)} > {shlex.quote(target)} and name that file"
        )
    if lines[0].startswith(b"{") and lines[0].endswith((b"{", b"[")) and len(lines) > 1 and not _is_json(lines[1]):
        raise UserError(
            f"annotation {path} is one JSON object written over several lines, not JSON lines: "
            f"write one object a line (jq -c . {path} > {target})"
        )


def _is_array(lines: list[bytes], tail: bytes, *, whole: bool) -> bool:
    """Whether a file is one JSON array, rather than rows of which the first happens to be an array.

    Args:
        lines: the first lines, stripped, blank ones left out.
        tail: the end of the file, stripped.
        whole: `lines` are all there are.
    """
    first = lines[0]
    if not first.startswith(b"["):
        return False
    if first == b"[" or (whole and len(lines) == 1):
        return True
    if len(lines) > 1 and _is_json(first):
        return False
    return tail.endswith(b"]") or first.endswith((b",", b"{", b"["))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


class JsonlSource(Source):
    """The rows of one annotation file. See the module's docstring for what a row is.

    Args:
        root, hosts: see `FolderResolver`.

    Raises:
        UserError: the file cannot be read, or is no file of JSON lines (`check_format`).
    """

    def __init__(self, name: str, path: str, *, root: str = "", hosts: frozenset[str] = frozenset()) -> None:
        self.name = name
        self._path = path
        self._resolver = FolderResolver(root, hosts)
        try:
            stamp = stamp_of(path)
            check_format(path, stamp)
            self._index = _index_of(path, stamp)
        except (OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"annotation {path} of dataset {name!r} cannot be read: {error}") from None
        if not len(self._index):
            self.warnings = (f"annotation {path} holds no record",)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def content(self) -> str:
        """The mark of all bytes of the annotation file (content.py)."""
        return self._index.content

    def origin(self, row: int) -> str:
        return f"{self._path}:line {self._index.line(row)}"

    def read(self, row: int) -> RawSample:
        self.check_row(row)
        origin = self.origin(row)
        start, stop = self._index.start(row), self._index.start(row + 1)
        before = min(start, 1)  # the byte in front shows whether a line does start here
        length = min(stop - start, MAX_RECORD_BYTES + 1)
        if length <= 0:
            raise self._misplaced(origin)
        try:
            raw = read_at(self._path, self._index.stamp, start - before, length + before)
        except OSError as error:
            raise SampleError("record_unreadable", str(error.strerror), origin) from error
        if len(raw) <= before or (before and raw[0] != _NEWLINE and start != len(_BOM)):
            raise self._misplaced(origin)
        raw = raw[before:]
        end = raw.find(b"\n")  # blank lines may follow up to the next row
        if end >= 0:
            if raw[end:].strip(_BLANK):
                raise self._misplaced(origin)
            raw = raw[:end]
        elif len(raw) > MAX_RECORD_BYTES:
            raise SampleError("record_too_long", f"more than {MAX_RECORD_BYTES} bytes without a line end", origin)
        data = parse_record(raw.strip(_BLANK), origin)
        return RawSample(self.sample_id(row), own_id(data), origin, data, self._resolver)

    def _misplaced(self, origin: str) -> UserError:
        return UserError(
            f"{origin} does not start where the index says: {self._path} was changed in place while in use, or "
            f"{index_path(self._path)} is damaged; start again, and delete that file if it is there"
        )

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._index.from_file:  # a memory map would be copied whole
            state["_index"] = self._index.stamp
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self._index, Stamp):
            self._index = _index_of(self._path, self._index)


def _index_of(path: str, stamp: Stamp) -> JsonlIndex:
    index = None
    try:
        index = load_index(path, stamp)
    except BadIndexError as error:
        logger.warning("index %s %s; it is not used (internvl-pack index renews it)", index_path(path), error)
    if index is None:
        if stamp.size >= _HINT_BYTES:
            logger.warning(
                "indexing %s (%.1f GB) in memory; internvl-pack index does it once for all runs", path, stamp.size / 1e9
            )
        index = build_index(path, stamp)
    return index
