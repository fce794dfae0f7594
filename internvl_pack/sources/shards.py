"""WebDataset tar shards, read by position: an index of members instead of a stream.

The archive's headers are walked here rather than by `tarfile`, which stops without a word at the first damaged one.
What can be delivered is; every problem is said once with shard, key and byte position.

Keys follow webdataset's rule: the path up to the first dot of its base name (`a.b/c.d.jpg` has key `a.b/c`, ending
`d.jpg`; endings compare in lower case; `./` in front is dropped). A sample is the `.json` member of a key, its record,
and the key's other members. One addition for dots in base names (`22.05.jpg` and `22.05.json`): an ending `X.json`
starts a sample `key.X` of its own where the key has no plain `.json`, or where another member has an ending `X.*`.

Members of a key that are not adjacent are joined, with one warning a shard. Rows that cannot be samples (no record,
a member twice, a link or device, an absolute name or one with `..`) stay rows: reading them raises SampleError.
Nothing is ever written to disk and no link is followed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import SampleError, UserError
from .base import MAX_RECORD_BYTES, RawSample, Source, own_id, parse_record
from .index import BadIndexError, IndexWriter, index_path, read_index
from .refs import ImageRef, SliceRef, Stamp, pread_all, read_at, stamp_of, system_path

logger = logging.getLogger(__name__)

KIND = "tar"
BLOCK = 512
MAX_MAPPED_SHARDS = 64
"""Index files that one source keeps mapped at a time; a map holds a descriptor."""
IMAGE_ENDINGS = frozenset(
    "jpg jpeg jpe jfif png webp gif bmp tif tiff ppm pgm pbm pnm jp2 avif heic heif mpo ico tga".split()
)
_WINDOW_BYTES = 4096
_RESYNC_BYTES = 1 << 20
_MAX_EXTENSION_BYTES = 1 << 20  # a long name or pax header that says it is longer is damage
_MAX_COMPARED_ROWS = 20_000_000
_HINT_ROWS = 2_000_000
_ZERO = bytes(BLOCK)
_META = re.compile(r"__[^/]*__($|/)")  # webdataset's own files, such as __meta__/info
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"PK\x03\x04": ("zip", "unzip, then tar"),
}

OK, NO_RECORD, DUPLICATE, NOT_A_FILE, UNSAFE_NAME, SPARSE, CUT = range(7)
"""What is wrong with a row, stored as one byte."""
_REASONS = {
    NO_RECORD: ("record_missing", "no .json member goes with {member}"),
    DUPLICATE: ("duplicate_member", "{member} is there more than once; which one is meant cannot be told"),
    NOT_A_FILE: ("member_not_a_file", "{member} is a link or device, which is not followed"),
    UNSAFE_NAME: ("unsafe_member_name", "{member} has an absolute name or one with '..', which is not used"),
    SPARSE: ("sparse_member", "{member} is stored as a sparse file, which is not supported"),
}


# --- one header -------------------------------------------------------------------------------------------------


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


Reader = Callable[[int, int], bytes]
"""(offset, number of bytes) -> bytes, fewer only at the end of the file."""


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
    if stored == sum(block) - sum(block[148:156]) + 256:
        return True
    signed = sum(byte - 256 if byte > 127 else byte for byte in block[:148] + block[156:])
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

    Returns None for a block of zeros, which ends an archive.

    Raises:
        DamagedHeaderError: the bytes there are no header.
    """
    start = position
    long_name: str | None = None
    extended: dict[str, str] = {}
    while True:
        block = read(position, BLOCK)
        if block == _ZERO and position == start:
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
        if kind not in b"LKxXg":
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
        if not extended["size"].isdigit():
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


# --- members to rows --------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A member that belongs to a key: path without `./`, key, ending in lower case, first header, what is wrong."""

    path: str
    key: str
    ending: str
    header: int
    fault: int


