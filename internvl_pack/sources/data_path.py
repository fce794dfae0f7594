"""A path of data where a meta file is expected: the meta file that would name it."""

from __future__ import annotations

import glob
import json
import os
import re
from typing import Any

from .normalise import TURNS
from .tables import is_table

_HEAD_BYTES = 1 << 20


def entry_of(path: str) -> dict[str, dict[str, Any]] | None:
    """`{name: entry}` of a meta file beside the data at `path`; None where it is none.

    Data is a file of JSON lines, a tar shard or a brace pattern of some, a table (`tables.is_table`), or a folder of
    shards. Images are looked for from the file's folder, or from the folder that is named.
    """
    if "\0" in path:
        return None
    base = os.path.basename(os.path.normpath(path))
    name = re.split(r"[.{*?\[]", base)[0].strip("-_") or "data"
    if os.path.isdir(path):
        if is_table(path):
            return {name: {"annotation": base, "root": base}}
        shards = sorted(glob.glob("*.tar", root_dir=path))
        return {name: {"shards": [os.path.join(base, shard) for shard in shards]}} if shards else None
    if not os.path.exists(path) and base.endswith(".tar"):  # braces; a missing file is reported by name
        return {name: {"shards": base}} if "{" in base else None
    if is_table(path):
        return {name: {"annotation": base}}
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    if head[257:262] == b"ustar":
        return {name: {"shards": base}}
    return {name: {"annotation": base}} if _holds_records(head) else None


def fields_of_lines(head: bytes) -> list[str]:
    """The fields of the object that fills the first line of a file, the first few; none where no object does."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    try:
        record = json.loads(text.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return []
    return [name[:40] for name in list(record)[:20]] if isinstance(record, dict) else []


def _holds_records(head: bytes) -> bool:
    """Whether a file begins with a record that has turns, or with a JSON array, which its reader reports."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"[") and text[1:].lstrip().startswith(b"{"):
        return True
    try:
        record = json.loads(text.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return len(head) == _HEAD_BYTES and any(f'"{key}"'.encode() in head for key in TURNS)
    return isinstance(record, dict) and any(isinstance(record.get(key), list | str) for key in TURNS)
