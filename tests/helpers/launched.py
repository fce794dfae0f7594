"""Runs that a launcher of shell/ or torchrun starts: their data, their settings, and how far they came."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from helpers.factory import write_jsonl
from internvl_pack.testing.tiny import save_tiny_checkpoint
from train.accounting import SAMPLE_IDS

_OF_THE_CALLER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")


def made_in(folder: Path, tokenizer: Any, count: int) -> Path:
    """The folder, with `count` samples (meta.json) and a tiny model."""
    write_jsonl(folder, count)
    save_tiny_checkpoint(folder / "model", tokenizer)
    return folder


def launcher_settings(made: Path, out: Path, **env: str) -> dict[str, str]:
    """The environment of a launcher on a CPU, over `made_in`."""
    return {
        **{k: v for k, v in os.environ.items() if k not in _OF_THE_CALLER},
        "INTERNVL_PACK_PYTHON": sys.executable,
        "MODEL": str(made / "model"),
        "META": str(made / "meta.json"),
        "OUTPUT_DIR": str(out),
        "MAX_PACKED_TOKENS": "512",
        "NUM_IMAGES_EXPECTED": "24",
        "GLOBAL_PACKS": "4",
        "WORKERS": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        **env,
    }


def steps_made(out: Path) -> int:
    """The last step that the first rank wrote into its sample log."""
    path = out / SAMPLE_IDS / "rank00000.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def losses(out: Path) -> dict[int, float]:
    """Loss by step of the whole run, from the trainer's own state."""
    state = json.loads((out / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}
