"""Runs of step_worker: their options, and what each rank saw."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from helpers import ranks

OPTIONS: dict[str, Any] = {"use_packed_ds": True, "force_image_size": 56, "max_packed_tokens": 256}
OPTIONS |= {"num_images_expected": 8, "num_lanes": 2, "learning_rate": 1e-2, "lr_scheduler_type": "linear"}
OPTIONS |= {"use_cpu": True, "grad_checkpoint": False, "save_strategy": "no", "report_to": "none"}
OPTIONS |= {"optim": "adamw_torch", "check_isolation": False}


def run_ranks(
    made: Path,
    runs: dict[str, dict[str, Any]],
    planted: tuple[int, int] | None = None,
    warm_up: tuple[str, ...] = (),
    processes: int = 2,
    row: Collection[str] = (),
    **env: str,
) -> dict[str, list[dict[str, Any]]]:
    """By run what each rank wrote down.

    Args:
        made: of launched.made_in; runs write there too, each into a folder by its name.
        runs: options, over OPTIONS.
        planted: step and rank of a NaN in a gradient, for all of them.
        warm_up: names of those to warm up first, beside those that are compiled.
        processes: how many ranks.
        row: names of those that run a row at the end, packed and a sample at a time.
        env: over this process's environment.
    """
    series = []
    for name, own in runs.items():
        places = {"model_name_or_path": made / "model", "meta_path": made / "meta.json", "output_dir": made / name}
        words = [str(word) for key, value in (OPTIONS | places | own).items() for word in (f"--{key}", value)]
        series.append({"options": words, "planted": planted, "warm_up": name in warm_up, "row": name in row})
    ranks.run("helpers.step_worker:run_all", series, processes, made / "log.txt", timeout=900, **env)
    return {
        name: [json.loads((made / name / f"rank{rank}.json").read_text()) for rank in range(processes)] for name in runs
    }
