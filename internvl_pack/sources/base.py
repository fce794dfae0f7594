"""What a source of samples is."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SampleError
from .content import new_hash
from .image_refs import DataRef, ImageRef
from .names import is_data_uri
from .normalise import as_list, normalised

logger = logging.getLogger(__name__)

_MAX_LOGGED = 20
_MARKED_ROWS = 16


@dataclass(frozen=True)
class RawSample:
    """One record, with what is needed to find its images.

    Attributes:
        sample_id: stable over runs: `<dataset>/<row>` or `<dataset>/<shard>/<key>`.
        own_id: the record's own `id` where it is a string or an integer, as a string.
        origin: where it stands, for messages: `path:line 12` or `shard:key@byte`.
        data: the parsed record, always a dict, in the form that `normalised` gives it. Text in it is valid Unicode,
            numbers are finite.
        resolver: finds what the record names.
        joined: of neighbouring rows that make one tree, all of them; the rest is then the first's (encode/joined.py).

    Raises:
        SampleError: see `normalised`.
    """

    sample_id: str
    own_id: str | None
    origin: str
    data: dict[str, Any]
    resolver: Callable[[str], ImageRef]
    joined: tuple[RawSample, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", normalised(self.data))  # of any source, a user's own too

    def resolve(self, name: str) -> ImageRef:
        """The image (or video) that the record calls `name`, or holds as a `data:` URI.

        Raises:
            SampleError: it cannot be one.
        """
        if is_data_uri(name):
            images = as_list(self.data.get("image"))
            return DataRef(name, images.index(name) + 1 if name in images else 1)
        return self.resolver(name)


class Source(ABC):
    """Samples by row, in random access. Flat in memory, picklable, usable in forked and spawned workers.

    Attributes:
        name: the dataset's.
        warnings: what is odd but loses nothing, one line each.
    """

    name: str
    warnings: Sequence[str] = ()

    @abstractmethod
    def __len__(self) -> int:
        """Rows, including those that `read` rejects."""

    @abstractmethod
    def read(self, row: int) -> RawSample:
        """The record of a row.

        Raises:
            SampleError: it cannot be read; without a `source`, `origin` is its place.
            IndexError: beyond the end.
        """

    def sample_id(self, row: int) -> str:
        """The id of a row, bad or not, without reading its record."""
        return f"{self.name}/{row}"

    @abstractmethod
    def origin(self, row: int) -> str:
        """Where a row stands, for messages, without reading its record."""

    def check_row(self, row: int) -> None:
        """Check that there is such a row.

        Raises:
            IndexError: there is none.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")

    @property
    def damage(self) -> Sequence[SampleError]:
        """What is broken and belongs to no row, such as a cut archive. Each entry counts once as quarantined."""
        return ()

    @property
    def fingerprint(self) -> str | None:
        """Identifies the data of a source without files, beside its number of rows; a resume compares it."""
        return None

    @property
    def content(self) -> str:
        """A hash, in hex, that differs where the data does, its order included: a resume and saved lengths compare it.

        Kinds that know no better hash their number of rows, their `fingerprint` and 16 rows spread over the data.
        """
        digest = new_hash()
        count = min(len(self), _MARKED_ROWS)
        digest.update(json.dumps([len(self), self.fingerprint]).encode())
        for step in range(count):
            digest.update(self._record_as_json(step * (len(self) - 1) // max(1, count - 1)))
        return digest.hexdigest()

    def _record_as_json(self, row: int) -> bytes:
        try:
            record: Any = self.read(row).data
        except Exception as error:  # a bad row, which is quarantined when it is read; here it must only be the same
            record = type(error).__name__
        return json.dumps(record, sort_keys=True, default=lambda value: type(value).__name__).encode()

    @property
    def block_starts(self) -> Sequence[int]:
        """First rows of the runs of rows that lie together on disk (shards), ending with `len(self)`."""
        return (0, len(self))

    def log_warnings(self) -> None:
        """Say once what opening found."""
        lines = [*self.warnings, *(str(error) for error in self.damage)]
        for line in lines[:_MAX_LOGGED]:
            logger.warning("dataset %r: %s", self.name, line)
        if len(lines) > _MAX_LOGGED:
            logger.warning("dataset %r: and %d more of these", self.name, len(lines) - _MAX_LOGGED)


def own_id(record: dict[str, Any]) -> str | None:
    value = record.get("id")
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
