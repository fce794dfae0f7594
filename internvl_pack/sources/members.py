"""The members of one sample in a tar shard, and how its record names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import SampleError
from .files import Stamp
from .image_refs import ImageRef, SliceRef
from .names import refuse_embedded
from .tar import DamagedHeaderError, Reader, read_member

IMAGE_ENDINGS = frozenset({
    "jpg", "jpeg", "jpe", "jfif", "mpo", "png", "webp", "gif", "bmp", "ico", "tif", "tiff", "tga",
    "ppm", "pgm", "pbm", "pnm", "jp2", "avif", "heic", "heif",
})  # fmt: skip


class MemberSlice(NamedTuple):
    """A member of a sample: path, ending after the sample's key in lower case, data's place and size."""

    path: str
    ending: str
    offset: int
    size: int

    @property
    def is_image(self) -> bool:
        return self.ending.rpartition(".")[2] in IMAGE_ENDINGS


def members_of(read: Reader, headers: Iterable[int], key: str | None = None) -> tuple[MemberSlice, ...]:
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
    members: tuple[MemberSlice, ...]
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
        images = [m for m in self.members if m.is_image]
        if len(images) == 1 and list(self.named) == [name]:
            return images[0]
        return None


def _lower_ending(path: str) -> str:
    folder, slash, base = path.rpartition("/")
    stem, dot, ending = base.partition(".")
    return folder + slash + stem + dot + ending.lower()
