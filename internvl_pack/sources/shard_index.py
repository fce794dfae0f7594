"""The index of a tar shard: one walk over its headers, members joined to samples, damage named.

What can be delivered is; every problem is said once with shard, key and byte position. Keys are those of members.py.

Members of a key that are not adjacent are joined, with one warning a shard. Rows that cannot be samples (no record,
a member twice, a link or device, an absolute name or one with `..`) stay rows, with what is wrong as their status.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeGuard

import numpy as np

from ..errors import SampleError, UserError
from ..options import count
from .addresses import pread_all
from .content import PIECE_BYTES, new_hash
from .files import COMPRESSED, Stamp, open_file, stamp_of_open
from .index import BadIndexError, IndexWriter, is_increasing, read_index
from .members import (
    CUT,
    NO_RECORD,
    OK,
    REASONS,
    Entry,
    MemberResolver,
    Row,
    entry_of,
    image_names,
    is_captioned,
    is_passed_over,
    members_of,
    read_entry,
    rows_of_key,
)
from .names import is_data_uri
from .normalise import normalised
from .parse import MAX_RECORD_BYTES, parse_record
from .tar import BLOCK, LINKS_AND_DEVICES, DamagedHeaderError, Member, find_header, read_member, windowed

KIND = "tar"
COLUMNS = {"first": "u4", "member": "u8", "status": "u1", "hashes": "u8"}
_ZEROS_BYTES = 1 << 20
# Damaged places of one shard beyond which the rest of it is given up.
MAX_DAMAGE = 1000


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


class _Columns:
    """Rows that are added one by one, as the arrays of a `ShardIndex`: as objects they would take 15 times as much.

    `first` begins with 0 and ends with the number of members.
    """

    def __init__(self) -> None:
        self.first, self.member, self.status, self.hashes = array("I", [0]), array("Q"), array("B"), array("Q")

    def __len__(self) -> int:
        return len(self.status)

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.member.extend(row.headers)
            self.first.append(len(self.member))
            self.status.append(row.status)
            self.hashes.append(_hash(row.key))

    def copy(self, other: _Columns, start: int, stop: int) -> None:
        """Add rows [start, stop) of others."""
        shift = len(self.member) - other.first[start]
        self.member.extend(other.members(start, stop))
        self.first.extend(end + shift for end in other.first[start + 1 : stop + 1])
        self.status.extend(other.status[start:stop])
        self.hashes.extend(other.hashes[start:stop])

    def members(self, start: int, stop: int) -> array[int]:
        """Positions of the headers of rows [start, stop)."""
        return self.member[self.first[start] : self.first[stop]]


class _ShardScan:
    """One walk over a shard's headers, then a second look at the keys that were split or stand beside damage."""

    def __init__(self, path: str, fd: int, stamp: Stamp) -> None:
        self.path, self.fd, self.stamp = path, fd, stamp
        self.read = windowed(lambda offset, num_bytes: pread_all(fd, num_bytes, offset))
        self.rows = _Columns()
        # A run is the rows of adjacent members of one key: the key's hash, and its first row.
        self.run_keys, self.run_rows = array("q"), array("I", [0])
        self.beside: dict[int, Damage] = {}  # by the run next to it
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
        if not rows and not damage:
            self.warnings.append(f"{self.path} holds no sample")
        return ShardIndex(
            self.stamp,
            np.asarray(rows.first),
            np.asarray(rows.member),
            np.asarray(rows.status),
            np.asarray(rows.hashes),
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
            if not is_passed_over(member):
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
        self.last_key = self.pending[0].key
        if self.scar is not None:
            self.beside[len(self.run_keys)] = self.scar
        self.rows.add(rows_of_key(self.pending))
        self.run_keys.append(hash(self.last_key))
        self.run_rows.append(len(self.rows))
        self.scar, self.pending = None, []

    def _hurt(self, reason: str, position: int, text: str) -> None:
        self._close_run()
        hurt = Damage(reason, position, text, self.last_key)
        self.damage.append(hurt)
        if self.run_keys:
            self.beside[len(self.run_keys) - 1] = hurt
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
        nothing_yet = not self.run_keys and not self.pending and not self.damage
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

    def _settle(self) -> _Columns:
        """Join the runs of one key and see which rows the damage took; all others are as they were read."""
        found, joined = _Columns(), np.zeros(len(self.run_keys), bool)

        def copy(run: int, stop: int) -> None:
            for cut in [*(run + np.flatnonzero(joined[run:stop])).tolist(), stop]:
                found.copy(self.rows, self.run_rows[run], self.run_rows[cut])
                run = cut + 1

        next_run = num_split = 0
        for runs in _looked_at_again(np.array(self.run_keys), list(self.beside)):
            copy(next_run, runs[0])
            next_run = runs[0] + 1
            joined[runs] = True
            headers = [self.rows.members(self.run_rows[run], self.run_rows[run + 1]) for run in runs]
            entries = [read_entry(self.read, each, self.stamp.size) for each in sorted(chain(*headers))]
            if len(runs) > 1:
                num_split += 1
                if num_split == 1:
                    split_key, places = entries[0].key, (headers[0][0], headers[1][0])
            hurt = next((self.beside[run] for run in runs if run in self.beside), None)
            for key in dict.fromkeys(entry.key for entry in entries):  # one, but for keys of one hash
                for row in rows_of_key([entry for entry in entries if entry.key == key]):
                    if hurt is not None and self._was_lost(row):
                        hurt.lost.append(row.key)
                    else:
                        found.add([row])
        copy(next_run, len(self.run_keys))
        if num_split:
            self.warnings.append(
                f"{self.path}: the members of key {split_key!r} are not adjacent (bytes {places[0]} and {places[1]}); "
                f"members of one key are joined ({count(num_split, 'such keys')} in this shard)"
            )
        for hurt in self.damage:
            if not hurt.reason:
                if hurt.lost:
                    hurt.reason = "shard_cut"
                else:
                    self.warnings.append(
                        f"{self.path}: the archive has no end mark at byte {hurt.position}: was it cut?"
                    )
        return found

    def _was_lost(self, row: Row) -> bool:
        """Whether a row beside damage lacks what the damage took: its record or caption, or an image that is named."""
        if row.status not in (OK, NO_RECORD):
            return row.status == CUT
        members = members_of(self.read, row.headers, self.stamp.size, row.key)
        if row.status == NO_RECORD:
            return not is_captioned(members)
        try:
            record = normalised(parse_record(self.read(members[0].offset, min(members[0].size, MAX_RECORD_BYTES))))
            names = image_names(record)
            resolver = MemberResolver(self.path, self.stamp, row.key, members[1:], names)
            for name in names:
                if not is_data_uri(name):  # the record holds it
                    resolver(name)
        except SampleError as error:
            return error.reason == "image_missing"
        return False


def _looked_at_again(keys: np.ndarray, beside: list[int]) -> Iterator[list[int]]:
    """The runs of each key that has several, or whose one is beside damage; by their first.

    Args:
        keys: int64 (runs,), hashes.
    """
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(keys[order]) != 0)[: len(keys)])
    sizes = np.diff(np.append(starts, len(keys)))
    first = order[starts]
    for key in sorted(np.flatnonzero((sizes > 1) | np.isin(first, beside)).tolist(), key=first.__getitem__):
        yield order[starts[key] : starts[key] + sizes[key]].tolist()


def scan_shard(path: str) -> ShardIndex:
    """Index one shard by walking its headers.

    Raises:
        OSError: it cannot be read.
        UserError: it is compressed, so that members cannot be read by position.
    """
    fd = open_file(path)
    try:
        head = os.pread(fd, 8, 0)
        for magic, (what, cure) in COMPRESSED.items():
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