class Row(NamedTuple):
    """A sample, or what should have been one. `headers`: of its members, the record's first if it has one."""

    key: str
    status: int
    headers: tuple[int, ...]


def _entry(member: Member, archive_size: int) -> Entry | None:
    """The member as part of a key; None for what webdataset passes over: folders, names without a key or ending."""
    name = member.name
    if member.type in b"5DV" or _META.match(name):
        return None
    parts = name.split("/")
    unsafe = name.startswith("/") or ".." in parts
    path = name if unsafe else "/".join(part for part in parts if part not in ("", "."))
    folder, slash, base = path.rpartition("/")
    stem, dot, ending = base.partition(".")
    if not (stem and ending):
        return None
    if unsafe:
        fault = UNSAFE_NAME
    elif member.type in b"12346M":
        fault = NOT_A_FILE
    elif member.sparse:
        fault = SPARSE
    else:
        fault = CUT if member.data + member.size > archive_size else OK
    return Entry(path, folder + slash + stem, ending.lower(), member.header, fault)


def rows_of_key(entries: Sequence[Entry]) -> list[Row]:
    """The rows that the members of one key make: one, or more where base names have dots (see the module)."""
    key = entries[0].key
    record_endings = [e.ending for e in entries if e.ending.endswith(".json")]
    if not record_endings:
        return [_row(key, key, entries)]
    has_plain = any(e.ending == "json" for e in entries)
    stems = []
    for ending in record_endings:
        stem = ending[:-5]
        partner = any(e.ending.startswith(f"{stem}.") and not e.ending.endswith(".json") for e in entries)
        if partner or not has_plain:
            stems.append(stem)
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        stem = max((s for s in stems if entry.ending.startswith(f"{s}.")), key=len, default="")
        groups.setdefault(stem, []).append(entry)
    return [_row(key, f"{key}.{stem}" if stem else key, group) for stem, group in groups.items()]


def _row(base: str, key: str, entries: Sequence[Entry]) -> Row:
    record_ending = f"{key[len(base) + 1 :]}.json".lstrip(".")
    ordered = sorted(entries, key=lambda e: e.ending != record_ending)  # stable: the rest keep their order
    endings = {e.ending for e in entries}
    status = next((e.fault for e in entries if e.fault != OK), OK)
    if status == OK:
        if len(endings) < len(entries):
            status = DUPLICATE
        elif record_ending not in endings:
            status = NO_RECORD
    has_record = ordered[0].ending == record_ending
    name = ordered[0].path[:-5] if has_record else key
    return Row(name, status, tuple(e.header for e in ordered))


# --- one shard --------------------------------------------------------------------------------------------------


@dataclass
class Damage:
    """Something broken in a shard that belongs to no row."""

    reason: str
    position: int
    text: str
    near: str | None = None  # the key before it
    lost: list[str] = field(default_factory=list)  # keys that could not be delivered because of it

    def error(self, path: str) -> SampleError:
        if self.lost:
            key = f"key {self.lost[0]!r}"
            rest = f"; lost with it: {', '.join(map(repr, self.lost[1:]))}" if len(self.lost) > 1 else ""
        else:
            key, rest = f"after key {self.near!r}" if self.near is not None else "before the first key", ""
        return SampleError(self.reason, f"{path}: {key} at byte {self.position}: {self.text}{rest}")


@dataclass(frozen=True)
class ShardIndex:
    """Members of each row by the position of their headers; names and sizes are read from there when needed.

    `first` (rows + 1,) uint64: each row's first place in `member`; `member` uint64; `status` (rows,) uint8;
    `hashes` (rows,) uint64 of the keys, only to find keys that stand in two shards.
    """

    stamp: Stamp
    first: np.ndarray
    member: np.ndarray
    status: np.ndarray
    hashes: np.ndarray | None
    damage: tuple[Damage, ...] = ()
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.status)


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _window(fd: int) -> Reader:
    """Reads a little more than asked: the next header is often close."""
    base, held = 0, b""

    def read(offset: int, num_bytes: int) -> bytes:
        nonlocal base, held
        at = offset - base
        if at < 0 or at + num_bytes > len(held):
            base, held = offset, pread_all(fd, max(num_bytes, _WINDOW_BYTES), offset)
            at = 0
        return held[at : at + num_bytes]

    return read


