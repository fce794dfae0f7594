"""Annotation files and shards, local or by address, read by position. Addresses are read by their local copies."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import NamedTuple

from ..errors import UserError
from . import remote
from .addresses import check_remote_read, is_remote, pread_all, system_path

# Descriptors of annotation files and shards that a process keeps open.
MAX_OPEN_FILES = 128


class Stamp(NamedTuple):
    """Identifies the state of a file that was indexed: size in bytes, time of change in ns."""

    size: int
    mtime_ns: int


def stamp_of(path: str) -> Stamp:
    """Size and time of change of a file; of an address, those of its local copy, which is made or renewed here.

    Raises:
        OSError: there is no such file.
    """
    if is_remote(path):
        return Stamp(os.stat(remote.copy_of(path, check=True)).st_size, remote.mark_of(path))
    found = os.stat(system_path(path))
    return Stamp(found.st_size, found.st_mtime_ns)


def open_file(path: str) -> int:
    """A descriptor to read a file by, or the local copy of an address.

    Raises:
        OSError: it cannot be opened.
    """
    if is_remote(path):
        path = remote.copy_of(path)
    return os.open(system_path(path), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))


def stamp_of_open(path: str, fd: int) -> Stamp:
    """As `stamp_of`, of a file that is open."""
    found = os.fstat(fd)
    if is_remote(path):
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


def read_at(path: str, stamp: Stamp, offset: int, num_bytes: int) -> bytes:
    """Bytes [offset, offset + num_bytes) of an indexed file, fewer only at its end.

    The descriptor is kept and reopened in every process; reading moves no shared file position, so threads and
    forked workers do not disturb each other.

    Raises:
        OSError: the file went away or the disk failed.
        UserError: the file has another size than when it was indexed.
    """
    if is_remote(path) and (path, stamp) not in _open_files and remote.cached(path) is None:
        check_remote_read(path)
        return remote.fetch(path, offset, min(offset + num_bytes, stamp.size))  # it had to make room: a part is enough
    return pread_all(_descriptor(path, stamp).fd, num_bytes, offset)
