"""Where bytes come from: local files read by position, and references to images that open nothing until asked.

Everything in `sources/` reads through `open_file`, `read_at` and the references, so that addresses (http, s3, ...) have
one place: remote.py, behind `is_remote`.

Paths are handed to the system as UTF-8 bytes, so that a name outside ASCII is found under `LANG=C` too.
"""

from __future__ import annotations

import io
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol, runtime_checkable

from ..errors import MACHINE_ERRORS, FarAwayError, SampleError, UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_OPEN_FILES = 128
"""Descriptors of annotation files and shards that a process keeps open."""
MAX_IMAGE_BYTES = 256 << 20
"""Compressed size beyond which an image is refused unread: no worker needs more memory than that for its bytes."""

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")


class Stamp(NamedTuple):
    """What tells whether a file is still the one that was indexed: size in bytes, time of change in ns."""

    size: int
    mtime_ns: int


@runtime_checkable
class ImageRef(Protocol):
    """A place of compressed image bytes. Small, picklable, opens nothing until read."""

    @property
    def name(self) -> str:
        """The place for messages: a path, or `shard:member`."""
        ...

    def read(self) -> bytes:
        """All bytes. Raises SampleError (`image_missing`, `image_unreadable`, `image_empty`, ...)."""
        ...

    def head(self, num_bytes: int) -> bytes:
        """The first bytes, at most `num_bytes`. Raises as `read`."""
        ...

    def open(self) -> BinaryIO:
        """All bytes as a seekable file, for what is too large to be read at once. Raises as `read`."""
        ...


def is_remote(address: str) -> bool:
    """Whether an address is a URL such as `s3://...` or `https://...` rather than a path."""
    return _SCHEME.match(address) is not None


_only_near: ContextVar[bool] = ContextVar("_only_near", default=False)


@contextmanager
def only_near() -> Iterator[None]:
    """No server is asked inside: what would ask one raises FarAwayError instead.

    For a look ahead at many samples, which must not take minutes before the first step. An image by address counts as
    far even where it is kept (`INTERNVL_PACK_CACHE`), so that what follows does not depend on what was fetched before;
    annotation files and shards by address were copied when they were opened, and are near while their copy is there.
    """
    token = _only_near.set(True)
    try:
        yield
    finally:
        _only_near.reset(token)


def about_to_ask(address: str) -> None:
    """Raises FarAwayError inside `only_near`."""
    if _only_near.get():
        raise FarAwayError(address)


def system_path(path: str) -> bytes:
    """The path as the bytes that the file system knows, whatever the locale. Raises ValueError for an unusable one."""
    raw = path.encode("utf-8", "surrogateescape")
    if b"\0" in raw:
        raise ValueError("a NUL byte in the name")
    return raw


def stamp_of(path: str) -> Stamp:
    """Raises OSError where there is no such file. Of an address: of its local copy, made or renewed here."""
    if is_remote(path):
        from . import remote

        return Stamp(os.stat(remote.copy_of(path, check=True)).st_size, remote.mark_of(path))
    found = os.stat(system_path(path))
    return Stamp(found.st_size, found.st_mtime_ns)


def open_file(path: str) -> int:
    """A descriptor to read a file by, or the local copy of an address. Raises OSError."""
    if is_remote(path):
        from . import remote

        path = remote.copy_of(path)
    return os.open(system_path(path), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))


def stamp_of_open(path: str, fd: int) -> Stamp:
    """As `stamp_of`, of a file that is open."""
    found = os.fstat(fd)
    if is_remote(path):
        from . import remote

        return Stamp(found.st_size, remote.mark_of(path))
    return Stamp(found.st_size, found.st_mtime_ns)


class _Descriptor:
    """An open file that closes when the last user lets go of it, so that eviction never pulls it from under a read."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


_open_files: OrderedDict[tuple[str, Stamp], _Descriptor] = OrderedDict()
_lock = threading.Lock()


def _forget_open_files() -> None:
    """In a forked child: drop the parent's descriptors and a lock that another thread may have held."""
    global _lock
    _lock = threading.Lock()
    _open_files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_open_files)


def _descriptor(path: str, stamp: Stamp) -> _Descriptor:
    key = (path, stamp)
    with _lock:
        opened = _open_files.get(key)
        if opened is not None:
            _open_files.move_to_end(key)
            return opened
    opened = _Descriptor(open_file(path))
    size = os.fstat(opened.fd).st_size
    if size != stamp.size:
        raise UserError(
            f"{path} changed while it was in use: {stamp.size} bytes when opened first, {size} now; "
            "start again with the finished file"
        )
    with _lock:
        _open_files[key] = opened
        while len(_open_files) > MAX_OPEN_FILES:
            _open_files.popitem(last=False)
    return opened


