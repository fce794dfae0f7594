"""Index files: columns of numbers beside a data file, read through a memory map that all processes share.

`<file>.internvl_pack.arrow` is an Arrow IPC file of one row, whose columns are lists of unsigned integers. The schema's
metadata holds, as JSON, the kind, the size and mtime_ns of the data file, notes, and a checksum of all of it.

An index is used only while the data file has the size and time of change that it was built from. It is renamed into
place when it is whole. Since it is taken up by itself wherever it lies, nothing in it is believed: columns of other
names, types or lengths, and what Arrow's own validation or the checksum refuses, make it a bad index. What the numbers
mean is for the kinds to check.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import struct
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UserError
from .content import new_hash
from .files import Stamp, system_path

SUFFIX = ".internvl_pack.arrow"
_KEY = b"internvl_pack"
_VERSION = 3
_MAGIC = b"ARROW1"  # at both ends of an Arrow IPC file
_MAX_SCHEMA_BYTES = 4 << 20  # notes included
_MARK = re.compile("[0-9a-f]{32}")
_BLOCK = 1 << 20  # numbers that are checked at a time


def index_path(data_path: str) -> str:
    """The index file that belongs to an annotation file or shard."""
    return data_path + SUFFIX


class BadIndexError(Exception):
    """An index file that cannot be used; the message says why."""


@dataclass(frozen=True)
class IndexFile:
    """An opened index: memory-mapped columns, what was noted beside them, and the data's content mark."""

    columns: Mapping[str, np.ndarray]
    notes: Mapping[str, Any]
    content: str


def read_index(data_path: str, kind: str, stamp: Stamp, columns: Mapping[str, str]) -> IndexFile | None:
    """The index beside `data_path`, or None where there is none.

    Args:
        kind: the kind of data it must have been built for.
        stamp: the data file as it is now.
        columns: names and types (numpy's, such as `u4`) that it must have.

    Raises:
        BadIndexError: it is stale, damaged, of another version or kind, or unreadable.
    """
    try:
        fd = os.open(system_path(index_path(data_path)), os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadIndexError(f"cannot be read: {error.strerror}") from None
    try:
        mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        raise BadIndexError("is empty or cannot be mapped") from None
    finally:
        os.close(fd)
    import pyarrow  # here, since it costs a tenth of a second and data without an index needs none of it

    rubbish = (pyarrow.ArrowException, OSError, EOFError, StopIteration, MemoryError)  # what Arrow raises for it
    try:
        return _read(mapped, kind, stamp, columns)
    except (*rubbish, ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error):
        raise BadIndexError("is damaged") from None


def _read(mapped: mmap.mmap, kind: str, stamp: Stamp, columns: Mapping[str, str]) -> IndexFile:
    """As `read_index`. Raises what Arrow, json and struct raise for rubbish."""
    import pyarrow as pa

    if mapped[: len(_MAGIC)] != _MAGIC:
        raise BadIndexError("is of another program or version")
    if mapped[-len(_MAGIC) :] != _MAGIC:
        raise BadIndexError("is cut")
    _, length = struct.unpack_from("<Ii", mapped, 8)
    _check(length <= _MAX_SCHEMA_BYTES)
    stream = pa.py_buffer(mapped)[8:]  # what an Arrow IPC file holds is a stream; its footer repeats the schema
    messages = pa.ipc.MessageReader.open_stream(stream)
    _check(messages.read_next_message().type == "schema")  # which Arrow takes for granted
    reader = pa.ipc.open_stream(stream)
    schema = reader.schema
    head = json.loads((schema.metadata or {}).get(_KEY, b"{}"))
    if head.get("version") != _VERSION:
        raise BadIndexError("is of another program or version")
    if head["kind"] != kind:
        raise BadIndexError(f"was built for {head['kind']!r:.20}, not {kind}")
    _check(all(type(head[name]) is int for name in ("size", "mtime_ns")))
    if Stamp(head["size"], head["mtime_ns"]) != stamp:
        raise BadIndexError("is older than the data, which has changed since")
    _check(schema.equals(_schema(columns)))
    message = messages.read_next_message()
    _check(message.type == "record batch" and not _is_compressed(message.metadata))
    batch = reader.read_next_batch()
    batch.validate(full=True)
    _check(len(batch) == 1 and not any(column.null_count for column in batch.columns))
    arrays = {name: batch.column(name).flatten().to_numpy(zero_copy_only=True) for name in columns}
    notes, content = head["notes"], head["content"]
    _check(isinstance(notes, dict) and isinstance(content, str) and _MARK.fullmatch(content) is not None)
    _check(_checksum({**head, "checksum": None}, arrays) == head["checksum"])
    return IndexFile(arrays, notes, content)


def _check(is_whole: bool) -> None:
    if not is_whole:
        raise BadIndexError("is damaged")


def _schema(columns: Mapping[str, str]) -> Any:
    import pyarrow as pa

    return pa.schema([(name, pa.large_list(pa.from_numpy_dtype(np.dtype(dtype)))) for name, dtype in columns.items()])


def _is_compressed(metadata: Any) -> bool:
    """Whether a record batch's buffers are compressed: ours never are, and a few bytes may unpack to any size.

    Follows Arrow's format/Message.fbs: the table `Message` has its header as field 2, `RecordBatch` its compression as
    field 3. Arrow has verified the flatbuffer by now.
    """
    data = memoryview(metadata)

    def field(table: int, number: int) -> int:
        """Where a field of a table is, 0 if it is absent."""
        vtable = table - struct.unpack_from("<i", data, table)[0]
        length = struct.unpack_from("<H", data, vtable)[0]
        offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0] if 4 + 2 * number < length else 0
        return table + offset if offset else 0

    def table_at(place: int) -> int:
        return place + struct.unpack_from("<I", data, place)[0]

    return bool(field(table_at(field(table_at(0), 2)), 3))


