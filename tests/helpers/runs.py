"""What a training run left in its output folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "train_summary.json").read_text(encoding="utf-8"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