class _Rows:
    """Growing columns of a shard's rows."""

    def __init__(self) -> None:
        self.first, self.member, self.status, self.hashes = array("Q", [0]), array("Q"), array("B"), array("Q")

    def add(self, row: Row) -> None:
        self.member.extend(row.headers)
        self.first.append(len(self.member))
        self.status.append(row.status)
        self.hashes.append(_hash(row.key))

    def copy(self, other: _Rows, start: int, stop: int) -> None:
        for row in range(start, stop):
            self.member.extend(other.member[other.first[row] : other.first[row + 1]])
            self.first.append(len(self.member))
            self.status.append(other.status[row])
            self.hashes.append(other.hashes[row])


class _ShardScan:
    """One walk over a shard's headers, then a second look at the keys that were split or stand beside damage."""

    def __init__(self, path: str, fd: int, stamp: Stamp) -> None:
        self.path, self.fd, self.stamp = path, fd, stamp
        self.read = _window(fd)
        self.rows = _Rows()
        self.run_hash, self.run_row = array("Q"), array("Q")  # a run: adjacent members of one key
        self.beside: dict[int, Damage] = {}  # run -> the damage next to it
        self.damage: list[Damage] = []
        self.warnings: list[str] = []
        self.pending: list[Entry] = []
        self.scar: Damage | None = None  # damage that the run now being read follows
        self.last_key: str | None = None
        self.num_skipped = 0
        self.first_skipped = ""

    def index(self) -> ShardIndex:
        self._walk()
        rows = self._settle()
        if self.num_skipped:
            self.warnings.append(f"{self.path}: {self.num_skipped} members are not used: {self.first_skipped}")
        damage = tuple(d for d in self.damage if d.reason)
        if not rows.status and not damage:
            self.warnings.append(f"{self.path} holds no sample")
        return ShardIndex(
            self.stamp,
            *(np.array(column, dtype) for column, dtype in (
                (rows.first, np.uint64), (rows.member, np.uint64), (rows.status, np.uint8), (rows.hashes, np.uint64)
            )),
            damage,
            tuple(self.warnings),
        )  # fmt: skip

    def _walk(self) -> None:
        size = self.stamp.size
        if size == 0:
            self._hurt("shard_empty", 0, "the file has 0 bytes")
            return
        position = 0
        ended = False
        while position < size:
            try:
                member = read_member(self.read, position)
            except DamagedHeaderError as error:
                position = self._skip_damage(position, error)
                ended = True
                continue
            if member is None:
                position = self._after_zeros(position)
                ended = True
                continue
            ended = False
            self._take(member)
            if member.data + member.size > size:
                here = max(0, size - member.data)
                self._hurt(
                    "shard_cut",
                    member.data,
                    f"the archive is cut inside {member.name!r}: {here} of {member.size} bytes",
                )
                ended = True
            position = member.next
        if not ended:
            self._hurt("", size, "the archive is cut: no end mark")  # only a warning if nothing is missing
        self._close_run()

    def _take(self, member: Member) -> None:
        entry = _entry(member, self.stamp.size)
        if entry is None:
            if member.type not in b"5DV" and not _META.match(member.name) and not self._is_hidden(member.name):
                self.num_skipped += 1
                kind = "link or device" if member.type in b"12346M" else "no sample by its name"
                self.first_skipped = self.first_skipped or f"{member.name!r} at byte {member.header} ({kind})"
            return
        if self.pending and entry.key != self.pending[0].key:
            self._close_run()
        self.pending.append(entry)

    @staticmethod
    def _is_hidden(name: str) -> bool:
        return name.rpartition("/")[2].startswith(".")

    def _close_run(self) -> None:
        if not self.pending:
            return
        run = len(self.run_hash)
        self.run_hash.append(_hash(self.pending[0].key))
        self.run_row.append(len(self.rows.status))
        for row in rows_of_key(self.pending):
            self.rows.add(row)
        if self.scar is not None:
            self.beside.setdefault(run, self.scar)
            self.scar = None
        self.last_key = self.pending[0].key
        self.pending = []

    def _hurt(self, reason: str, position: int, text: str) -> None:
        self._close_run()
        hurt = Damage(reason, position, text, self.last_key)
        self.damage.append(hurt)
        if self.run_hash:
            self.beside[len(self.run_hash) - 1] = hurt
        self.scar = hurt

    def _skip_damage(self, position: int, error: DamagedHeaderError) -> int:
        """Where to go on reading after a header that is none."""
        found = find_header(self.fd, error.position + 1, self.stamp.size)
        nothing_yet = not self.run_hash and not self.pending and not self.damage
        if found is None and nothing_yet and position == 0:
            start = self.read(0, 16)
            self._hurt("shard_not_tar", 0, f"this is no tar archive: it starts with {start!r}")
            return self.stamp.size
        until = "the rest cannot be read" if found is None else f"reading goes on at byte {found}"
        self._hurt("shard_damaged", error.position, f"{error.text}; {until}")
        return self.stamp.size if found is None else found

    def _after_zeros(self, position: int) -> int:
        """The end of the file, or the block after the end mark that is not zero: archives may be concatenated."""
        start = position
        size = self.stamp.size
        while position < size:
            chunk = pread_all(self.fd, _RESYNC_BYTES, position)
            if not chunk:
                break
            rest = chunk.lstrip(b"\0")
            if rest:
                position += (len(chunk) - len(rest)) // BLOCK * BLOCK
                self.warnings.append(
                    f"{self.path}: there is more after the end mark at byte {start}; reading goes on at byte {position}"
                )
                return position
            position += len(chunk)
        return size

    def _settle(self) -> _Rows:
        """Join the runs of one key and see which rows the damage took."""
        hashes = np.frombuffer(self.run_hash, np.uint64) if self.run_hash else np.empty(0, np.uint64)
        values, counts = np.unique(hashes, return_counts=True)
        split = set(values[counts > 1].tolist())
        del hashes
        if not split and not self.beside:
            return self.rows
        again: dict[int, list[int]] = {}
        for run, key_hash in enumerate(self.run_hash):
            if key_hash in split or run in self.beside:
                again.setdefault(key_hash, []).append(run)
        self._warn_of_split_keys([runs for runs in again.values() if len(runs) > 1])
        ends = array("Q", [*self.run_row[1:], len(self.rows.status)]) if self.run_row else array("Q")
        settled = _Rows()
        for run, key_hash in enumerate(self.run_hash):
            runs = again.get(key_hash)
            if runs is None:
                settled.copy(self.rows, self.run_row[run], ends[run])
            elif runs[0] == run:
                for row in self._joined(runs, ends):
                    settled.add(row)
        for hurt in self.damage:
            if not hurt.reason:
                if hurt.lost:
                    hurt.reason = "shard_cut"
                else:
                    self.warnings.append(
                        f"{self.path}: the archive has no end mark at byte {hurt.position}: was it cut?"
                    )
        return settled

    def _joined(self, runs: list[int], ends: array) -> Iterable[Row]:
        headers: list[int] = []
        for run in runs:
            rows = self.rows
            headers.extend(rows.member[rows.first[self.run_row[run]] : rows.first[ends[run]]])
        entries: dict[str, list[Entry]] = {}
        for header in sorted(headers):
            member = read_member(self.read, header)
            entry = _entry(member, self.stamp.size) if member is not None else None
            assert entry is not None, "a header that was read once reads the same again"
            entries.setdefault(entry.key, []).append(entry)  # one key, but for a collision of hashes
        hurt = next((self.beside[run] for run in runs if run in self.beside), None)
        for group in entries.values():
            for row in rows_of_key(group):
                if hurt is not None and self._was_lost(row):
                    hurt.lost.append(row.key)
                else:
                    yield row

    def _was_lost(self, row: Row) -> bool:
        """Whether a row beside damage lacks what the damage took: its record, or an image that the record names."""
        if row.status in (CUT, NO_RECORD):
            return True
        if row.status != OK:
            return False
        try:
            members = _members(self.read, row.headers, row.key)
            record = parse_record(self.read(members[0].offset, min(members[0].size, MAX_RECORD_BYTES)), "")
            resolver = MemberResolver(self.path, self.stamp, row.key, members[1:], _image_names(record))
            for name in _image_names(record):
                resolver(name)
        except SampleError as error:
            return error.reason == "image_missing"
        return False

    def _warn_of_split_keys(self, split: list[list[int]]) -> None:
        if not split:
            return
        first_header, second_header = (self.rows.member[self.rows.first[self.run_row[run]]] for run in split[0][:2])
        member = read_member(self.read, first_header)
        entry = _entry(member, self.stamp.size) if member is not None else None
        key = entry.key if entry is not None else "?"
        self.warnings.append(
            f"{self.path}: the members of key {key!r} are not adjacent (bytes {first_header} and {second_header}); "
            f"members of one key are joined ({len(split)} such keys in this shard)"
        )


