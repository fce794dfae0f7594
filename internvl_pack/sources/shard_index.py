"""The index of a tar shard: one walk over its headers, members joined to samples, damage named.

What can be delivered is; every problem is said once with shard, key and byte position.

Keys follow webdataset's rule: the path up to the first dot of its base name (`a.b/c.d.jpg` has key `a.b/c`, ending
`d.jpg`; endings compare in lower case; `./` in front is dropped). A sample is the `.json` member of a key, its record,
and the key's other members. One addition for dots in base names (`22.05.jpg` and `22.05.json`): an ending `X.json`
starts a sample `key.X` of its own where the key has no plain `.json`, or where another member has an ending `X.*`.

Members of a key that are not adjacent are joined, with one warning a shard. Rows that cannot be samples (no record,
a member twice, a link or device, an absolute name or one with `..`) stay rows, with what is wrong as their status.
"""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from ..errors import SampleError, UserError
from ..options import count
from .addresses import pread_all
from .content import PIECE_BYTES, new_hash
from .files import Stamp, open_file, stamp_of_open
from .index import BadIndexError, IndexWriter, is_increasing, read_index
from .members import MemberResolver, image_names, members_of
from .normalise import normalised
from .parse import MAX_RECORD_BYTES, parse_record
from .tar import (
    BLOCK,
    FOLDERS_AND_LABELS,
    LINKS_AND_DEVICES,
    DamagedHeaderError,
    Member,
    Reader,
    find_header,
    read_member,
    windowed,
)

KIND = "tar"
COLUMNS = {"first": "u4", "member": "u8", "status": "u1", "hashes": "u8"}
_ZEROS_BYTES = 1 << 20
# Damaged places of one shard beyond which the rest of it is given up.
MAX_DAMAGE = 1000
_META = re.compile(r"__[^/]*__($|/)")  # webdataset's own files, such as __meta__/info
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"PK\x03\x04": ("zip", "unzip, then tar"),
}

# What is wrong with a row, stored as one byte.
OK, NO_RECORD, DUPLICATE, NOT_A_FILE, UNSAFE_NAME, SPARSE, CUT = range(7)
REASONS = {
    NO_RECORD: ("record_missing", "no .json member goes with {member}"),
    DUPLICATE: ("duplicate_member", "{member} is there more than once; which one is meant is not clear"),
    NOT_A_FILE: ("member_not_a_file", "{member} is a link or device, which is not followed"),
    UNSAFE_NAME: ("unsafe_member_name", "{member} has an absolute name or one with '..', which is not used"),
    SPARSE: ("sparse_member", "{member} is stored as a sparse file, which is not supported"),
}


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


def _is_passed_over(member: Member) -> bool:
    """Folders, volume labels, hidden files (such as `._k0.jpg` of macOS) and webdataset's own `__meta__`."""
    hidden = member.name.rpartition("/")[2].startswith(".")
    return hidden or member.type in FOLDERS_AND_LABELS or _META.match(member.name) is not None


def entry_of(member: Member, archive_size: int) -> Entry | None:
    """The member as part of a key; None for one that cannot be: passed over, or a name without key or ending."""
    name = member.name
    if _is_passed_over(member):
        return None
    parts = name.split("/")
    unsafe = name.startswith("/") or ".." in parts
    path = name if unsafe else "/".join(part for part in parts if part not in ("", "."))
    folder, slash, base = path.rpartition("/")
    stem, _, ending = base.partition(".")
    if not (stem and ending):
        return None
    if unsafe:
        fault = UNSAFE_NAME
    elif member.type in LINKS_AND_DEVICES:
        fault = NOT_A_FILE
    elif member.sparse:
        fault = SPARSE
    else:
        fault = CUT if member.data + member.size > archive_size else OK
    return Entry(path, folder + slash + stem, ending.lower(), member.header, fault)


def read_entry(read: Reader, header: int, archive_size: int) -> Entry:
    """The member whose header was found at `header`, as part of its key.

    Raises:
        DamagedHeaderError: there is none any more.
    """
    member = read_member(read, header)
    entry = None if member is None else entry_of(member, archive_size)
    if entry is None:
        raise DamagedHeaderError(header, "no header")
    return entry


