"""The beginning and the end of `shell/quickstart_mpo.sh`: pairs made of ordinary data, and what training on them gave.

python train/quickstart_pairs.py ROWS.jsonl IMAGES FOLDER    # pairs.jsonl and pairs.json in FOLDER
python -m train.quickstart_pairs work_dirs/quickstart_mpo/mpo         # "SUMMARY {json}" of a run
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: find the packages without an installation
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from train.accounting import LAST_STEPS, SUMMARY


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if len(argv) == 3:
        write_pairs(*map(Path, argv))
        return 0
    if len(argv) == 1:
        print("SUMMARY " + json.dumps(summary(Path(argv[0]))), flush=True)
        return 0
    print("usage: python -m train.quickstart_pairs ROWS.jsonl IMAGES FOLDER | RUN_DIR", file=sys.stderr)
    return 2


def write_pairs(rows: Path, images: Path, folder: Path) -> None:
    """Each row's last answer is chosen, the next row's is rejected."""
    records = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    answers = [record["conversations"][-1]["value"] for record in records]
    lines = []
    for number, record in enumerate(records):
        rejected = next(a for a in (*answers[number + 1 :], *answers) if a != answers[number])
        pair = {"conversations": record["conversations"][:-1], "chosen": answers[number], "rejected": rejected}
        lines.append(json.dumps(record | pair, ensure_ascii=False) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines), encoding="utf-8")
    meta = {"pairs": {"root": str(images.resolve()), "annotation": "pairs.jsonl", "repeat_time": 40}}
    (folder / "pairs.json").write_text(json.dumps(meta), encoding="utf-8")


def summary(run: Path) -> dict[str, Any]:
    """Figures of a run; those that end with _last are means of its last steps."""
    figures = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    history = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    steps = [entry for entry in history if "rewards/margins" in entry]
    out = {
        name: figures[name] for name in ("ranks", "steps", "samples_packed", "token_fill", "loss_first", "loss_last")
    }
    last = steps[-LAST_STEPS:]
    out["margin_first"] = steps[0]["rewards/margins"]
    out["margin_last"] = statistics.fmean(entry["rewards/margins"] for entry in last)
    out["accuracy_last"] = statistics.fmean(entry["rewards/accuracies"] for entry in last)
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in out.items()}


if __name__ == "__main__":
    sys.exit(main())
