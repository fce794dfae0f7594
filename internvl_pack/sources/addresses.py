"""Paths and addresses: which is which, and the bytes of a local file by position.

Paths are handed to the system as UTF-8 bytes, so that a name outside ASCII is found under `LANG=C` too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import RemoteDataError

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")


def is_remote(address: str) -> bool:
    """Whether an address is a URL such as `s3://...` or `https://...` rather than a path."""
    return _SCHEME.match(address) is not None


_local_only: ContextVar[bool] = ContextVar("_local_only", default=False)


@contextmanager
def local_only() -> Iterator[None]:
    """Inside, raise RemoteDataError instead of asking a server.

    For estimates over many samples, which must not take minutes before the first step. An image by address counts as
    remote even where `INTERNVL_PACK_CACHE` holds a copy, so that the result does not depend on earlier runs. Annotation
    files and shards by address were copied when they were opened, and count as local while the copy is there.
    """
    token = _local_only.set(True)
    try:
        yield
    finally:
        _local_only.reset(token)


def check_remote_read(address: str) -> None:
    """To be called before a server is asked.

    Raises:
        RemoteDataError: inside `local_only`.
    """
    if _local_only.get():
        raise RemoteDataError(address)


def system_path(path: str) -> bytes:
    """The path as the bytes that the file system knows, whatever the locale.

    Raises:
        ValueError: the path is unusable.
    """
    raw = path.encode("utf-8", "surrogateescape")
    if b"\0" in raw:
        raise ValueError("a NUL byte in the name")
    return raw


def pread_all(fd: int, num_bytes: int, offset: int) -> bytes:
    """`num_bytes` from `offset`, fewer only at the end of the file."""
    data = os.pread(fd, num_bytes, offset)
    while 0 < len(data) < num_bytes and (more := os.pread(fd, num_bytes - len(data), offset + len(data))):
        data += more
    return data
