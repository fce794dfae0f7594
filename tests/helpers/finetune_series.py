"""Several fine-tuning runs, one after the other in the same ranks: for `ranks.run`."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState

from internvl_pack.encode.sample import Encoder
from internvl_pack.errors import SampleError, UserError
from train.environment import is_main_process, set_up_logging, shut_down
from train.finetune import prepare
from train.options import parse


def run_all(series: list[dict[str, Any]]) -> None:
    """Make runs of {"options": [options of finetune.py], "unreadable": {"rank": sample id}}.

    Images of that sample cannot be decoded on that rank. What the runs wrote is in their output folders; a run that a
    user's mistake ended leaves its message there, in error.txt.
    """
    set_up_logging()
    decode = Encoder.decode
    for run in series:
        unreadable = run["unreadable"].get(os.environ["RANK"])

        def decode_or_fail(self, encoded, *args, unreadable=unreadable, **kwargs):
            if encoded.record.sample_id == unreadable:
                raise SampleError("image_unreadable", "the file system failed here")
            return decode(self, encoded, *args, **kwargs)

        Encoder.decode = decode_or_fail
        try:
            prepare(*parse(run["options"])).train()
        except UserError as error:
            if is_main_process():
                out = Path(run["options"][run["options"].index("--output_dir") + 1])
                out.mkdir(parents=True, exist_ok=True)
                (out / "error.txt").write_text(str(error))
        gc.collect()
        AcceleratorState._reset_state()  # one DeepSpeed config a process is accelerate's rule
    shut_down()
