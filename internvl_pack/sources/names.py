"""Names as people write them: what cannot be one, the same name in another form, and what may have been meant."""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator

from ..errors import SampleError

# Entries of a folder that are looked through for the name that may have been meant.
MAX_LISTED = 10_000

# What may stand around a URL and is no part of it: control characters and the space (URL Standard, "basic URL parser").
AROUND_URL = "".join(map(chr, range(33)))

# How pictures begin in base64 (JPEG, PNG, WebP, GIF); anything longer than a path may be is none, either.
_PICTURE_IN_BASE64 = re.compile(r"(?:/9j/|iVBORw0KGgo|UklGR|R0lGOD)[A-Za-z0-9+/\s]{200}|[A-Za-z0-9+/\s]{4096}")


def is_data_uri(name: object) -> bool:
    """Whether a record holds an image as `data:image/png;base64,...` where others name a file."""
    return isinstance(name, str) and name.lstrip(AROUND_URL)[:5].lower() == "data:"


def refuse_embedded(name: str) -> None:
    """Check that a record names its picture instead of holding it as base64 without a media type.

    Raises:
        SampleError: `image_field`, it holds it.
    """
    if len(name) >= 200 and _PICTURE_IN_BASE64.match(name.lstrip(AROUND_URL)):
        raise SampleError(
            "image_field",
            f"the picture itself, text in base64 of {len(name)} characters, stands where its file's name is read: "
            "write 'data:image/png;base64,' before it, or write it to a file",
        )


def meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`: did you mean 'path'?` for a name that is none of the known ones, else the list of them."""
    known = list(known)
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=cutoff)
    return f": did you mean {near[0]!r}?" if near else f" (there are {', '.join(known)})"


def other_forms(path: str) -> Iterator[str]:
    """The same name in the other normal forms of Unicode: archives from a Mac write accents apart."""
    if path.isascii():
        return
    for form in ("NFC", "NFD"):
        other = unicodedata.normalize(form, path)
        if other != path:
            yield other


def hint_of(path: str) -> str:
    """`; did you mean '...'?` where a file of nearly that name is there: backslashes, other letters' case; else ""."""
    if "\\" in path and os.path.exists(path.replace("\\", "/")):
        return f"; with / for \\ there is one: {path.replace(chr(92), '/')!r}"
    found = _in_other_case(path)
    return "" if found is None else f"; there is {found!r}: names differ by their letters' case"


def _in_other_case(path: str) -> str | None:
    """The file whose path differs by case in its last two parts, looked for among the first entries of its folder."""
    folder, base = os.path.split(path)
    if not base:
        return None
    folders = [folder]
    if not os.path.isdir(folder):
        above, last = os.path.split(folder)
        named = _entry(above, last)
        folders = [] if named is None else [named]
    return next((found for each in folders if (found := _entry(each, base)) is not None), None)


def _entry(folder: str, name: str) -> str | None:
    try:
        with os.scandir(folder or ".") as entries:
            for _, entry in zip(range(MAX_LISTED), entries, strict=False):
                if entry.name.casefold() == name.casefold():
                    return os.path.join(folder, entry.name)
    except (OSError, ValueError):
        return None
    return None
