"""What a checkpoint holds besides the Trainer's files, and how it moves to another number of ranks."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from internvl_pack.errors import UserError

logger = logging.getLogger(__name__)

PACKING_STATE = "packing_state.json"  # written last: its presence marks a checkpoint as complete


def load_packing_state(checkpoint: str | Path) -> dict[str, Any]:
    """The state of the run's data, with the `world_size` it was saved on.

    Raises:
        UserError: the checkpoint was not completed, or is not one of ours.
    """
    path = Path(checkpoint) / PACKING_STATE
    if not path.is_file():
        raise UserError(f"--resume_from_checkpoint {checkpoint}: {PACKING_STATE} is missing, it was not completed")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"--resume_from_checkpoint {checkpoint}: {PACKING_STATE} is damaged: {error}") from None


def make_universal(checkpoint: Path) -> None:
    """Convert DeepSpeed's shards to its universal format, which loads on any number of ranks.

    Writes `global_stepN_universal` beside `global_stepN`; done once, found again later.

    Raises:
        UserError: there are no shards, or DeepSpeed's converter fails; gives its last line.
    """
    latest = checkpoint / "latest"
    if not latest.is_file():
        raise UserError(f"--resume_from_checkpoint {checkpoint}: it holds no DeepSpeed state to move to other ranks")
    shards = checkpoint / latest.read_text().strip()
    universal = shards.with_name(f"{shards.name}_universal")
    if (checkpoint / "latest_universal").is_file() and universal.is_dir():
        return
    (checkpoint / "latest_universal").unlink(missing_ok=True)
    shutil.rmtree(universal, ignore_errors=True)  # half of it, of a conversion that was killed
    logger.warning("resume: converting %s to DeepSpeed's universal format, once", shards)
    # A process of its own: the converter is a program, and must not meet this run's process group.
    launched_by = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in launched_by and not k.startswith("TORCHELASTIC")}
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(shards), "--output_folder", str(universal)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise UserError(f"--resume_from_checkpoint {checkpoint}: DeepSpeed cannot convert it: {lines[-1]}")
