"""Annotation files and shards, local or by address, read by position. Addresses are read by their local copies."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

from ..errors import UserError
from . import remote
from .addresses import check_remote_read, is_remote, pread_all, system_path

# Descriptors of annotation files and shards that a process keeps open.
MAX_OPEN_FILES = 128

# How compressed files begin, of which nothing can be read by position: (what they are, what unpacks them).
COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"PK\x03\x04": ("zip", "unzip"),
}


class Stamp(NamedTuple):
    """Identifies the state of a file that was indexed: size in bytes, time of change in ns."""

    size: int
    mtime_ns: int


def stamp_of(path: str) -> Stamp:
    """Size and time of change of a file; of an address, those of its local copy, which is made or renewed here.

    Raises:
        OSError: there is no such file.
    """
    return _stamp(path, os.stat(remote.copy_of(path, check=True) if is_remote(path) else system_path(path)))


def stamp_of_open(path: str, fd: int) -> Stamp:
    """As `stamp_of`, of a file that is open."""
    return _stamp(path, os.fstat(fd))


def _stamp(path: str, found: os.stat_result) -> Stamp:
    return Stamp(found.st_size, remote.mark_of(path) if is_remote(path) else found.st_mtime_ns)


def open_file(path: str) -> int:
    """A descriptor to read a file by, or the local copy of an address.

    Raises:
        OSError: it cannot be opened.
    """
    if is_remote(path):
        path = remote.copy_of(path)
    return os.open(system_path(path), os.O_RDONLY)


class _Descriptor:
    """An open file that closes when the last user lets go of it, so that eviction never pulls it from under a read."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class _NoCopyError(Exception):
    """The local copy of an address had to make room for others."""


@lru_cache(maxsize=MAX_OPEN_FILES)
def _descriptor(path: str, stamp: Stamp) -> _Descriptor:
    """Forked workers share it: reading by position moves nothing in it."""
    if is_remote(path) and remote.cached(path) is None:
        raise _NoCopyError
    opened = _Descriptor(open_file(path))
    size = os.fstat(opened.fd).st_size
    if size != stamp.size:
        raise UserError(
            f"{path} changed while it was in use: {stamp.size} bytes when opened first, {size} now; "
            "start again with the finished file"
        )
    return opened


def read_at(path: str, stamp: Stamp, offset: int, num_bytes: int) -> bytes:
    """Bytes [offset, offset + num_bytes) of an indexed file, fewer only at its end.

    Raises:
        OSError: the file went away or the disk failed.
        UserError: the file has another size than when it was indexed.
    """
    try:
        opened = _descriptor(path, stamp)
    except _NoCopyError:
        check_remote_read(path)
        return remote.fetch(path, offset, min(offset + num_bytes, stamp.size))  # a part is enough
    return pread_all(opened.fd, num_bytes, offset)
