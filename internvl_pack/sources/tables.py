"""Which paths are tables of the datasets library, found without importing it, which takes a second."""

from __future__ import annotations

import glob
import os
import re

_SAVED = ("state.json", "dataset_dict.json")
_OF_THE_HUB = re.compile(r"[\w-]+/[\w.-]*[\w-]")


def is_saved(path: str) -> bool:
    """Whether a folder was written by `save_to_disk`, as one Dataset or one of several splits."""
    return any(os.path.exists(os.path.join(path, file)) for file in _SAVED)


def is_table(path: str) -> bool:
    """Whether a path is a saved Dataset, a Parquet or Arrow file, a folder of Parquet files or a pattern of some."""
    if os.path.isdir(path):
        found = glob.iglob(os.path.join(glob.escape(path), "**", "*.parquet"), recursive=True)
        return is_saved(path) or next(found, None) is not None
    if os.path.isfile(path):
        return path.endswith(".arrow") or _is_parquet(path)
    found_by_pattern = glob.glob(path)
    return bool(found_by_pattern) and all(map(_is_parquet, found_by_pattern))


def _is_parquet(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False


def no_table(path: str) -> str:
    """Why nothing can be read from a path that is no table, and what to do."""
    if os.path.isdir(path):
        return "is a folder without a saved Dataset or Parquet files"
    if os.path.exists(path):
        return "is no saved Dataset, Parquet or Arrow file"
    name = "/".join(path.split(os.sep)[-2:])
    if glob.has_magic(path) or not _OF_THE_HUB.fullmatch(name) or os.path.splitext(name)[1]:
        return "does not exist"
    return (
        f"does not exist; if {name} is a dataset of the hub, download it first: hf download {name} "
        f"--repo-type dataset --local-dir {name}"
    )
