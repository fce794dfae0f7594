"""What a training process needs of its surroundings before torch.distributed starts, and how it leaves."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from internvl_pack.errors import UserError
from internvl_pack.stream.shared_memory import allow_many_open_files

logger = logging.getLogger(__name__)

USER_ERROR = 2  # exit code
KEYBOARD_INTERRUPT = 130  # exit code: as shells give it
INTERRUPTED = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again later"
SECONDS_FOR_THE_FIRST_RANK = 15.0
CONFIGS = Path(__file__).resolve().parent / "configs"


def prepare_environment() -> None:
    """Give a process that no launcher of PyTorch started the variables that one would have set; safe to repeat.

    A task of srun takes Slurm's place of it. Anything else is a world of one: DeepSpeed looks for MPI without these
    variables, and transformers would wrap the model in DataParallel on a machine with several GPUs.

    Raises:
        UserError: a task of srun that does not know where the first one runs, or an accelerate that shards by itself.
    """
    allow_many_open_files()
    for name, kind in (("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"), ("ACCELERATE_USE_FSDP", "FSDP")):
        if os.environ.get(name, "false").lower() == "true":
            raise UserError(
                f"accelerate launch: its config asks for {kind}, which is not taken from there: launch with "
                "--multi_gpu and give --deepspeed zero_stage1, or --sharding fsdp2, to finetune.py"
            )
    if "LOCAL_RANK" in os.environ or "RANK" in os.environ:
        return
    if int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in os.environ:
        os.environ.update(_slurm_world(os.environ))
        return
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})


def _slurm_world(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun from those of a task of srun."""
    world = {"RANK": env["SLURM_PROCID"], "LOCAL_RANK": env["SLURM_LOCALID"], "WORLD_SIZE": env["SLURM_NTASKS"]}
    per_node = env.get("SLURM_NTASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1")
    world["LOCAL_WORLD_SIZE"] = per_node.partition("(")[0].partition(",")[0]  # "8(x2)"
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    address = env.get("MASTER_ADDR")
    if not address:
        command = ["scontrol", "show", "hostnames", nodes]
        try:
            address = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError) as error:
            raise UserError(f"srun: scontrol does not name the nodes of {nodes!r}: set MASTER_ADDR") from error
    # A port of its own for each job, so that two jobs on a node do not meet.
    port = env.get("MASTER_PORT") or str(20000 + int(env.get("SLURM_JOB_ID", 0)) % 20000)
    return world | {"MASTER_ADDR": address, "MASTER_PORT": port}


@contextlib.contextmanager
def telling_of_ports() -> Iterator[None]:
    """Inside, a port that is taken where ranks meet is an error of one line.

    Raises:
        UserError: names it.
    """
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        found = re.search(r"port: (\d+)", str(error))
        port = found[1] if found else os.environ.get("MASTER_PORT", "?")
        raise UserError(
            f"port {port} of {socket.gethostname()} is in use, by another run perhaps: give another one "
            "(MASTER_PORT, or --master_port of the launcher)"
        ) from error


def check_precision(precision: str) -> None:
    """Check that `accelerate launch` was given no other precision than the run.

    Args:
        precision: bf16, fp16 or no.

    Raises:
        UserError: it was.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", precision):
        raise UserError(f"accelerate launch: --mixed_precision {launched}: give --{launched} True to finetune.py, too")


def find_deepspeed_config(name: str) -> Path:
    """A DeepSpeed config by path, or one of those shipped here by name (`zero_stage1`).

    Raises:
        UserError: neither a file nor a name.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = {config.stem: config for config in sorted(CONFIGS.glob("*.json"))}
    # InternVL's scripts say zero_stage1_config.json, and for larger models zero_stage3_config_34b.json,
    # zero_stage3_config_100b_1e8.json or zero_stage3_config_100b_1e7_offload.json.
    stem = re.sub(r"_config(_\d+b)?(_\de\d)?(?=$|_offload$)", "", path.stem)
    if stem in shipped and path.parent == Path("."):
        return shipped[stem]
    raise UserError(f"--deepspeed {name}: no such file; shipped configs are {', '.join(shipped)}")


def prepare_deepspeed_on_cpu() -> None:
    """Keep DeepSpeed from compiling its shared-memory collectives, half a minute a machine, where gloo serves.

    To be called before torch.distributed starts. The switch is DeepSpeed's own table of the ops that
    can be built here.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def join_deepspeed_on_cpu() -> None:
    """Tell DeepSpeed of the processes that are there; elsewhere accelerate does so.

    Without it a model that loads under ZeRO-3 takes every rank for a world of its own.
    """
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def wait_no_longer_than(seconds: float) -> None:
    """Give gloo's group of all ranks the time-out of --ddp_timeout, which transformers gives to NCCL's only.

    torch has a private name for it alone; where a version lacks it, gloo waits half an hour.
    """
    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if change is not None and dist.is_initialized() and dist.get_backend() == "gloo":
        change(timedelta(seconds=seconds), dist.group.WORLD)


def is_main_process() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def shut_down() -> None:
    """Leave the process group, so that ranks do not complain of each other when one ends first."""
    if dist.is_initialized():
        dist.destroy_process_group()


def report_error(program: str, error: Exception, *, everyone: bool) -> None:
    """One line on stderr.

    At start all ranks meet the same error: the first of a node reports it, and the others give it the time to, as
    torchrun ends every rank as soon as one has failed. Whoever is still there then has an error of its own. With
    `everyone`, once training has begun, each rank reports its own at once.
    """
    line = " ".join(str(error).split())
    is_first_on_node = int(os.environ.get("LOCAL_RANK", 0)) == 0
    if not everyone and not is_first_on_node:
        time.sleep(SECONDS_FOR_THE_FIRST_RANK)
    if not is_first_on_node or (everyone and not is_main_process()):
        line = f"rank {os.environ.get('RANK', 0)}: {line}"
    print(f"{program}: error: {line}", file=sys.stderr, flush=True)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def silent(name: str) -> Iterator[None]:
    """Only warnings of a logger, and of those below it."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(max(logging.WARNING, log.getEffectiveLevel()))
    try:
        yield
    finally:
        log.setLevel(before)


def set_up_logging() -> None:
    """Our own log on stderr: everything on the first rank, errors elsewhere."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("internvl_pack", "train"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.propagate = False
        log.setLevel(logging.INFO if is_main_process() else logging.ERROR)
    # What libraries deprecate between themselves is not the user's to change.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if not sys.stderr.isatty() or not is_main_process():
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
