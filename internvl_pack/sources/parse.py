"""How the JSON of one record is read."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from ..errors import SampleError

# A longer line or json member is refused unread: it is damage, or no conversation.
MAX_RECORD_BYTES = 64 << 20


def refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


_DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=_finite_float, strict=True)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def kind_of(value: Any) -> str:
    """What a value of JSON is, for messages."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def parse_record(raw: bytes, origin: str | None = None) -> dict[str, Any]:
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
        what = f"{error.msg.removesuffix(' at')} at character {error.pos}"
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
        raise SampleError("not_an_object", f"the record is {kind_of(record)}, not an object", origin)
    if _SURROGATE_ESCAPE.search(raw):
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            what = r"a \ud800-\udfff escape without its partner is no character"
            raise SampleError("lone_surrogate", what, origin) from None
    return record