def scan_shard(path: str) -> ShardIndex:
    """Index one shard by walking its headers.

    Raises:
        OSError: it cannot be read.
        UserError: it is compressed, so that members cannot be read by position.
    """
    fd = os.open(system_path(path), os.O_RDONLY)
    try:
        found = os.fstat(fd)
        head = os.pread(fd, 8, 0)
        for magic, (what, cure) in _COMPRESSED.items():
            if head.startswith(magic):
                raise UserError(f"shard {path} is {what}-compressed; members are read by position: unpack it ({cure})")
        return _ShardScan(path, fd, Stamp(found.st_size, found.st_mtime_ns)).index()
    finally:
        os.close(fd)


def write_index(path: str) -> ShardIndex:
    """Index one shard and write the index file beside it."""
    index = scan_shard(path)
    columns = {"first": "u8", "member": "u8", "status": "u1", "hashes": "u8"}
    with IndexWriter(path, KIND, index.stamp, columns) as writer:
        for name in columns:
            writer.append(name, getattr(index, name))
        damage = [[d.reason, d.position, d.text, d.near, d.lost] for d in index.damage]
        # messages name the shard by the path that it was indexed under; a moved shard has a new one
        warnings = [line.replace(path, "{path}") for line in index.warnings]
        writer.finish({"rows": len(index), "damage": damage, "warnings": warnings})
    return index