def rows_of_key(entries: Sequence[Entry]) -> list[Row]:
    """The rows that the members of one key make: one, or more where base names have dots (see the module)."""
    key = entries[0].key
    record_endings = [e.ending for e in entries if e.ending.endswith(".json")]
    if not record_endings:
        return [_row(key, "", entries)]
    stems = {ending[:-5] for ending in record_endings}
    if any(e.ending == "json" for e in entries):
        others = (e.ending for e in entries if not e.ending.endswith(".json"))
        stems.intersection_update(prefix for ending in others for prefix in _prefixes(ending))
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        stem = next((prefix for prefix in _prefixes(entry.ending) if prefix in stems), "")
        groups.setdefault(stem, []).append(entry)
    return [_row(key, stem, group) for stem, group in groups.items()]


def _prefixes(ending: str) -> Iterator[str]:
    """`a.b.jpg` -> `a.b`, `a`: longest first."""
    while (dot := ending.rfind(".")) >= 0:
        ending = ending[:dot]
        yield ending


def _row(key: str, stem: str, entries: Sequence[Entry]) -> Row:
    record_ending = f"{stem}.json" if stem else "json"
    ordered = sorted(entries, key=lambda e: e.ending != record_ending)  # stable: the rest keep their order
    status = next((e.fault for e in entries if e.fault != OK), OK)
    if status == OK:
        if len({e.ending for e in entries}) < len(entries):
            status = DUPLICATE
        elif ordered[0].ending != record_ending:
            status = NO_RECORD
    return Row(row_key(ordered), status, tuple(e.header for e in ordered))


def row_key(entries: Sequence[Entry]) -> str:
    """A row's key: its record's path without `.json`, or webdataset's key where it has none."""
    first = entries[0]
    return first.path[:-5] if f".{first.ending}".endswith(".json") else first.key


# --- one shard --------------------------------------------------------------------------------------------------


class ShardDamageError(SampleError):
    """Damage that belongs to no row.

    Attributes:
        source: `shard:key@byte`, or `shard@byte` where nothing is known to be lost.
        key: of the first sample that was lost by it, or None.
    """

    def __init__(self, reason: str, detail: str, source: str | None = None, key: str | None = None) -> None:
        super().__init__(reason, detail, source)
        self.key = key


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
            key, *more = self.lost
            rest = f"; lost with it: {', '.join(map(repr, more))}" if more else ""
            return ShardDamageError(self.reason, f"{self.text}{rest}", f"{path}:{key}@{self.position}", key)
        place = f"after key {self.near!r}" if self.near is not None else "before the first key"
        return ShardDamageError(self.reason, f"{place}: {self.text}", f"{path}@{self.position}")


@dataclass(frozen=True)
class ShardIndex:
    """Members of each row by the position of their headers; names and sizes are read from there when needed.

    `first` (rows + 1,) uint32: each row's first place in `member`; `member` uint64; `status` (rows,) uint8;
    `hashes` (rows,) uint64 of the keys, only to find keys that stand in two shards. `content` is the shard's mark: a
    hash of the names, places and sizes of all members that belong to a key, and of the bytes of records and texts. The
    bytes of images are not read for it.
    """

    stamp: Stamp
    first: np.ndarray
    member: np.ndarray
    status: np.ndarray
    hashes: np.ndarray | None
    content: str
    damage: tuple[Damage, ...] = ()
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.status)


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class _Rows:
    """Growing columns of a shard's rows."""

    def __init__(self) -> None:
        self.first, self.member, self.status, self.hashes = array("Q", [0]), array("Q"), array("B"), array("Q")

    def add(self, headers: Iterable[int], status: int, key_hash: int) -> None:
        self.member.extend(headers)
        self.first.append(len(self.member))
        self.status.append(status)
        self.hashes.append(key_hash)

    def headers(self, start: int, stop: int) -> array:
        """Of rows [start, stop)."""
        return self.member[self.first[start] : self.first[stop]]


