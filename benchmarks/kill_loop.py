"""A run that is killed again and again ends with the same samples in every step as one that is not.

    python benchmarks/kill_loop.py [--kills 60] [--seed 0] [--folder DIR]

CPU, a tiny model, two epochs, a checkpoint every three steps, `save_total_limit 1`, every other run with DeepSpeed.
Each start takes other ranks and readers, and is killed with SIGKILL, all its processes at once, at one of four kinds of
moments: between steps, while a checkpoint is written (its folder has no mark yet), while an old one is removed (two
folders are there), in the last steps of an epoch. Once it has ended, or was killed KILLS_A_RUN times, it ends unkilled
and another begins in another folder.

Checked: no start but the first of a folder begins at step 0, once a checkpoint was marked; every start says what it
goes on from; steps and ids are those of a run that was not killed. Prints one line a start, JSON at the end; exit code
1 if a check fails. Ranks are forked from this process, which has imported what they need: 5 to 10 s of processor time a
kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.soak import write_rows
from internvl_pack.testing.tiny import conversation_texts, save_tiny_checkpoint, tiny_tokenizer
from train import finetune
from train.accounting import SAMPLE_IDS, read_sample_log
from train.checkpoint import PACKING_STATE, folders_of
from train.environment import free_port

PACKS_A_STEP = 4
NUM_SAMPLES = 300
SAVE_STEPS = 3
KILLS_A_RUN = 8
MOMENTS = ("between steps", "while saving", "while an old one is removed", "at an epoch's end")
SECONDS_A_START = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep everything there (default: a temporary folder)")
    args = parser.parse_args()
    if args.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            return loop(Path(folder), args.kills, args.seed)
    args.folder.mkdir(parents=True, exist_ok=True)
    return loop(args.folder, args.kills, args.seed)


def loop(folder: Path, num_kills: int, seed: int) -> int:
    begun = time.monotonic()
    meta = write_rows(folder, NUM_SAMPLES, random.Random(0), images=8, words=(5, 20), long_ones=True)
    Ranks([lambda: write_model(folder)], folder / "model.log").wait()
    import_all()
    draw, kills, starts, failures = random.Random(seed), Counter[str](), [0], list[str]()
    expected = {}
    for deepspeed in (True, False):
        whole = folder / f"whole{int(deepspeed)}"
        if code := start(meta, whole, 2, 0, deepspeed).wait():
            raise SystemExit(f"the run that is not killed failed ({code}): {log_of(whole).read_text()[-3000:]}")
        expected[deepspeed] = ids_of(whole)
    assert expected[True] == expected[False], "DeepSpeed has no part in the order"
    runs = 0
    while kills.total() < num_kills and not failures:
        kills_here = min(KILLS_A_RUN, num_kills - kills.total())
        out, runs = folder / f"run{runs}", runs + 1
        failures += killed_run(meta, out, expected[True], draw, kills, kills_here, starts, deepspeed=runs % 2 == 1)
    found = {"kills": dict(kills), "runs": runs, "starts": starts[0], "steps": len(expected[True])}
    print(json.dumps(found | {"seconds": round(time.monotonic() - begun), "failures": failures}))
    return int(bool(failures))


def killed_run(
    meta: Path,
    out: Path,
    expected: dict[int, Any],
    draw: random.Random,
    kills: Counter[str],
    num_kills: int,
    starts: list[int],
    *,
    deepspeed: bool,
) -> list[str]:
    """One run from its first step to its end, killed up to `num_kills` times on the way; what was wrong with it."""
    last = kills.total() + num_kills
    while True:
        marked = [path.name for path in folders_of(out) if (path / PACKING_STATE).is_file()]
        ranks, workers = draw.choice(((1, 0), (1, 2), (2, 0), (2, 1), (4, 0)))
        moment = draw.choice(MOMENTS) if kills.total() < last else "never"
        written = log_of(out).stat().st_size if log_of(out).exists() else 0
        run = start(meta, out, ranks, workers, deepspeed)
        starts[0] += 1
        died = kill_at(run, out, moment, draw, max(expected))
        with open(log_of(out), "rb") as log:
            log.seek(written)
            said = log.read().decode(errors="replace")
        going_on = "resume: going on from" in said
        print(
            f"{out.name}: {ranks} ranks, {workers} readers, {moment}: {'killed' if died else run.code} at step "
            f"{last_step(out)}, began from {marked or 'nothing'}",
            flush=True,
        )
        if marked and not going_on and "optimizer step" in said:
            return [f"{out.name}: did not go on from {marked}"]
        if died:
            kills[moment] += 1
            continue
        if run.code:
            return [f"{out.name}: exit code {run.code}: {said[-3000:]}"]
        found = ids_of(out)
        wrong = [step for step in sorted({*found, *expected}) if found.get(step) != expected.get(step)]
        return [f"{out.name}: other samples in steps {wrong[:10]}"] if wrong else []


def kill_at(run: Ranks, out: Path, moment: str, draw: random.Random, num_steps: int) -> bool:
    """Kill a run and all its processes at a moment; False where it ended before."""
    first, more = last_step(out), draw.randint(1, 2 * SAVE_STEPS)
    per_epoch = num_steps // 2
    known = {path.name for path in folders_of(out)}
    deadline = time.monotonic() + SECONDS_A_START
    while run.is_alive() and time.monotonic() < deadline:
        step, folders = last_step(out), folders_of(out)
        begun = [path for path in folders if path.name not in known]
        if (
            (moment == "between steps" and step >= first + more)
            or (moment == "while saving" and any(not (path / PACKING_STATE).is_file() for path in begun))
            or (moment == "while an old one is removed" and begun and len(folders) > 1 and step > first)
            or (moment == "at an epoch's end" and step > first and per_epoch - step % per_epoch <= 1)
        ):
            time.sleep(draw.choice((0.0, 0.0, draw.uniform(0, 0.05), draw.uniform(0, 0.5))))
            return run.kill()
        time.sleep(0.002)
    if run.is_alive():
        run.kill()
        raise SystemExit(f"{out.name}: no end and no moment to kill it at: {log_of(out).read_text()[-3000:]}")
    return False


class Ranks:
    """Processes forked from this one, that run a function each and write into one log.

    Attributes:
        code: the first exit code that is not 0, once all have ended.
    """

    def __init__(self, functions: list[Callable[[], Any]], log: Path) -> None:
        self.code = 0
        self._alive = {_forked(function, log) for function in functions}

    def is_alive(self) -> bool:
        """Whether a process runs; after one that failed the others are ended, as a launcher does."""
        for pid in list(self._alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._alive.remove(pid)
                self.code = self.code or os.waitstatus_to_exitcode(status)
        if self.code and self._alive:
            time.sleep(5)
            self.kill()
        return bool(self._alive)

    def wait(self) -> int:
        deadline = time.monotonic() + SECONDS_A_START
        while self.is_alive():
            if time.monotonic() > deadline:
                self.kill()
                return 1
            time.sleep(0.05)
        return self.code

    def kill(self) -> bool:
        """SIGKILL for all and what descends from them; whether one was still alive."""
        family = []
        for pid in self._alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                family += [process, *process.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self._alive]
        psutil.wait_procs(family, timeout=30)
        self._alive.clear()
        return any(codes)


def _forked(function: Callable[[], Any], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = function() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def import_all() -> None:
    """What a rank imports, once."""
    import deepspeed  # noqa: F401
    import transformers.integrations.deepspeed
    import transformers.models.internvl.modeling_internvl
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import train.options
    import train.trainer  # noqa: F401


def start(meta: Path, out: Path, ranks: int, workers: int, deepspeed: bool) -> Ranks:
    """train/finetune.py on some ranks: the same steps on any number of ranks and readers."""
    options = {
        "model_name_or_path": meta.parent / "model",
        "meta_path": meta,
        "output_dir": out,
        "force_image_size": 56,
        "dynamic_image_size": True,
        "use_packed_ds": True,
        "max_packed_tokens": 180,
        "num_images_expected": 24,
        "gradient_accumulation_steps": PACKS_A_STEP // ranks,
        "dataloader_num_workers": workers,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "save_total_limit": 1,
        "resume_from_checkpoint": "auto",
        "log_sample_ids": True,
        "check_isolation": False,
        "grad_checkpoint": False,
        "report_to": "none",
        "use_cpu": True,
    }
    if deepspeed:
        options["deepspeed"] = "zero_stage1"
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    port = free_port()

    def run_rank(rank: int) -> int:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return finetune.main(words)

    return Ranks([lambda rank=rank: run_rank(rank) for rank in range(ranks)], log_of(out))


def write_model(folder: Path) -> None:
    save_tiny_checkpoint(folder / "model", tiny_tokenizer(conversation_texts(folder / "rows.jsonl")))


def log_of(out: Path) -> Path:
    return out.with_suffix(".log")


def last_step(out: Path) -> int:
    path = out / SAMPLE_IDS / "rank00000.jsonl"
    try:
        lines = path.read_bytes().splitlines()[-3:]
    except OSError:
        return 0
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"}")), default=0)


def ids_of(out: Path) -> dict[int, list[str]]:
    return {step: sorted(ids) for step, ids in read_sample_log(out).items()}


if __name__ == "__main__":
    sys.exit(main())
