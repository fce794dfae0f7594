"""A run that is killed again and again ends with the same samples in every step as one that is not.

    python benchmarks/kill_loop.py [--kills 60] [--seed 0] [--folder DIR]

CPU, a tiny model, two epochs, a checkpoint every three steps, `save_total_limit 1`. Each start takes other ranks and
readers, and is killed with SIGKILL, all its processes at once, at one of four kinds of moments: between steps, while a
checkpoint is written (its folder has no mark yet), while an old one is removed (two folders are there), in the last
steps of an epoch. Once it has ended before all kills are spent it begins anew, in another folder.

Checked: no start but the first of a folder begins at step 0, once a checkpoint was marked; every start says what it
goes on from; steps and ids are those of a run that was not killed. Prints one line a start, JSON at the end; exit code
1 if a check fails. Some 20 s a kill on two idle cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from soak import write_data

from internvl_pack.testing.tiny import conversation_texts, save_tiny_checkpoint, tiny_tokenizer
from train.checkpoint import PACKING_STATE
from train.checkpoint_folders import folders_of
from train.sample_log import FOLDER, read_sample_log

ROOT = Path(__file__).resolve().parents[1]
PACKS_A_STEP = 4
NUM_SAMPLES = 240
SAVE_STEPS = 3
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
    meta = write_data(folder, NUM_SAMPLES)
    tokenizer = tiny_tokenizer(conversation_texts(folder / "rows.jsonl"))
    save_tiny_checkpoint(folder / "model", tokenizer)
    draw, kills, runs, failures = random.Random(seed), Counter[str](), 0, list[str]()
    whole = folder / "whole"
    if code := start(meta, whole, ranks=2, workers=0).wait(timeout=SECONDS_A_START):
        raise SystemExit(f"the run that is not killed failed ({code}): {log_of(whole).read_text()[-3000:]}")
    expected = ids_of(whole)
    while kills.total() < num_kills:
        out = folder / f"run{runs}"
        runs += 1
        failures += killed_run(meta, out, expected, draw, kills, num_kills)
    found = {"kills": dict(kills), "runs": runs, "steps": len(expected), "failures": failures}
    print(json.dumps(found))
    return int(bool(failures))


def killed_run(
    meta: Path, out: Path, expected: dict[int, Any], draw: random.Random, kills: Counter[str], num_kills: int
) -> list[str]:
    """One run from its first step to its end, killed on the way; what was wrong with it."""
    failures = []
    while True:
        marked = [path.name for path in folders_of(out) if (path / PACKING_STATE).is_file()]
        ranks, workers = draw.choice(((1, 0), (1, 2), (2, 0), (2, 1), (4, 0)))
        moment = draw.choice(MOMENTS) if kills.total() < num_kills else "never"
        written = log_of(out).stat().st_size if log_of(out).exists() else 0
        run = start(meta, out, ranks, workers)
        died = kill_at(run, out, moment, draw, max(expected))
        with open(log_of(out), "rb") as log:
            log.seek(written)
            told = log.read().decode(errors="replace")
        print(
            f"{out.name}: {ranks} ranks, {workers} readers, {moment}: {'killed' if died else run.returncode}",
            flush=True,
        )
        if marked and "resume: going on from" not in told and steps_of(out, told):
            failures.append(f"{out.name}: did not go on from {marked}")
        if died:
            kills[moment] += 1
            continue
        if run.returncode:
            failures.append(f"{out.name}: exit code {run.returncode}: {told[-1500:]}")
            return failures
        found = ids_of(out)
        wrong = [step for step in sorted({*found, *expected}) if found.get(step) != expected.get(step)]
        if wrong:
            failures.append(f"{out.name}: other samples in steps {wrong[:10]}")
        return failures


def steps_of(out: Path, told: str) -> bool:
    """Whether this start came as far as training."""
    return "optimizer steps in" in told and last_step(out) > 0


def kill_at(run: subprocess.Popen, out: Path, moment: str, draw: random.Random, num_steps: int) -> bool:
    """Kill a run and all its processes at a moment; False where it ended before."""
    first, more = last_step(out), draw.randint(1, 2 * SAVE_STEPS)
    per_epoch = num_steps // 2
    known = {path.name for path in folders_of(out)}
    deadline = time.monotonic() + SECONDS_A_START
    while run.poll() is None and time.monotonic() < deadline:
        step, folders = last_step(out), folders_of(out)
        begun = [path for path in folders if path.name not in known]
        if (
            (moment == "between steps" and step >= first + more)
            or (moment == "while saving" and any(not (path / PACKING_STATE).is_file() for path in begun))
            or (moment == "while an old one is removed" and begun and len(folders) > 1 and step > first)
            or (moment == "at an epoch's end" and step > first and per_epoch - step % per_epoch <= 1)
        ):
            time.sleep(draw.choice((0.0, 0.0, draw.uniform(0, 0.05), draw.uniform(0, 0.5))))
            return kill_family(run)
        time.sleep(0.002)
    if run.poll() is None:
        kill_family(run)
        raise SystemExit(f"{out.name}: no end and no moment to kill it at: {log_of(out).read_text()[-3000:]}")
    return False


def kill_family(run: subprocess.Popen) -> bool:
    """SIGKILL for the launcher and all that descend from it; whether it was still alive."""
    try:
        children = psutil.Process(run.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    run.kill()
    for process in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(children, timeout=30)
    return run.wait() != 0


def start(meta: Path, out: Path, ranks: int, workers: int) -> subprocess.Popen:
    """train/finetune.py under torchrun: the same steps on any number of ranks and readers."""
    options = {
        "model_name_or_path": meta.parent / "model",
        "meta_path": meta,
        "output_dir": out,
        "force_image_size": 56,
        "dynamic_image_size": True,
        "use_packed_ds": True,
        "max_packed_tokens": 520,
        "num_images_expected": 24,
        "num_lanes": 8,
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
        "deepspeed": "zero_stage1",
        "report_to": "none",
        "use_cpu": True,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(ROOT / "train" / "finetune.py")]
    command += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    log = open(log_of(out), "ab")  # noqa: SIM115
    return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def log_of(out: Path) -> Path:
    return out.with_suffix(".log")


def last_step(out: Path) -> int:
    path = out / FOLDER / "rank00000.jsonl"
    try:
        lines = path.read_bytes().splitlines()[-3:]
    except OSError:
        return 0
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"}")), default=0)


def ids_of(out: Path) -> dict[int, list[str]]:
    return {step: sorted(ids) for step, ids in read_sample_log(out).items()}


if __name__ == "__main__":
    sys.exit(main())
