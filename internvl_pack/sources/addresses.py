"""Paths and addresses: which is which, and the bytes of a local file by position.

Paths are handed to the system as UTF-8 bytes, so that a name outside ASCII is found under `LANG=C` too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import FarAwayError

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")


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
