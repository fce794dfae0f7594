"""The members of a tar shard: which of them make a sample, and how its record names them.

Keys follow webdataset's rule: the path up to the first dot of its base name (`a.b/c.d.jpg` has key `a.b/c`, ending
`d.jpg`; endings compare in lower case; `./` in front is dropped). A sample is the `.json` member of a key, its record,
and the key's other members. One addition for dots in base names (`22.05.jpg` and `22.05.json`): an ending `X.json`
starts a sample `key.X` of its own where the key has no plain `.json`, or where another member has an ending `X.*`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import SampleError
from .files import Stamp
from .image_refs import ImageRef, SliceRef
from .names import refuse_embedded
from .tar import FOLDERS_AND_LABELS, LINKS_AND_DEVICES, DamagedHeaderError, Member, Reader, read_member

IMAGE_ENDINGS = frozenset({
    "jpg", "jpeg", "jpe", "jfif", "mpo", "png", "webp", "gif", "bmp", "ico", "tif", "tiff", "tga",
    "ppm", "pgm", "pbm", "pnm", "jp2", "avif", "heic", "heif",
})  # fmt: skip

# webdataset's own files, such as __meta__/info
_META = re.compile(r"__[^/]*__($|/)")

# What is wrong with a row, stored as one byte.
OK, NO_RECORD, DUPLICATE, NOT_A_FILE, UNSAFE_NAME, SPARSE, CUT = range(7)
REASONS = {
    NO_RECORD: ("record_missing", "no .json member goes with {member}"),
    DUPLICATE: ("duplicate_member", "{member} is there more than once; which one is meant is not clear"),
    NOT_A_FILE: ("member_not_a_file", "{member} is a link or device, which is not followed"),
    UNSAFE_NAME: ("unsafe_member_name", "{member} has an absolute name or one with '..', which is not used"),
    SPARSE: ("sparse_member", "{member} is stored as a sparse file, which is not supported"),
}


class Entry(NamedTuple):
    """A member that belongs to a key.

    path: without `./`. ending: behind the key, in lower case. header: where its first one is. fault: as a row's status.
        offset, size: of its data.
    """

    path: str
    key: str
    ending: str
    header: int
    fault: int
    offset: int
    size: int

    @property
    def is_image(self) -> bool:
        return self.ending.rpartition(".")[2] in IMAGE_ENDINGS


class Row(NamedTuple):
    """A sample, or what should have been one. `headers`: of its members, the record's first if it has one."""

    key: str
    status: int
    headers: tuple[int, ...]


def is_passed_over(member: Member) -> bool:
    """Folders, volume labels, hidden files (such as `._k0.jpg` of macOS) and webdataset's own `__meta__`."""
    hidden = member.name.rpartition("/")[2].startswith(".")
    return hidden or member.type in FOLDERS_AND_LABELS or _META.match(member.name) is not None


def entry_of(member: Member, archive_size: int) -> Entry | None:
    """The member as part of a key; None for one that cannot be: passed over, or a name without key or ending."""
    name = member.name
    if is_passed_over(member):
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
    return Entry(path, folder + slash + stem, ending.lower(), member.header, fault, member.data, member.size)


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


def members_of(read: Reader, headers: Iterable[int], archive_size: int, key: str | None = None) -> tuple[Entry, ...]:
    """The members of a row by their headers; `key` is the row's, which the first member's name gives if None.

    Raises:
        DamagedHeaderError: the shard is no longer what was indexed.
    """
    entries = [read_entry(read, header, archive_size) for header in headers]
    key = entries[0].path[:-5] if key is None else key
    return tuple(entry._replace(key=key, ending=entry.path[len(key) + 1 :].lower()) for entry in entries)


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


def is_captioned(entries: Sequence[Entry]) -> bool:
    """Whether they are images with a caption, which need no record if the dataset has a `caption`."""
    return len(texts_of(entries)) == 1 and any(entry.is_image for entry in entries)


def texts_of(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.ending.rpartition(".")[2] == "txt"]


def image_names(record: dict[str, Any]) -> list[str]:
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
    members: tuple[Entry, ...]
    named: Sequence[str] = ()

    def __call__(self, name: str) -> ImageRef:
        """The member that a record calls `name`.

        Raises:
            SampleError: `image_missing`, with the names of the members.
        """
        if not isinstance(name, str) or not name:
            raise SampleError("image_missing", f"{name!r} is no member's name")
        refuse_embedded(name)
        member = self._find(name)
        if member is None:
            there = ", ".join(repr(m.path) for m in self.members) or "nothing"
            raise SampleError(
                "image_missing",
                f"no member {name!r:.200} goes with key {self.key!r} of {self.path} (beside the record: {there:.300})",
            )
        return SliceRef(self.path, member.offset, member.size, self.stamp, member.path)

    def _find(self, name: str) -> Entry | None:
        wanted = "/".join(part for part in name.split("/") if part not in ("", "."))
        base = wanted.rpartition("/")[2]
        tests: tuple[Callable[[Entry], bool], ...] = (
            lambda m: _lower_ending(m.path) == _lower_ending(wanted),
            lambda m: _lower_ending(m.path.rpartition("/")[2]) == _lower_ending(wanted),
            lambda m: m.ending == wanted.lower().lstrip("."),
            lambda m: _lower_ending(m.path.rpartition("/")[2]) == _lower_ending(base),
        )
        images = [m for m in self.members if m.is_image]
        alone = images[0] if len(images) == 1 and list(self.named) == [name] else None
        return next((member for test in tests for member in self.members if test(member)), alone)


def _lower_ending(path: str) -> str:
    folder, slash, base = path.rpartition("/")
    stem, dot, ending = base.partition(".")
    return folder + slash + stem + dot + ending.lower()
