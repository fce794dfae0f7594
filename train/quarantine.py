"""`quarantine.jsonl`: every sample that left the run, with its reason, one JSON object a line.

    {"id": "coyo/1841", "source": "coyo.jsonl:line 1842", "reason": "image_truncated", "detail": "...",
     "epoch": 0, "step": 17}

The first rank writes what all ranks have gathered, at checkpoints and at ends of epochs. After a resume, samples
that leave again on the way to where the run had stopped are not written twice.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from internvl_pack.stream.loader import PackLoader

from .ranks import Ranks

logger = logging.getLogger(__name__)

FILE_NAME = "quarantine.jsonl"
_KEY = ("id", "reason", "epoch")


class Quarantine(TrainerCallback):
    """Collects the loader's events and writes them on the first rank; of ranks that share rows, one tells them."""

    def __init__(
        self, loader: PackLoader, output_dir: str | Path, *, resumed: bool, ranks: Ranks | None = None
    ) -> None:
        self.loader = loader
        self.ranks = ranks or Ranks.here()
        self.path = Path(output_dir) / FILE_NAME
        self.resumed = resumed
        self._seen: set[tuple[Any, ...]] | None = None

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.flush()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.flush()

    def flush(self) -> None:
        """Gather and write; all ranks call it together."""
        events = self.ranks.gather_books(self.loader.take_events())
        if self.ranks.is_first:
            self.write(event for part in events for event in part)

    def flush_alone(self) -> None:
        """Write this rank's own events: what a rank does that fails while the others go on."""
        if self.ranks.leads:
            self.write(self.loader.take_events())

    def write(self, events: Iterable[dict[str, Any]]) -> None:
        """Append events that the file does not hold yet."""
        seen = self._known()
        lines = []
        for event in events:
            key = tuple(event[k] for k in _KEY)
            if key not in seen:
                seen.add(key)
                lines.append(json.dumps(event, ensure_ascii=False) + "\n")
        if lines:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if _cut_off(self.path):
                lines.insert(0, "\n")
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(lines)

    def _known(self) -> set[tuple[Any, ...]]:
        if self._seen is None:
            self._seen = set()
            if self.resumed and self.path.is_file():
                self._seen.update(_read_keys(self.path))
            else:
                self.path.unlink(missing_ok=True)  # of an earlier run in the same folder
        return self._seen


def _cut_off(path: Path) -> bool:
    """Whether the last line lacks its end: the run that wrote it was killed."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _read_keys(path: Path) -> Iterable[tuple[Any, ...]]:
    for line in path.read_text(encoding="utf-8").split("\n"):  # ids may hold U+2028, which splitlines cuts at
        try:
            event = json.loads(line)
        except json.JSONDecodeError:  # the last line of a run that was killed
            continue
        yield tuple(event.get(k) for k in _KEY)
