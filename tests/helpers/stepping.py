"""Runs of `step_worker.py`: their options, and what each rank saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {"use_packed_ds": True, "force_image_size": 56, "max_packed_tokens": 256}
OPTIONS |= {"num_images_expected": 8, "num_lanes": 2, "learning_rate": 1e-2, "lr_scheduler_type": "linear"}
OPTIONS |= {"use_cpu": True, "grad_checkpoint": False, "save_strategy": "no", "report_to": "none"}
OPTIONS |= {"optim": "adamw_torch", "check_isolation": False}


def run_in_two(
    made: Path,
    runs: dict[str, dict[str, Any]],
    planted: tuple[int, int] | None = None,
    warm_up: tuple[str, ...] = (),
) -> dict[str, list[dict[str, Any]]]:
    """By run what each rank wrote down.

    Args:
        made: of launched.made_in; runs write there too, each into a folder by its name.
        runs: options, over OPTIONS.
        planted: step and rank of a NaN in a gradient, for all of them.
        warm_up: names of those to warm up first, beside those that are compiled.
    """
    series = []
    for name, own in runs.items():
        places = {"model_name_or_path": made / "model", "meta_path": made / "meta.json", "output_dir": made / name}
        words = [str(word) for key, value in (OPTIONS | places | own).items() for word in (f"--{key}", value)]
        series.append({"options": words, "planted": planted, "warm_up": name in warm_up})
    file = made / "runs.json"
    file.write_text(json.dumps(series), encoding="utf-8")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "step_worker.py"), str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: [json.loads((made / name / f"rank{r}.json").read_text()) for r in range(2)] for name in runs}
