"""One rank of several fine-tuning runs, one after the other in the same processes: `finetune_series.py SERIES.json`.

SERIES.json: [[options of finetune.py], ...]. What the runs wrote is in their output folders; a run that a user's
mistake ended leaves its message there, in error.txt.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from internvl_pack.errors import UserError
from train.environment import is_main_process, prepare_environment, set_up_logging, shut_down
from train.finetune import prepare
from train.options import parse


def main(series: str) -> None:
    from accelerate.state import AcceleratorState

    prepare_environment()
    set_up_logging()
    for options in json.loads(Path(series).read_text()):
        out = Path(options[options.index("--output_dir") + 1])
        try:
            prepare(*parse(options)).train()
        except UserError as error:
            if is_main_process():
                out.mkdir(parents=True, exist_ok=True)
                (out / "error.txt").write_text(str(error))
        gc.collect()
        AcceleratorState._reset_state()  # one DeepSpeed config a process is accelerate's rule
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1])
