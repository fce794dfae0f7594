"""Several fine-tuning runs, one after the other in the same processes: `finetune_series.py SERIES.json PROCESSES`.

SERIES.json: a list of {"options": [options of finetune.py], "unreadable": {"rank": sample id}}; images of that sample
cannot be decoded on that rank. What the runs wrote is in their output folders; a run that a user's mistake ended leaves
its message there, in error.txt. The processes are forked when all is imported, which is most of the time of a start.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from accelerate.state import AcceleratorState

from internvl_pack.encode.sample import Encoder
from internvl_pack.errors import SampleError, UserError
from train.environment import free_port, is_main_process, prepare_deepspeed_on_cpu, set_up_logging, shut_down
from train.finetune import prepare
from train.options import parse

LATE = (
    "transformers.models.internvl.modeling_internvl",
    "transformers.models.qwen2.modeling_qwen2",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imports torch's compiler
    "internvl_pack.stream.loader",
    "internvl_pack.model.build",
    "train.trainer",
)


def forked(run_all: Callable[[Any], None], what: Any, processes: int) -> int:
    """The largest exit code of `run_all(what)` in so many processes of one world."""
    port = free_port()
    children = []
    for rank in range(processes):
        if not (pid := os.fork()):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()})
            os._exit(status_of(run_all, what))
        children.append(pid)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in children)


def import_all() -> None:
    """What a run imports late, once for all processes. Nothing of it may start a thread or look for its rank."""
    for name in LATE:
        with contextlib.suppress(ImportError):  # of another version
            importlib.import_module(name)
    torch.set_num_threads(1)
    prepare_deepspeed_on_cpu()
    gc.freeze()


def status_of(run_all: Callable[[Any], None], what: Any) -> int:
    try:
        run_all(what)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_all(series: list[dict[str, Any]]) -> None:
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


if __name__ == "__main__":
    import_all()
    sys.exit(forked(run_all, json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])))