class _ShardScan:
    """One walk over a shard's headers, then a second look at the keys that were split or stand beside damage."""

    def __init__(self, path: str, fd: int, stamp: Stamp) -> None:
        self.path, self.fd, self.stamp = path, fd, stamp
        self.read = windowed(lambda offset, num_bytes: pread_all(fd, num_bytes, offset))
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
        self.content = new_hash()

    def index(self) -> ShardIndex:
        self._walk()
        rows = self._settle()
        if self.num_skipped:
            self.warnings.append(
                f"{self.path}: not used: {count(self.num_skipped, 'members')}, first {self.first_skipped}"
            )
        damage = tuple(d for d in self.damage if d.reason)
        if not rows.status and not damage:
            self.warnings.append(f"{self.path} holds no sample")
        return ShardIndex(
            self.stamp,
            np.array(rows.first, np.uint32),
            np.array(rows.member, np.uint64),
            np.array(rows.status, np.uint8),
            np.array(rows.hashes, np.uint64),
            self.content.hexdigest(),
            damage,
            tuple(self.warnings),
        )

    def _walk(self) -> None:
        size = self.stamp.size
        if size == 0:
            self._hurt("shard_empty", 0, "the file has 0 bytes")
            return
        position = 0
        ended = False
        while position < size:
            if len(self.damage) >= MAX_DAMAGE:
                self._hurt("shard_damaged", position, "too many damaged places; the rest is not read")
                ended = True
                break
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
            position = member.next
            if member.data + member.size > size:
                position = self._skip_cut(member)
                ended = True
        if not ended:
            self._hurt("", size, "the archive is cut: no end mark")  # only a warning if nothing is missing
        self._close_run()

    def _take(self, member: Member) -> None:
        entry = entry_of(member, self.stamp.size)
        if entry is None:
            if not _is_passed_over(member):
                self.num_skipped += 1
                kind = "link or device" if member.type in LINKS_AND_DEVICES else "no sample by its name"
                self.first_skipped = self.first_skipped or f"{member.name!r} at byte {member.header} ({kind})"
            return
        if self.pending and entry.key != self.pending[0].key:
            self._close_run()
        self.pending.append(entry)
        self._mark(member, entry)

    def _mark(self, member: Member, entry: Entry) -> None:
        """Add a member to the content mark. Most records lie in the window that was read for their header."""
        self.content.update(f"{entry.path}\0{member.data}\0{member.size}\0".encode("utf-8", "surrogatepass"))
        if entry.fault == OK and entry.ending.split(".")[-1] in ("json", "txt"):
            end = member.data + min(member.size, MAX_RECORD_BYTES)
            for position in range(member.data, end, PIECE_BYTES):
                self.content.update(self.read(position, min(PIECE_BYTES, end - position)))

    def _close_run(self) -> None:
        if not self.pending:
            return
        run = len(self.run_hash)
        self.run_hash.append(_hash(self.pending[0].key))
        self.run_row.append(len(self.rows.status))
        for row in rows_of_key(self.pending):
            self.rows.add(row.headers, row.status, _hash(row.key))
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

    def _skip_cut(self, member: Member) -> int:
        """Where to go on after a member that promises more bytes than there are: its size may be what is damaged."""
        found = find_header(self.fd, member.data, self.stamp.size)
        what = f"the archive is cut inside {member.name!r}: {self.stamp.size - member.data} of {member.size} bytes"
        if found is not None:
            what = f"{member.name!r} promises {member.size} bytes, more than there are; reading goes on at byte {found}"
        self._hurt("shard_cut", max(member.data, 0), what)
        return self.stamp.size if found is None else found

    def _skip_damage(self, position: int, error: DamagedHeaderError) -> int:
        """Where to go on reading after a header that is none."""
        found = find_header(self.fd, error.position + 1, self.stamp.size)
        nothing_yet = not self.run_hash and not self.pending and not self.damage
        if found is None and nothing_yet and position == 0:
            start = self.read(0, 16)
            cure = " (a pointer of Git LFS: git lfs pull)" if start.startswith(b"version https://") else ""
            self._hurt("shard_not_tar", 0, f"this is no tar archive: it starts with {start!r}{cure}")
            return self.stamp.size
        until = "the rest cannot be read" if found is None else f"reading goes on at byte {found}"
        self._hurt("shard_damaged", error.position, f"{error.text}; {until}")
        return self.stamp.size if found is None else found

    def _after_zeros(self, position: int) -> int:
        """The end of the file, or the block after the end mark that is not zero: archives may be concatenated."""
        start = position
        size = self.stamp.size
        while position < size:
            chunk = pread_all(self.fd, _ZEROS_BYTES, position)
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
        settled, rows = _Rows(), self.rows
        for run, key_hash in enumerate(self.run_hash):
            runs = again.get(key_hash)
            if runs is None:
                for place in range(self.run_row[run], ends[run]):
                    settled.add(rows.headers(place, place + 1), rows.status[place], rows.hashes[place])
            elif runs[0] == run:
                for row in self._joined(runs, ends):
                    settled.add(row.headers, row.status, _hash(row.key))
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
            headers.extend(self.rows.headers(self.run_row[run], ends[run]))
        entries: dict[str, list[Entry]] = {}
        for header in sorted(headers):
            entry = read_entry(self.read, header, self.stamp.size)
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
            members = members_of(self.read, row.headers, row.key)
            record = normalised(parse_record(self.read(members[0].offset, min(members[0].size, MAX_RECORD_BYTES))))
            resolver = MemberResolver(self.path, self.stamp, row.key, members[1:], image_names(record))
            for name in image_names(record):
                resolver(name)
        except SampleError as error:
            return error.reason == "image_missing"
        return False

    def _warn_of_split_keys(self, split: list[list[int]]) -> None:
        if not split:
            return
        first_header, second_header = (self.rows.member[self.rows.first[self.run_row[run]]] for run in split[0][:2])
        key = read_entry(self.read, first_header, self.stamp.size).key
        self.warnings.append(
            f"{self.path}: the members of key {key!r} are not adjacent (bytes {first_header} and {second_header}); "
            f"members of one key are joined ({count(len(split), 'such keys')} in this shard)"
        )