def pread_all(fd: int, num_bytes: int, offset: int) -> bytes:
    """`num_bytes` from `offset`, fewer only at the end of the file."""
    data = os.pread(fd, num_bytes, offset)
    if len(data) == num_bytes or not data:
        return data
    parts = [data]
    have = len(data)
    while have < num_bytes:
        more = os.pread(fd, num_bytes - have, offset + have)
        if not more:
            break
        parts.append(more)
        have += len(more)
    return b"".join(parts)


def read_at(path: str, stamp: Stamp, offset: int, num_bytes: int) -> bytes:
    """Bytes [offset, offset + num_bytes) of an indexed file, fewer only at its end.

    The descriptor is kept and reopened in every process; reading moves no shared file position, so threads and
    forked workers do not disturb each other.

    Raises:
        OSError: the file went away or the disk failed.
        UserError: the file has another size than when it was indexed.
    """
    if is_remote(path) and (path, stamp) not in _open_files:
        from . import remote

        if remote.cached(path) is None:  # it had to make room: a part is enough
            about_to_ask(path)
            return remote.fetch(path, offset, min(offset + num_bytes, stamp.size))
    return pread_all(_descriptor(path, stamp).fd, num_bytes, offset)


def _sample_error(path: str, error: Exception) -> SampleError:
    if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
        raise error
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return SampleError("image_missing", f"there is no file {path!r}")
    if isinstance(error, OSError):
        what = getattr(error, "what", None) or error.strerror or error  # a RemoteError's without its address
        return SampleError("image_unreadable", f"{path!r}: {what}")
    return SampleError("image_missing", f"{path!r} cannot be a file name: {error}")


@dataclass(frozen=True)
class FileRef:
    """An image that is a file of its own."""

    path: str

    @property
    def name(self) -> str:
        return self.path

    def read(self) -> bytes:
        return self._read(None)

    def head(self, num_bytes: int) -> bytes:
        return self._read(num_bytes)

    def open(self) -> BinaryIO:
        fd, _ = self._open()
        return os.fdopen(fd, "rb")

    def _open(self) -> tuple[int, int]:
        """(descriptor, size in bytes)"""
        try:
            # not blocking: a pipe by that name must not hang the worker before it is refused
            fd = os.open(system_path(self.path), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
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
        """The file's first `limit` bytes; all for None."""
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
class SliceRef:
    """An image that is a part of a larger file: a member of a tar shard, bytes [offset, offset + size)."""

    path: str
    offset: int
    size: int
    stamp: Stamp
    member: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}:{self.member or self.offset}"

    def read(self) -> bytes:
        return self._read(self.size)

    def head(self, num_bytes: int) -> bytes:
        return self._read(min(num_bytes, self.size))

    def open(self) -> BinaryIO:
        if self.size == 0:
            raise SampleError("image_empty", f"{self.name} has 0 bytes")
        return io.BufferedReader(_Window(self), 1 << 16)

    def _read(self, num_bytes: int, offset: int = 0) -> bytes:
        """`num_bytes` from `offset` within the member."""
        if self.size == 0:
            raise SampleError("image_empty", f"{self.name} has 0 bytes")
        if num_bytes > MAX_IMAGE_BYTES:
            raise SampleError("image_too_many_bytes", f"{self.name}: {self.size} bytes")
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
            view[:count] = self._ref._read(count, self._position)
            self._position += count
        return count


@dataclass(frozen=True)
class FolderResolver:
    """Finds the files that a record names, below the dataset's `root`.

    Either may be an address. Names are joined to `root` as `os.path.join` does: an absolute name stands for itself,
    and `..` may lead out of `root`, since whoever wrote the annotation file may read these files anyway.
    """

    root: str

    def __call__(self, name: str) -> ImageRef:
        """Raises SampleError where `name` cannot name a file; a file that is absent shows when it is read."""
        if not isinstance(name, str) or not name:
            raise SampleError("image_missing", f"{name!r} is no file name")
        path = name if is_remote(name) else os.path.join(self.root, name)
        if is_remote(path):
            from .remote import RemoteRef

            return RemoteRef(path)
        return FileRef(path)
