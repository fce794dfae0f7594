"""Index files: columns of numbers beside a data file, read through a memory map that all processes share.

Layout of `<file>.ivp.idx`, little-endian:

    16 bytes   magic with the format's version
    columns    raw arrays, each from a multiple of 64 bytes
    footer     JSON: kind, the data file's size and mtime_ns, columns {name: [dtype, count, offset]}, notes
    24 bytes   offset and length of the footer (uint64 each), closing magic

An index is used only while the data file has the size and time of change that it was built from. The closing magic
is written last and the file is renamed into place, so that a half-written index is never taken for one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UserError
from .refs import Stamp, system_path

SUFFIX = ".ivp.idx"
"""Not plain `.idx`: other tools keep their own indexes under that name beside shards."""
_MAGIC = b"INTERNVLPACK\0\2\r\n"
_END = b"IVPIDX\0\n"
_TAIL = struct.Struct("<QQ8s")
_ALIGN = 64
_MAX_FOOTER = 256 << 20
_MARK = re.compile("[0-9a-f]{32}")


def index_path(data_path: str) -> str:
    """The index file that belongs to an annotation file or shard."""
    return data_path + SUFFIX


class BadIndexError(Exception):
    """An index file that cannot be used; the message says why."""


@dataclass(frozen=True)
class IndexFile:
    """An opened index: memory-mapped columns and what was noted beside them."""

    kind: str
    stamp: Stamp
    columns: Mapping[str, np.ndarray]
    notes: Mapping[str, Any]

    @property
    def content(self) -> str:
        """The data's content mark, which both kinds of indexes note. Raises BadIndexError where it is none."""
        content = self.notes.get("content")
        if not (isinstance(content, str) and _MARK.fullmatch(content)):
            raise BadIndexError("is damaged")
        return content


def read_index(data_path: str, kind: str, stamp: Stamp, *, only: Sequence[str] | None = None) -> IndexFile | None:
    """The index beside `data_path`, or None where there is none.

    Args:
        kind: the kind of data it must have been built for.
        stamp: the data file as it is now.
        only: names of the columns to map; all for None.

    Raises:
        BadIndexError: it is stale, damaged, of another version or kind, or unreadable.
    """
    path = index_path(data_path)
    try:
        file = open(system_path(path), "rb")  # noqa: SIM115 - closed below, the map keeps its own descriptor
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadIndexError(f"cannot be read: {error.strerror}") from None
    with file:
        footer = _read_footer(file)
        found = Stamp(footer["size"], footer["mtime_ns"])
        if footer["kind"] != kind:
            raise BadIndexError(f"was built for {footer['kind']}, not {kind}")
        if found != stamp:
            raise BadIndexError("is older than the data, which has changed since")
        columns = {}
        for name, (dtype, count, offset) in footer["columns"].items():
            if only is not None and name not in only:
                continue
            if count == 0:
                columns[name] = np.empty(0, dtype)
            else:
                mapped = np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=(count,))
                columns[name] = np.asarray(mapped)  # the plain array over it is quicker to take numbers from
    return IndexFile(kind, found, columns, footer["notes"])


def _read_footer(file: Any) -> dict[str, Any]:
    size = os.fstat(file.fileno()).st_size
    if file.read(len(_MAGIC)) != _MAGIC:
        raise BadIndexError("is of another program or version")
    if size < len(_MAGIC) + _TAIL.size:
        raise BadIndexError("is cut")
    file.seek(size - _TAIL.size)
    offset, length, end = _TAIL.unpack(file.read(_TAIL.size))
    if end != _END or length > _MAX_FOOTER or offset + length + _TAIL.size != size:
        raise BadIndexError("is cut or damaged")
    file.seek(offset)
    try:
        footer = json.loads(file.read(length))
        for dtype, count, start in footer["columns"].values():
            if start < len(_MAGIC) or count < 0 or start + np.dtype(dtype).itemsize * count > offset:
                raise BadIndexError("is damaged")
        if not (isinstance(footer["size"], int) and isinstance(footer["mtime_ns"], int)):
            raise BadIndexError("is damaged")
        if not (isinstance(footer["kind"], str) and isinstance(footer["notes"], dict)):
            raise BadIndexError("is damaged")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadIndexError("is damaged") from None
    return footer


class IndexWriter:
    """Writes an index a piece at a time, in flat memory.

    Use as a context manager; without `finish` nothing is left behind.

    Raises:
        UserError: the folder cannot be written, or a file by the index's name belongs to something else.
    """

    def __init__(self, data_path: str, kind: str, stamp: Stamp, columns: Mapping[str, str]) -> None:
        self._path = system_path(index_path(data_path))
        self._kind, self._stamp = kind, stamp
        self._dtypes = {name: np.dtype(dtype).newbyteorder("<") for name, dtype in columns.items()}
        self._counts = dict.fromkeys(columns, 0)
        folder = os.path.dirname(self._path) or b"."
        try:
            descriptor, self._temporary = tempfile.mkstemp(
                prefix=os.path.basename(self._path)[-60:] + b".", suffix=b".tmp", dir=folder
            )
            self._file = os.fdopen(descriptor, "wb")
            self._spools = {name: tempfile.TemporaryFile(dir=folder) for name in columns}  # noqa: SIM115
        except OSError as error:
            raise UserError(f"cannot write an index beside {data_path}: {error.strerror}") from None

    def append(self, name: str, values: np.ndarray) -> None:
        self._counts[name] += len(values)
        self._spools[name].write(np.ascontiguousarray(values, self._dtypes[name]).data)

    def finish(self, notes: Mapping[str, Any]) -> None:
        """Put the columns together and rename the file into place."""
        self._file.write(_MAGIC)
        columns = {}
        for name, spool in self._spools.items():
            self._file.write(bytes(-self._file.tell() % _ALIGN))
            columns[name] = (self._dtypes[name].str, self._counts[name], self._file.tell())
            spool.seek(0)
            shutil.copyfileobj(spool, self._file, 1 << 20)
        footer = {"kind": self._kind, "size": self._stamp.size, "mtime_ns": self._stamp.mtime_ns}
        raw = json.dumps({**footer, "columns": columns, "notes": dict(notes)}).encode()
        offset = self._file.tell()
        self._file.write(raw)
        self._file.write(_TAIL.pack(offset, len(raw), _END))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.fchmod(self._file.fileno(), 0o666 & ~_umask())
        self._close()
        os.replace(self._temporary, self._path)
        self._temporary = b""

    def _close(self) -> None:
        self._file.close()
        for spool in self._spools.values():
            spool.close()

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        if self._temporary:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
