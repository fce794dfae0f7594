"""WebDataset tar shards as a source: samples in random access, by the members' positions in an index.

Nothing is written to disk, no link is followed, and a record can name nothing but the members of its own key.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import SampleError, UserError
from ..options import count
from .base import RawSample, Source, own_id
from .content import new_hash
from .files import Stamp, read_at, stamp_of
from .index import BadIndexError, index_path
from .members import (
    DUPLICATE,
    NO_RECORD,
    OK,
    REASONS,
    Entry,
    MemberResolver,
    image_names,
    members_of,
    read_entry,
    row_key,
    texts_of,
)
from .normalise import normalised
from .parse import MAX_RECORD_BYTES, parse_record
from .shard_index import ShardIndex, load_index, scan_shard
from .tar import DamagedHeaderError, Reader, windowed

logger = logging.getLogger(__name__)

# Index files that a process keeps mapped at a time; a map holds a descriptor.
MAX_MAPPED_SHARDS = 64
_MAX_COMPARED_ROWS = 20_000_000
_HINT_ROWS = 2_000_000


@dataclass
class _Shard:
    path: str
    label: str
    stamp: Stamp
    index: ShardIndex | None  # None: in the index file, mapped when needed


class ShardSource(Source):
    """The samples of a list of shards, in their order, in random access.

    Sample ids are `<dataset>/<shard>/<key>`; the shard's part is its file name without `.tar`, or its path below
    the shards' common folder where two shards have the same file name.

    Args:
        caption: the question about its image that the `.txt` member of each key answers; its `.json` is no record then.

    Raises:
        UserError: a shard cannot be read or is compressed. Damage is no error: see `damage`.
    """

    def __init__(self, name: str, paths: Sequence[str], caption: str | None = None) -> None:
        self.name = name
        self._caption = caption
        self._shards: list[_Shard] = []
        self._damage: list[SampleError] = []
        starts = [0]
        warnings: list[str] = []
        hashes: list[np.ndarray] = []
        content = new_hash()
        unused: list[str] = []  # index files that cannot be used
        for path, label in zip(paths, _labels(paths), strict=True):
            try:
                stamp = stamp_of(path)
                from_file = None
                try:
                    from_file = load_index(path, stamp)
                except BadIndexError as error:
                    unused.append(f"{index_path(path)} {error}")
                index = from_file if from_file is not None else scan_shard(path)
            except OSError as error:
                raise UserError(f"shard {path} of dataset {name!r} cannot be read: {error.strerror}") from None
            self._damage += (d.error(path) for d in index.damage)
            warnings += index.warnings
            starts.append(starts[-1] + len(index))
            if starts[-1] <= _MAX_COMPARED_ROWS:
                hashes.append(np.array(index.hashes))
            content.update(bytes.fromhex(index.content))
            kept = ShardIndex(index.stamp, index.first, index.member, index.status, None, index.content)
            self._shards.append(_Shard(path, label, index.stamp, None if from_file is not None else kept))
        self._starts = np.array(starts, np.int64)
        if caption is not None:
            content.update(caption.encode())
        self._content = content.hexdigest()
        if len(self._shards) > 1 and starts[-1] <= _MAX_COMPARED_ROWS:
            warnings += self._keys_in_two_shards(np.concatenate(hashes))
        if unused:
            warnings.append(
                f"not used: {count(len(unused), 'index files')} (internvl-pack index renews them), first {unused[0]}"
            )
        elif len(self) >= _HINT_ROWS and any(shard.index is not None for shard in self._shards):
            logger.warning("dataset %r was indexed in memory; internvl-pack index does it once for all runs", name)
        self.warnings = tuple(warnings)

    @property
    def damage(self) -> Sequence[SampleError]:
        return self._damage

    @property
    def content(self) -> str:
        """A hash of the shards' marks in order: records, and names, places and sizes of all members (`ShardIndex`)."""
        return self._content

    @property
    def block_starts(self) -> Sequence[int]:
        return self._starts  # type: ignore[return-value]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def sample_id(self, row: int) -> str:
        shard, key, _ = self._locate(row)
        return f"{self.name}/{shard.label}/{key}"

    def key(self, row: int) -> str:
        """The key of a row in its shard, bad or not, without reading its record."""
        return self._locate(row)[1]

    def origin(self, row: int) -> str:
        shard, key, header = self._locate(row)
        return f"{shard.path}:{key}@{header}"

    def read(self, row: int) -> RawSample:
        shard, status, headers = self._shard(row)
        captioned = self._caption is not None and status in (OK, NO_RECORD)
        if status != OK and not captioned:
            raise self._row_error(shard, headers, status)
        key = self.key(row) if captioned else None
        read = _reader(shard)
        try:
            members = members_of(read, headers, shard.stamp.size, key)
            if key is None:
                record, key = members[0], members[0].path[:-5]
            else:
                record = _caption_among(members, f"{shard.path}:{key}@{headers[0]}")
            origin = f"{shard.path}:{key}@{headers[0]}"
            if record.size > MAX_RECORD_BYTES:
                raise SampleError("record_too_long", f"{record.path!r} has {record.size} bytes", origin)
            if record.size == 0:
                raise SampleError("record_empty", f"{record.path!r} has 0 bytes", origin)
            raw = read(record.offset, record.size)
        except OSError as error:
            raise SampleError("record_unreadable", str(error.strerror), f"{shard.path}@{headers[0]}") from error
        except DamagedHeaderError as error:
            raise _changed(shard, error) from None
        data = self._captioned(raw, origin) if captioned else normalised(parse_record(raw, origin))
        others = tuple(member for member in members if member is not record)
        if not any(field_name in data for field_name in ("image", "video", "videos")):
            images = [m.path for m in others if m.is_image]
            if images:
                data["image"] = images
            elif captioned:
                raise SampleError("image_missing", f"no image goes with {record.path!r}", origin)
        resolver = MemberResolver(shard.path, shard.stamp, key, others, tuple(image_names(data)))
        return RawSample(f"{self.name}/{shard.label}/{key}", own_id(data), origin, data, resolver)

    def _captioned(self, raw: bytes, origin: str) -> dict[str, Any]:
        """A record of the question and the text that answers it."""
        try:
            text = raw.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise SampleError("invalid_utf8", f"byte {error.start} of the caption is not UTF-8", origin) from None
        return {"conversations": [{"from": "human", "value": self._caption}, {"from": "gpt", "value": text}]}

    def _row_error(self, shard: _Shard, headers: list[int], status: int) -> SampleError:
        """Why a row is no sample, naming the member that is to blame."""
        read = _reader(shard)
        try:
            entries = [read_entry(read, header, shard.stamp.size) for header in headers]
        except OSError as error:
            return SampleError("record_unreadable", str(error.strerror), f"{shard.path}@{headers[0]}")
        except DamagedHeaderError as error:
            raise _changed(shard, error) from None
        seen: set[str] = set()
        blamed = entries[0]
        for entry in entries:
            if entry.fault == status or (status == DUPLICATE and entry.ending in seen):
                blamed = entry
                break
            seen.add(entry.ending)
        reason, text = REASONS[status]
        text = text.format(member=f"{blamed.path!r} at byte {blamed.header}")
        if status == NO_RECORD and texts_of(entries):
            text += "; that of a caption in .txt is made by the dataset's 'caption' in the meta file"
        return SampleError(reason, text, f"{shard.path}:{row_key(entries)}@{headers[0]}")

    def _shard(self, row: int) -> tuple[_Shard, int, list[int]]:
        """(shard, status, positions of the members' headers) of a row."""
        self.check_row(row)
        number = int(np.searchsorted(self._starts, row, "right")) - 1
        shard = self._shards[number]
        local = row - int(self._starts[number])
        index = _index_beside(shard.path, shard.stamp) if shard.index is None else shard.index
        if index is None or len(index) != self._starts[number + 1] - self._starts[number]:
            index = scan_shard(shard.path)
            if index.stamp.size != shard.stamp.size:
                raise _changed(shard, "another size")
            shard.index = index
        headers = index.member[int(index.first[local]) : int(index.first[local + 1])].tolist()
        status = int(index.status[local])
        if not headers or max(headers) >= shard.stamp.size or (status != OK and status not in REASONS):
            raise _changed(shard, "its index is damaged")
        return shard, status, headers

    def _locate(self, row: int) -> tuple[_Shard, str, int]:
        """(shard, key, position of the first member's header) of a row, from one header."""
        shard, _, (header, *_) = self._shard(row)
        try:
            entry = read_entry(_reader(shard), header, shard.stamp.size)
        except OSError as error:
            raise UserError(f"shard {shard.path} cannot be read: {error.strerror}") from None
        except DamagedHeaderError as error:
            raise _changed(shard, error) from None
        return shard, row_key([entry]), header

    def _keys_in_two_shards(self, hashes: np.ndarray) -> list[str]:
        """One line if keys stand in more than one shard. They stay samples of their own."""
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        again = np.flatnonzero(ordered[1:] == ordered[:-1])
        if not again.size:
            return []
        first = int(again[np.argmin(order[again + 1])])
        pair = int(order[first]), int(order[first + 1])
        (shard_a, key, at_a), (shard_b, _, at_b) = (self._locate(row) for row in pair)
        return [
            f"key {key!r} is in {shard_a.path} at byte {at_a} and in {shard_b.path} at byte {at_b}: two samples "
            f"({count(again.size, 'such keys')} in this dataset)"
        ]


