"""Code of a page, a program of its own or loops on several ranks, for `ranks.run`."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from helpers.ranks import OF_A_LAUNCHER
from internvl_pack.stream.loader import PackLoader

ROOT = Path(__file__).resolve().parents[2]


def run_program(script: str) -> None:
    """As `python SCRIPT` does, without a launcher; what it imports is there already."""
    for name in OF_A_LAUNCHER:
        del os.environ[name]
    sys.argv, sys.path[0] = [script], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def run_all(page: dict[str, Any]) -> None:
    """Run Python texts `code` one after the other, in a folder of this rank's that looks like the repository.

    The file `out`.<rank> gets the numbers of samples in the batches of each epoch.
    """
    out = f"{page['out']}.{os.environ['RANK']}"
    folder = Path(f"{out}.folder")
    folder.mkdir()
    (folder / "shell").symlink_to(ROOT / "shell")
    os.chdir(folder)
    read = PackLoader._batches
    seen: list[list[int]] = []

    def counted(self, *what):
        seen.append([])
        for batch in read(self, *what):
            seen[-1].append(batch["num_samples"])
            yield batch

    PackLoader._batches = counted
    names: dict[str, Any] = {"__name__": "page"}
    for text in page["code"]:
        exec(text, names)
    Path(out).write_text(json.dumps(seen))
    dist.destroy_process_group()
