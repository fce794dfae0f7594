"""Tables of whole numbers in a saved state: a text that is small because neighbours are alike."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import UserError
from ..records import Fragment

FRAGMENT_FIELDS = len(Fragment._fields)
TREE_FIELDS = ("num_branches", "num_saved_tokens", "num_unseen_pairs")
PICTURE_FIELDS = ("num_tile_pairs",)
PLAIN_FIELDS = FRAGMENT_FIELDS - len(TREE_FIELDS) - len(PICTURE_FIELDS)  # the others are the last, which most lack


def fragment_table(fragments: Sequence[Fragment]) -> np.ndarray:
    """int64 (n, FRAGMENT_FIELDS)."""
    return np.array(fragments, np.int64).reshape(len(fragments), FRAGMENT_FIELDS)


def narrowed(table: np.ndarray) -> np.ndarray:
    """A `fragment_table` without the last fields that no fragment has: what is saved of plain samples."""
    if table[:, -len(PICTURE_FIELDS) :].any():
        return table
    table = table[:, : -len(PICTURE_FIELDS)]
    return table if table[:, PLAIN_FIELDS:].any() else table[:, :PLAIN_FIELDS]


def fragments_of(table: np.ndarray) -> list[Fragment]:
    """The fragments of `fragment_table`, or of a table that was narrowed."""
    return [Fragment(*row) for row in table.tolist()]


def split_like(items: Iterable[Any], sizes: Iterable[int]) -> list[tuple[Any, ...]]:
    """The items in runs of these sizes."""
    source = iter(items)
    return [tuple(next(source) for _ in range(size)) for size in sizes]


def check_whole_numbers(value: Any) -> None:
    """Check that a plan's state, with its tables as arrays, holds integers only.

    Raises:
        TypeError: it does not.
    """
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            check_whole_numbers(each)
    elif not isinstance(value, int | np.ndarray):
        raise TypeError(f"{value!r} is no whole number")


def to_json(value: Any) -> Any:
    """A state with its tables, int64 (n, columns), as texts: what goes into a file."""
    if isinstance(value, np.ndarray):
        columns = np.diff(value.T, axis=1, prepend=0).astype("<i8")
        planes = np.ascontiguousarray(columns).view(np.uint8).reshape(-1, 8).T  # bytes of equal weight together
        text = base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()
        return {"table": text, "columns": value.shape[1]}
    if isinstance(value, dict):
        return {key: to_json(each) for key, each in value.items()}
    return value


def from_json(value: Any) -> Any:
    """The state that `to_json` was given.

    Raises:
        UserError: a table is damaged.
    """
    if not isinstance(value, dict):
        return value
    if value.keys() != {"table", "columns"}:
        return {key: from_json(each) for key, each in value.items()}
    try:
        planes = np.frombuffer(zlib.decompress(base64.b64decode(value["table"], validate=True)), np.uint8)
        columns = np.ascontiguousarray(planes.reshape(8, -1).T).reshape(-1).view("<i8").reshape(value["columns"], -1)
    except (ValueError, TypeError, zlib.error):
        raise UserError("resume: a table of the saved state is damaged: resume from an earlier checkpoint") from None
    return np.ascontiguousarray(np.cumsum(columns, axis=1, dtype=np.int64).T)