def load_index(path: str, stamp: Stamp) -> ShardIndex | None:
    """The index file beside a shard, memory-mapped; None, with a warning, where it cannot be used."""
    try:
        found = read_index(path, KIND, stamp)
        if found is None:
            return None
        columns = [found.columns[name] for name in ("first", "member", "status", "hashes")]
        rows = len(columns[2])
        if len(columns[0]) != rows + 1 or int(columns[0][-1]) != len(columns[1]) or len(columns[3]) != rows:
            raise BadIndexError("is damaged")
        return ShardIndex(
            stamp,
            *columns,
            tuple(Damage(*entry) for entry in found.notes["damage"]),
            tuple(line.replace("{path}", path) for line in found.notes["warnings"]),
        )
    except (BadIndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = error if isinstance(error, BadIndexError) else "is damaged"
        logger.warning("index %s %s; it is not used (internvl-pack index renews it)", index_path(path), why)
        return None


# --- reading a sample -------------------------------------------------------------------------------------------


class MemberSlice(NamedTuple):
    """A member of a sample: path, ending after the sample's key in lower case, data's place and size."""

    path: str
    ending: str
    offset: int
    size: int


def _members(read: Reader, headers: Iterable[int], key: str | None = None) -> tuple[MemberSlice, ...]:
    """The members whose headers are given; endings count from the key, which the first member's name gives if None.

    Raises:
        DamagedHeaderError: the shard is no longer what was indexed.
    """
    found = []
    for header in headers:
        member = read_member(read, header)
        if member is None:
            raise DamagedHeaderError(header, "no header")
        path = "/".join(part for part in member.name.split("/") if part not in ("", "."))
        if key is None:
            key = path[:-5]
        found.append(MemberSlice(path, path[len(key) + 1 :].lower(), member.data, member.size))
    return tuple(found)


def _image_names(record: dict[str, Any]) -> list[str]:
    value = record.get("image")
    values = value if isinstance(value, list) else [value]
    return [name for name in values if isinstance(name, str) and name]


@dataclass(frozen=True)
class MemberResolver:
    """Finds the members of a sample that its record names. Nothing outside the sample is ever opened.

    A name is, in this order: a member's path; its base name; its ending (`jpg`, `.jpg`, `0.jpg`); a path whose base
    name is a member's. Endings compare without case. Where none fits, the record names one image and the sample
    has one image member, that is it: records often keep the path that the image had before it was packed.
    """

    path: str
    stamp: Stamp
    key: str
    members: tuple[MemberSlice, ...]
    named: Sequence[str] = ()

    def __call__(self, name: str) -> ImageRef:
        """Raises SampleError `image_missing`, with the names that there are."""
        if not isinstance(name, str) or not name:
            raise SampleError("image_missing", f"{self.path}: key {self.key!r}: {name!r} is no member's name")
        member = self._find(name)
        if member is None:
            there = ", ".join(repr(m.path) for m in self.members) or "no member but the record"
            raise SampleError(
                "image_missing", f"{self.path}: key {self.key!r}: no member {name!r:.200} (has {there:.300})"
            )
        return SliceRef(self.path, member.offset, member.size, self.stamp, member.path)

    def _find(self, name: str) -> MemberSlice | None:
        wanted = "/".join(part for part in name.split("/") if part not in ("", "."))
        base = wanted.rpartition("/")[2]
        tests: tuple[Callable[[MemberSlice], bool], ...] = (
            lambda m: _lower_ending(m.path) == _lower_ending(wanted),
            lambda m: _lower_ending(m.path.rpartition("/")[2]) == _lower_ending(wanted),
            lambda m: m.ending == wanted.lower().lstrip("."),
            lambda m: _lower_ending(m.path.rpartition("/")[2]) == _lower_ending(base),
        )
        for test in tests:
            for member in self.members:
                if test(member):
                    return member
        images = [m for m in self.members if _is_image(m)]
        if len(images) == 1 and list(self.named) == [name]:
            return images[0]
        return None


def _lower_ending(path: str) -> str:
    folder, slash, base = path.rpartition("/")
    stem, dot, ending = base.partition(".")
    return folder + slash + stem + dot + ending.lower()


def _is_image(member: MemberSlice) -> bool:
    return member.ending.rpartition(".")[2] in IMAGE_ENDINGS


@dataclass
class _Shard:
    path: str
    label: str
    stamp: Stamp
    index: ShardIndex | None  # None: in the index file, mapped when needed


class ShardSource(Source):
    """The samples of a list of shards, in their order, in random access.

    Sample ids are `<dataset>/<shard>/<key>`; the shard's part is its file name without `.tar`, or its path below
    the shards' common folder where two shards have the same file name.

    Raises:
        UserError: a shard cannot be read or is compressed. Damage is no error: see `damage`.
    """

    def __init__(self, name: str, paths: Sequence[str]) -> None:
        self.name = name
        self._shards: list[_Shard] = []
        self._mapped: OrderedDict[int, ShardIndex] = OrderedDict()
        self._damage: tuple[SampleError, ...] = ()
        starts = [0]
        warnings: list[str] = []
        hashes: list[np.ndarray] = []
        for path, label in zip(paths, _labels(paths), strict=True):
            try:
                stamp = stamp_of(path)
                from_file = load_index(path, stamp)
                index = from_file if from_file is not None else scan_shard(path)
            except OSError as error:
                raise UserError(f"shard {path} of dataset {name!r} cannot be read: {error.strerror}") from None
            self._damage += tuple(d.error(path) for d in index.damage)
            warnings += index.warnings
            starts.append(starts[-1] + len(index))
            if starts[-1] <= _MAX_COMPARED_ROWS:
                hashes.append(np.array(index.hashes))
            kept = ShardIndex(index.stamp, index.first, index.member, index.status, None)
            self._shards.append(_Shard(path, label, index.stamp, None if from_file is not None else kept))
        self._starts = np.array(starts, np.int64)
        if len(self._shards) > 1 and starts[-1] <= _MAX_COMPARED_ROWS:
            warnings += self._keys_in_two_shards(np.concatenate(hashes))
        if len(self) >= _HINT_ROWS and any(shard.index is not None for shard in self._shards):
            logger.warning("dataset %r was indexed in memory; internvl-pack index does it once for all runs", name)
        self.warnings = tuple(warnings)

    @property
    def damage(self) -> Sequence[SampleError]:
        return self._damage

    @property
    def block_starts(self) -> Sequence[int]:
        return self._starts  # type: ignore[return-value]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def sample_id(self, row: int) -> str:
        shard, key, _ = self._locate(row)
        return f"{self.name}/{shard.label}/{key}"

    def origin(self, row: int) -> str:
        shard, key, header = self._locate(row)
        return f"{shard.path}:{key}@{header}"

    def read(self, row: int) -> RawSample:
        shard, index, local = self._shard(row)
        headers = index.member[int(index.first[local]) : int(index.first[local + 1])].tolist()
        status = int(index.status[local])
        if status != OK:
            raise self._row_error(shard, headers, status)
        read = _stamped(shard)
        try:
            members = _members(read, headers)
            record = members[0]
            key = record.path[:-5]
            origin = f"{shard.path}:{key}@{headers[0]}"
            if record.size > MAX_RECORD_BYTES:
                raise SampleError("record_too_long", f"{origin}: {record.path!r} has {record.size} bytes")
            if record.size == 0:
                raise SampleError("record_empty", f"{origin}: {record.path!r} has 0 bytes")
            raw = read(record.offset, record.size)
        except OSError as error:
            raise SampleError("record_unreadable", f"{shard.path}@{headers[0]}: {error.strerror}") from error
        except DamagedHeaderError as error:
            raise _changed(shard, error) from None
        data = parse_record(raw, origin)
        if not any(field_name in data for field_name in ("image", "images", "video", "videos")):
            images = [m.path for m in members[1:] if _is_image(m)]
            if images:
                data["image"] = images
        resolver = MemberResolver(shard.path, shard.stamp, key, members[1:], tuple(_image_names(data)))
        return RawSample(f"{self.name}/{shard.label}/{key}", own_id(data), origin, data, resolver)

    def _row_error(self, shard: _Shard, headers: list[int], status: int) -> SampleError:
        """Why a row is no sample, naming the member that is to blame."""
        read = _stamped(shard)
        try:
            members = [read_member(read, header) for header in headers]
        except OSError as error:
            return SampleError("record_unreadable", f"{shard.path}@{headers[0]}: {error.strerror}")
        except DamagedHeaderError as error:
            raise _changed(shard, error) from None
        entries = [e for e in (_entry(m, shard.stamp.size) for m in members if m is not None) if e is not None]
        seen: set[str] = set()
        blamed = entries[0]
        for entry in entries:
            if entry.fault == status or (status == DUPLICATE and entry.ending in seen):
                blamed = entry
                break
            seen.add(entry.ending)
        reason, text = _REASONS[status]
        key = _row_key(entries)
        return SampleError(reason, f"{shard.path}:{key}@{blamed.header}: " + text.format(member=repr(blamed.path)))

    def _shard(self, row: int) -> tuple[_Shard, ShardIndex, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = int(np.searchsorted(self._starts, row, "right")) - 1
        shard = self._shards[number]
        index = shard.index if shard.index is not None else self._map(number)
        return shard, index, row - int(self._starts[number])

    def _map(self, number: int) -> ShardIndex:
        index = self._mapped.get(number)
        if index is not None:
            return index
        shard = self._shards[number]
        index = load_index(shard.path, shard.stamp)
        if index is None or len(index) != self._starts[number + 1] - self._starts[number]:
            index = scan_shard(shard.path)
            if index.stamp.size != shard.stamp.size:
                raise _changed(shard, DamagedHeaderError(0, "another size"))
            shard.index = index
            return index
        self._mapped[number] = index
        while len(self._mapped) > MAX_MAPPED_SHARDS:
            self._mapped.pop(next(iter(self._mapped)), None)
        return index

    def _locate(self, row: int) -> tuple[_Shard, str, int]:
        """(shard, key, position of the first member's header) of a row, from one header."""
        shard, index, local = self._shard(row)
        header = int(index.member[int(index.first[local])])
        try:
            member = read_member(_stamped(shard), header)
            assert member is not None
            entry = _entry(member, shard.stamp.size)
            assert entry is not None
        except OSError as error:
            raise UserError(f"shard {shard.path} cannot be read: {error.strerror}") from None
        except (DamagedHeaderError, AssertionError) as error:
            raise _changed(shard, error) from None
        return shard, _row_key([entry]), header

    def _keys_in_two_shards(self, hashes: np.ndarray) -> list[str]:
        """One line if keys stand in more than one shard. They stay samples of their own."""
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        again = np.flatnonzero(ordered[1:] == ordered[:-1])
        if not again.size:
            return []
        pair = min(zip(order[again].tolist(), order[again + 1].tolist(), strict=True), key=lambda rows: rows[1])
        (shard_a, key, at_a), (shard_b, _, at_b) = (self._locate(row) for row in pair)
        return [
            f"key {key!r} is in {shard_a.path} at byte {at_a} and in {shard_b.path} at byte {at_b}: two samples "
            f"({again.size} such keys in this dataset)"
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": OrderedDict()}


def _row_key(entries: Sequence[Entry]) -> str:
    """A row's key: its record's path without `.json`, or webdataset's key where it has none."""
    first = entries[0]
    return first.path[:-5] if first.ending == "json" or first.ending.endswith(".json") else first.key


def _stamped(shard: _Shard) -> Reader:
    return lambda offset, num_bytes: read_at(shard.path, shard.stamp, offset, num_bytes)


def _changed(shard: _Shard, error: Exception) -> UserError:
    return UserError(f"shard {shard.path} is not what it was when it was indexed ({error}): start again")


def _labels(paths: Sequence[str]) -> list[str]:
    """The part of each shard in sample ids: unique, and the same wherever the whole tree is moved."""
    names = [_without_ending(os.path.basename(path)) for path in paths]
    if len(set(names)) == len(names):
        return names
    common = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    names = [_without_ending(os.path.relpath(os.path.abspath(path), common)) for path in paths]
    if len(set(names)) == len(names):
        return names
    return [os.path.relpath(os.path.abspath(path), common) for path in paths]


def _without_ending(name: str) -> str:
    return name[:-4] if name.lower().endswith(".tar") else name