def scan_shard(path: str) -> ShardIndex:
    """Index one shard by walking its headers.

    Raises:
        OSError: it cannot be read.
        UserError: it is compressed, so that members cannot be read by position.
    """
    fd = open_file(path)
    try:
        head = os.pread(fd, 8, 0)
        for magic, (what, cure) in _COMPRESSED.items():
            if head.startswith(magic):
                raise UserError(f"shard {path} is {what}-compressed; members are read by position: unpack it ({cure})")
        return _ShardScan(path, fd, stamp_of_open(path, fd)).index()
    finally:
        os.close(fd)


def write_index(path: str) -> ShardIndex:
    """Index one shard and write the index file beside it."""
    index = scan_shard(path)
    with IndexWriter(path, KIND, index.stamp, COLUMNS) as writer:
        for name in COLUMNS:
            writer.append(name, getattr(index, name))
        damage = [[d.reason, d.position, d.text, d.near, d.lost] for d in index.damage]
        # messages name the shard by the path that it was indexed under; a moved shard has a new one
        warnings = [line.replace(path, "{path}") for line in index.warnings]
        writer.finish({"damage": damage, "warnings": warnings}, content=index.content)
    return index


def load_index(path: str, stamp: Stamp) -> ShardIndex | None:
    """The index file beside a shard, memory-mapped; None where there is none.

    Raises:
        BadIndexError: it cannot be used.
    """
    found = read_index(path, KIND, stamp, COLUMNS)
    if found is None:
        return None
    damage, warnings = found.notes.get("damage"), found.notes.get("warnings")
    if not (_is_sound(stamp, found.columns) and _are_damage(damage) and _are_texts(warnings)):
        raise BadIndexError("is damaged")
    return ShardIndex(
        stamp,
        **found.columns,
        content=found.content,
        damage=tuple(Damage(*entry) for entry in damage),
        warnings=tuple(line.replace("{path}", path) for line in warnings),
    )


def _is_sound(stamp: Stamp, columns: Mapping[str, np.ndarray]) -> bool:
    """Whether every row has members, and every member starts within the shard. Whether headers do shows when read."""
    first, member, status, hashes = (columns[name] for name in COLUMNS)
    if not len(first) == len(status) + 1 == len(hashes) + 1 or first[0] != 0 or first[-1] != len(member):
        return False
    if len(member) and member.max() >= stamp.size:
        return False
    return is_increasing(first, strictly=True) and bool(np.isin(status, [OK, *REASONS]).all())


def _are_texts(found: Any) -> TypeGuard[list[str]]:
    return isinstance(found, list) and all(isinstance(each, str) for each in found)


def _are_damage(found: Any) -> TypeGuard[list[list[Any]]]:
    """Whether these are the fields of `Damage`, from JSON."""
    return isinstance(found, list) and all(
        isinstance(each, list)
        and len(each) == 5
        and _are_texts([each[0], each[2]])
        and type(each[1]) is int
        and isinstance(each[3], str | None)
        and _are_texts(each[4])
        for each in found
    )
