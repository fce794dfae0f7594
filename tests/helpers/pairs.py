"""Preference pairs for runs of `finetune.py`."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.factory import write_jsonl


def write_pairs(folder: Path, count: int, **changes: str) -> Path:
    """A meta file of `count` pairs: the rows of `write_jsonl`, their last answers chosen, others rejected.

    Args:
        changes: of the dataset's entry.
    """
    meta = write_jsonl(folder, count, **changes)
    for spec in json.loads(meta.read_text()).values():
        path = meta.parent / spec["annotation"]
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for number, row in enumerate(rows):
            *row["conversations"], last = row["conversations"]
            row |= {"chosen": last["value"], "rejected": f"no, {'never ' * (number % 4)}{number}"}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return meta
