"""What a source of samples is, and how the JSON of one record is read."""

from __future__ import annotations

import json
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import SampleError
from .content import new_hash
from .image_refs import ImageRef

logger = logging.getLogger(__name__)

MAX_RECORD_BYTES = 64 << 20
"""A longer line or json member is refused unread: it is damage, or no conversation."""
_MAX_LOGGED = 20
_MARKED_ROWS = 16


@dataclass(frozen=True)
class RawSample:
    """One record as the user wrote it, parsed, with what is needed to find its images.

    Attributes:
        sample_id: stable over runs: `<dataset>/<row>` or `<dataset>/<shard>/<key>`.
        own_id: the record's own `id` where it is a string or an integer, as a string.
        origin: where it stands, for messages: `path:line 12` or `shard:key@byte`.
        data: the parsed record, always a dict. Text in it is valid Unicode, numbers are finite.
        resolver: finds what the record names.
    """

    sample_id: str
    own_id: str | None
    origin: str
    data: dict[str, Any]
    resolver: Callable[[str], ImageRef]

    def resolve(self, name: str) -> ImageRef:
        """The image (or video) that the record calls `name`. Raises SampleError where it cannot be one."""
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
        """Rows, bad ones included: `read` tells which are."""

    @abstractmethod
    def read(self, row: int) -> RawSample:
        """Raises SampleError, with its `source` or without (`origin` is it then); IndexError beyond the end."""

    @abstractmethod
    def sample_id(self, row: int) -> str:
        """The id of a row, bad or not, without reading its record."""

    @abstractmethod
    def origin(self, row: int) -> str:
        """Where a row stands, for messages, without reading its record."""

    @property
    def damage(self) -> Sequence[SampleError]:
        """What is broken and belongs to no row, such as a cut archive. Each entry counts once as quarantined."""
        return ()

    @property
    def fingerprint(self) -> str | None:
        """What tells this data from other data of as many rows, for sources that are no files; a resume compares it."""
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


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float, strict=True)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_record(raw: bytes, origin: str) -> dict[str, Any]:
    """One JSON object from UTF-8 bytes, by the letter of the JSON standard.

    Refused beyond what `json.loads` refuses: NaN and infinities, numbers that overflow to one, a top level that
    is no object, and lone surrogates (no tokenizer takes them). Raw control characters inside strings are refused
    as the standard says. A repeated key keeps its last value.

    Raises:
        SampleError: `invalid_utf8`, `invalid_json`, `json_too_deep`, `not_an_object`, `lone_surrogate`.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = raw[error.start : error.start + 4].hex(" ")
        raise SampleError("invalid_utf8", f"byte {error.start} of the record ({bad}) is not UTF-8", origin) from None
    try:
        record = _DECODER.decode(text.removeprefix("\ufeff"))
    except RecursionError:
        raise SampleError("json_too_deep", "nested too deeply", origin) from None
    except json.JSONDecodeError as error:
        what = f"{error.msg} at character {error.pos}"
        if error.msg.startswith("Invalid control character"):
            what += rf" (a raw {text[error.pos : error.pos + 1]!r} must be written as an escape such as \t)"
        elif error.msg == "Extra data" and text[error.pos] in ",{":
            what += " (two records on one line, or a comma after one?)"
        elif error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            what += " (a half-written record?)"
        raise SampleError("invalid_json", what, origin) from None
    except ValueError as error:  # our own checks, and Python's limit on the digits of an integer
        raise SampleError("invalid_json", str(error), origin) from None
    if not isinstance(record, dict):
        kind = {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}.get(type(record), "a number")
        raise SampleError("not_an_object", f"the record is {kind}, not an object", origin)
    if _SURROGATE_ESCAPE.search(raw) and _has_lone_surrogate(record):
        raise SampleError("lone_surrogate", r"a \ud800-\udfff escape without its partner is no character", origin)
    return record


def _has_lone_surrogate(value: Any) -> bool:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                return True
        elif isinstance(value, dict):
            waiting.extend(value)
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return False
