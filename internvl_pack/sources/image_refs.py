"""References to images and videos: places of compressed bytes that open nothing until they are asked."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Protocol, runtime_checkable

from ..errors import MACHINE_ERRORS, SampleError
from . import remote
from .addresses import check_remote_read, is_remote, pread_all, system_path
from .files import Stamp, read_at
from .names import AROUND_URL, hint_of, other_forms, refuse_embedded
from .reach import check_address, check_inside, hosts_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Compressed size beyond which an image is refused unread: no worker needs more memory than that for its bytes.
MAX_IMAGE_BYTES = 256 << 20

# Characters of a data: URI in which its comma is looked for, so that a long text without one is not searched.
_MAX_MEDIA_TYPE = 256


@runtime_checkable
class ImageRef(Protocol):
    """A place of compressed image bytes. Small, picklable, opens nothing until read."""

    @property
    def name(self) -> str:
        """The place for messages: a path, or `shard:member`."""
        ...

    def read(self) -> bytes:
        """All bytes.

        Raises:
            SampleError: `image_missing`, `image_unreadable`, `image_empty`, ...
        """
        ...

    def head(self, num_bytes: int) -> bytes:
        """The first bytes, at most `num_bytes`. Raises as `read`."""
        ...

    def open(self) -> BinaryIO:
        """All bytes as a seekable file, for what is too large to be read at once. Raises as `read`."""
        ...


def _sample_error(path: str, error: Exception) -> SampleError:
    if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
        raise error
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return SampleError("image_missing", f"there is no file {path!r:.300}{hint_of(path)}")
    if isinstance(error, OSError):
        what = getattr(error, "what", None) or error.strerror or error  # a RemoteError's without its address
        return SampleError("image_unreadable", f"{path!r:.300}: {what}")
    return SampleError("image_missing", f"{path!r:.300} cannot be a file name: {error}")


def _open_either_form(path: str, flags: int) -> int:
    """A descriptor of a file by its name, or by the same name in the other normal form of Unicode (see names.py)."""
    try:
        return os.open(system_path(path), flags)
    except FileNotFoundError:
        for other in other_forms(path):
            with contextlib.suppress(FileNotFoundError):
                return os.open(system_path(other), flags)
        raise


class ReadsBytes:
    """An `ImageRef`, by a `_read` of its first `limit` bytes; None for all."""

    def _read(self, limit: int | None) -> bytes:
        raise NotImplementedError

    def read(self) -> bytes:
        return self._read(None)

    def head(self, num_bytes: int) -> bytes:
        return self._read(num_bytes)

    def open(self) -> BinaryIO:
        return io.BytesIO(self.read())


@dataclass(frozen=True)
class FileRef(ReadsBytes):
    """An image that is a file of its own."""

    path: str

    @property
    def name(self) -> str:
        return self.path

    def open(self) -> BinaryIO:
        fd, _ = self._open()
        return os.fdopen(fd, "rb")

    def _open(self) -> tuple[int, int]:
        """(descriptor, size in bytes)"""
        try:
            # not blocking: a pipe by that name must not hang the worker before it is refused
            fd = _open_either_form(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except (OSError, ValueError) as error:
            raise _sample_error(self.path, error) from None
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_size:
            return fd, found.st_size
        os.close(fd)
        if not stat.S_ISREG(found.st_mode):
            raise SampleError("image_not_a_file", f"{self.path!r} is a folder, pipe or device")
        raise SampleError("image_empty", f"{self.path!r} has 0 bytes")

    def _read(self, limit: int | None) -> bytes:
        fd, size = self._open()
        try:
            if limit is None and size > MAX_IMAGE_BYTES:
                raise SampleError("image_too_many_bytes", f"{self.path!r}: {size} bytes")
            return pread_all(fd, size if limit is None else min(limit, size), 0)
        except OSError as error:
            raise _sample_error(self.path, error) from None
        finally:
            os.close(fd)


@dataclass(frozen=True)
class SliceRef(ReadsBytes):
    """An image that is a part of a larger file: a member of a tar shard, bytes [offset, offset + size)."""

    path: str
    offset: int
    size: int
    stamp: Stamp
    member: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}:{self.member or self.offset}"

    def open(self) -> BinaryIO:
        self._check_filled()
        return io.BufferedReader(_Window(self), 1 << 16)

    def _read(self, limit: int | None) -> bytes:
        self._check_filled()
        num_bytes = self.size if limit is None else min(limit, self.size)
        if num_bytes > MAX_IMAGE_BYTES:
            raise SampleError("image_too_many_bytes", f"{self.name}: {self.size} bytes")
        return self.part(num_bytes, 0)

    def _check_filled(self) -> None:
        if self.size == 0:
            raise SampleError("image_empty", f"{self.name} has 0 bytes")

    def part(self, num_bytes: int, offset: int) -> bytes:
        """`num_bytes` from `offset` within the member."""
        try:
            data = read_at(self.path, self.stamp, self.offset + offset, num_bytes)
        except OSError as error:
            raise _sample_error(self.name, error) from None
        if len(data) < num_bytes:
            raise SampleError("image_unreadable", f"{self.name}: the shard ends inside it")
        return data


class _Window(io.RawIOBase):
    """A member of a shard as a file that is read by position."""

    def __init__(self, ref: SliceRef) -> None:
        self._ref = ref
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._ref.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._ref.size - self._position))
        if count:
            view[:count] = self._ref.part(count, self._position)
            self._position += count
        return count


@dataclass(frozen=True)
class RemoteRef(ReadsBytes):
    """An image or video that is a file of its own at an address."""

    address: str

    @property
    def name(self) -> str:
        return self.address

    def open(self) -> BinaryIO:
        """Videos are copied whole: players jump about in them."""
        check_remote_read(self.address)
        with self._failures():
            return open(remote.image_copy_of(self.address), "rb")

    def _read(self, limit: int | None) -> bytes:
        check_remote_read(self.address)
        with self._failures():
            try:
                with open(remote.image_copy_of(self.address, limit=MAX_IMAGE_BYTES), "rb") as file:
                    data = file.read(limit)
            except FileNotFoundError:  # another process needed its room
                data = remote.fetch(self.address, 0, limit, limit=MAX_IMAGE_BYTES)
        if not data:
            raise SampleError("image_empty", f"{self.address} has 0 bytes")
        return data

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except remote.RemoteError as error:
            reasons = {"gone": "image_missing", "large": "image_too_many_bytes"}
            raise SampleError(reasons.get(error.kind, "image_unreachable"), str(error.strerror)) from None
        except remote.NoStoreError as error:  # one stray address must not end a run
            raise SampleError("remote_not_supported", str(error)) from None


@dataclass(frozen=True)
class DataRef(ReadsBytes):
    """An image or video that its record holds: a `data:` URI in base64 (RFC 2397). It is decoded when it is read.

    Args:
        uri: as the record has it; the same string, not a copy, where no space is around it.
        number: of the image in its record, from 1.
    """

    uri: str = field(repr=False)
    number: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", self.uri.strip(AROUND_URL))

    @property
    def name(self) -> str:
        return f"data:{self.uri[5:45].partition(',')[0].partition(';')[0]} ({self.number})"

    def _read(self, limit: int | None) -> bytes:
        uri = self.uri.replace("\n", "").replace("\r", "")  # as MIME writes it; the same string where there are none
        start = uri.find(",", 0, _MAX_MEDIA_TYPE) + 1
        size = len(uri) - start  # in characters, four for three bytes
        if not uri[:start].lower().endswith(";base64,"):
            raise SampleError("image_field", f"{self._begins} is no data: URI in base64, 'data:image/png;base64,...'")
        if not size:
            raise SampleError("image_empty", f"{self._begins} has 0 bytes")
        if size // 4 * 3 > MAX_IMAGE_BYTES:
            raise SampleError("image_too_many_bytes", f"{self._begins}: {size // 4 * 3} bytes")
        if size % 4:
            raise SampleError(
                "image_corrupt", f"{self._begins}: {size} characters of base64 are no multiple of 4; was it cut?"
            )
        stop = None if limit is None else start + (limit + 2) // 3 * 4
        try:
            return base64.b64decode(uri[start:stop], validate=True)[:limit]
        except ValueError as error:  # binascii.Error among them
            raise SampleError("image_corrupt", f"{self._begins} is not in base64: {error}") from None

    @property
    def _begins(self) -> str:
        """The URI's beginning, for messages that say what is wrong with it."""
        return f"image {self.number}, {self.uri[:40]!r}..."


@dataclass(frozen=True)
class FolderResolver:
    """Finds the files that a record names, below the dataset's `root`.

    Either may be an address. Names are joined to `root` as `os.path.join` does, so that an absolute name stands for
    itself; what they may reach is decided in reach.py.

    Args:
        root: of the dataset; "" where names are absolute.
        hosts: those that the meta file names, as `reach.host_of` writes them.
    """

    root: str
    hosts: frozenset[str] = frozenset()

    def __call__(self, name: str) -> ImageRef:
        """The file that a record calls `name`; an absent one shows when it is read.

        Raises:
            SampleError: `name` cannot or may not name a file.
        """
        if not isinstance(name, str) or not name:
            raise SampleError("image_missing", f"{name!r} is no file name")
        refuse_embedded(name)
        if is_remote(name):
            check_address(name, self.hosts | hosts_of([self.root]))
            return RemoteRef(name)
        check_inside(self.root, name)
        path = os.path.join(self.root, name)
        return RemoteRef(path) if is_remote(path) else FileRef(path)