def _checksum(head: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    digest = new_hash()
    digest.update(json.dumps(head, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data)
    return digest.hexdigest()


def is_increasing(values: np.ndarray, *, strictly: bool = False) -> bool:
    """Whether numbers never fall, or always rise. Flat in memory."""
    compare = np.greater if strictly else np.greater_equal
    blocks: Iterable[np.ndarray] = (values[start : start + _BLOCK + 1] for start in range(0, len(values), _BLOCK))
    return all(compare(block[1:], block[:-1]).all() for block in blocks)


class IndexWriter:
    """Writes an index a piece at a time, in flat memory.

    Use as a context manager; without `finish` nothing is left behind.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, data_path: str, kind: str, stamp: Stamp, columns: Mapping[str, str]) -> None:
        self._path = system_path(index_path(data_path))
        self._kind, self._stamp, self._columns = kind, stamp, columns
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
        self._spools[name].write(np.ascontiguousarray(values, self._columns[name]).data)

    def finish(self, notes: Mapping[str, Any], *, content: str) -> None:
        """Put the columns together and rename the file into place.

        Args:
            content: the data's content mark.
        """
        import pyarrow as pa

        arrays = {name: self._spooled(name) for name in self._columns}
        head = {"version": _VERSION, "kind": self._kind, **self._stamp._asdict(), "content": content}
        head |= {"notes": dict(notes), "checksum": None}
        head["checksum"] = _checksum(json.loads(json.dumps(head)), arrays)
        schema = _schema(self._columns)
        columns = [pa.LargeListArray.from_arrays([0, len(array)], pa.array(array)) for array in arrays.values()]
        schema = schema.with_metadata({_KEY: json.dumps(head).encode()})
        with pa.ipc.new_file(self._file, schema) as writer:
            writer.write_batch(pa.record_batch(columns, schema=schema))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.fchmod(self._file.fileno(), 0o666 & ~_umask())
        self._close()
        os.replace(self._temporary, self._path)
        self._temporary = b""

    def _spooled(self, name: str) -> np.ndarray:
        """A column as it was appended, mapped rather than read."""
        spool = self._spools[name]
        spool.flush()
        if not spool.tell():
            return np.empty(0, self._columns[name])
        return np.memmap(spool, self._columns[name], "r")

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