@lru_cache(maxsize=MAX_MAPPED_SHARDS)
def _index_beside(path: str, stamp: Stamp) -> ShardIndex | None:
    """The index file of a shard; None where it has gone, or cannot be used any more."""
    try:
        return load_index(path, stamp)
    except BadIndexError:
        return None


def _reader(shard: _Shard) -> Reader:
    return windowed(lambda offset, num_bytes: read_at(shard.path, shard.stamp, offset, num_bytes))


def _caption_among(members: Sequence[Entry], origin: str) -> Entry:
    texts = texts_of(members)
    if len(texts) != 1:
        raise SampleError("record_missing", f"{len(texts)} .txt members with the caption; there must be one", origin)
    return texts[0]


def _changed(shard: _Shard, error: object) -> UserError:
    return UserError(
        f"shard {shard.path} is not what it was when it was indexed ({error}): start again, and delete "
        f"{index_path(shard.path)} if there is one"
    )


def _labels(paths: Sequence[str]) -> list[str]:
    """The part of each shard in sample ids: unique, and the same wherever the whole tree is moved."""
    names = [_without_ending(os.path.basename(path)) for path in paths]
    if len(set(names)) == len(names):
        return names
    common = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    names = [_without_ending(os.path.relpath(os.path.abspath(path), common)) for path in paths]
    if len(set(names)) == len(names):
        return names
    return [os.path.relpath(os.path.abspath(path), common) for path in paths]


def _without_ending(name: str) -> str:
    return name[:-4] if name.lower().endswith(".tar") else name
