"""Which samples each optimizer step trained on: `sample_ids/rank00000.jsonl`, one line a step, a file a data rank.

    {"step": 12, "epoch": 0, "ids": ["coyo/1841", "docs/7#2/3"]}

"docs/7#2/3" is the second of three fragments. Written as the steps are made, so that a loss spike, or a
run that died, can be traced to its data. A run that resumes first takes back the lines of the steps after its
checkpoint, of all ranks that there were.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from internvl_pack.batch.collate import FILLER_ID, PAD_ID

FOLDER = "sample_ids"


def batch_ids(batch: dict[str, Any]) -> list[str]:
    """Ids of a batch's samples with their fragments; pads and fillers have none."""
    return [
        sample_id if count == 1 else f"{sample_id}#{index + 1}/{count}"
        for sample_id, (index, count) in zip(batch["sample_ids"], batch["fragments"], strict=True)
        if sample_id not in (PAD_ID, FILLER_ID)
    ]


class SampleLog(TrainerCallback):
    """Appends this rank's line at the end of every step; of ranks that share rows, one does."""

    def __init__(self, trainer: Any, output_dir: str | Path) -> None:
        self.trainer = trainer
        self.path = Path(output_dir) / FOLDER / f"rank{trainer.ranks.data_rank:05d}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # No rank ends a step before all have begun: the first step's reduction comes between.
        if self.trainer.ranks.is_first:
            for path in self.path.parent.glob("rank*.jsonl"):
                kept = [entry for entry in _entries(path) if entry["step"] <= state.global_step]
                beside = path.with_suffix(".part")
                beside.write_text("".join(json.dumps(e, ensure_ascii=False) + "\n" for e in kept), encoding="utf-8")
                os.replace(beside, path)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.trainer.ranks.leads:
            return
        line = {"step": state.global_step, "epoch": self.trainer.loader.epoch, "ids": self.trainer.step_sample_ids}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_sample_log(output_dir: str | Path) -> dict[int, list[str]]:
    """Ids by step, over all ranks."""
    steps: dict[int, list[str]] = {}
    for path in sorted(Path(output_dir, FOLDER).glob("rank*.jsonl")):
        for entry in _entries(path):
            steps.setdefault(entry["step"], []).extend(entry["ids"])
    return steps


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").split("\n"):  # ids may hold U+2028, which splitlines cuts at
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # the last line of a run that was killed
            continue
