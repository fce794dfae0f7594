"""How long does training wait for its data? train/finetune.py itself, in InternVL3-1B's shape with random weights.

    python benchmarks/data_wait.py --meta META.json --tokenizer DIR                       # one GPU
    python benchmarks/data_wait.py --meta META.json --tokenizer DIR --gpus 2 --workers 4
    python benchmarks/data_wait.py --meta META.json --tokenizer DIR --device cpu          # the script itself, in small

DeepSpeed ZeRO-1, bfloat16, `--compile True --grad_checkpoint False`, images of up to 12 tiles of 448 pixels and a
thumbnail. The checkpoint, with the tokenizer of DIR, is written to a temporary folder. Options that this script does
not know go to finetune.py and override what it is given here, as `--compile_recompute all` where memory is short. Data
is read as in any run, again and again if it is small: then files come from the system's cache, and what is measured is
all that follows, tokenising, packing and decoding.

A row of the table is a line of the training log, with the figures since the line before. The first holds compilation.

    tokens/s     real tokens of a GPU
    data wait    share of the time in which steps waited for their batch; on several GPUs those of the first
    MFU          by internvl_pack/model/flops.py, of the card's dense bfloat16 peak
    fill         of the rows' budgets, in tokens and in tiles

The last line has all steps after the first row: their speed, and the waiting as a share of their time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_check import Table, versions
from benchmarks.train_step import SHAPES, VISION, internvl_config
from internvl_pack.checkpoints.tokenizers import image_token_id
from internvl_pack.testing.tiny import tiny_internvl_config

ROOT = Path(__file__).resolve().parents[1]
TILE = 448  # pixels along a side
LOG_EVERY = 5  # optimizer steps
COLUMNS = (
    ("tokens/s", "tokens_per_s_per_gpu", "{:,.0f}", 9),
    ("data wait", "data_wait", "{:.2%}", 9),
    ("MFU", "mfu", "{:.1%}", 6),
    ("peak GB", "memory_peak_gb", "{:.1f}", 7),
    ("token fill", "token_fill", "{:.1%}", 10),
    ("tile fill", "tile_fill", "{:.1%}", 9),
    ("samples/s", "samples_per_s", "{:.1f}", 9),
    ("tiles/s", "tiles_per_s", "{:.1f}", 7),
)


def model_config(tokenizer: Any, small: bool) -> Any:
    """InternVL3-1B's shape, or a tiny one, with this tokenizer's vocabulary and image token."""
    if small:
        return tiny_internvl_config(tokenizer, image_size=TILE)
    text = SHAPES["1b"] | {"vocab_size": max(len(tokenizer), SHAPES["1b"]["vocab_size"])}
    return internvl_config(VISION | {"image_size": [TILE, TILE]}, text, image_token_id(tokenizer))


def write_checkpoint(directory: Path, tokenizer_dir: str, device_name: str) -> None:
    """Random weights in bfloat16, made on the device, and the tokenizer; on a CPU a tiny model in float32."""
    from transformers import AutoTokenizer, InternVLForConditionalGeneration
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    device = torch.device(device_name)
    small = device.type == "cpu"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    torch.manual_seed(0)
    with device:
        model = InternVLForConditionalGeneration._from_config(
            model_config(tokenizer, small), dtype=torch.float32 if small else torch.bfloat16
        )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{versions(device)}, {cores} CPU cores; {model.num_parameters() / 1e6:,.0f} M parameters", flush=True)


def make_checkpoint(directory: Path, tokenizer_dir: str, device_name: str) -> bool:
    """`write_checkpoint` in a process that takes along what it holds of the device's memory; whether it went well."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=write_checkpoint, args=(directory, tokenizer_dir, device_name))
    process.start()
    process.join()
    return process.exitcode == 0


def training_command(args: argparse.Namespace, checkpoint: Path, output_dir: Path, more: Sequence[str]) -> list[str]:
    small = args.device == "cpu"
    tokens, tiles = args.budget or ((4096, 16) if small else (16384, 48))
    options: dict[str, Any] = {
        "model_name_or_path": checkpoint,
        "meta_path": args.meta,
        "output_dir": output_dir,
        "use_packed_ds": True,
        "max_packed_tokens": tokens,
        "num_images_expected": tiles,
        "force_image_size": TILE,
        "dynamic_image_size": True,
        "max_dynamic_patch": 12,
        "use_thumbnail": True,
        "dataloader_num_workers": args.workers,
        "deepspeed": "zero_stage1",
        "bf16": not small,
        "compile": not small,
        "grad_checkpoint": False,
        "attn_kernel": "auto",
        "max_steps": args.steps,
        "learning_rate": 1e-5,
        "logging_steps": LOG_EVERY,
        "save_strategy": "no",
        "report_to": "none",
    }
    if small:
        options |= {"use_cpu": True, "optim": "adamw_torch"}
    launcher = [sys.executable]
    if args.gpus > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.gpus)]
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*launcher, str(ROOT / "train" / "finetune.py"), *words, *more]


def train(command: Sequence[str], log: Path) -> int:
    """Run it, all it says into `log`; its exit code."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # rows differ in size
    with open(log, "w", encoding="utf-8") as file:
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode


def report(history: Sequence[dict[str, float]]) -> None:
    """The table, and what all rows but the first come to."""
    lines = [line for line in history if "data_wait" in line]
    if len(lines) < 2:
        print(f"{len(lines)} lines in the log: give more --steps")
        return
    there = [column for column in COLUMNS if column[1] in lines[0]]  # a CPU has neither MFU nor a peak
    table = Table(("step", 5), *((title, width) for title, _, _, width in there))
    for line in lines:
        table.row(line["step"], *(form.format(line[name]) for _, name, form, _ in there))
    rows = lines[1:]
    # Rows' budgets filled and seconds, both by the same unknown factor: tokens of a budget.
    filled = [(line["step"] - before["step"]) * line["token_fill"] for before, line in pairwise(lines)]
    seconds = [fill / line["tokens_per_s_per_gpu"] for fill, line in zip(filled, rows, strict=True)]
    waited = sum(line["data_wait"] * spent for line, spent in zip(rows, seconds, strict=True))
    print(
        f"after step {lines[0]['step']}: {sum(filled) / sum(seconds):,.0f} tokens/s a GPU, "
        f"data wait {waited / sum(seconds):.2%} (at most {max(line['data_wait'] for line in rows):.2%} in a row)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--meta", required=True, help="meta file of the data")
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer with the tokens for images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpus", type=int, default=1, help="training processes, each with its own workers")
    parser.add_argument("--workers", type=int, default=8, help="loader processes of a GPU")
    parser.add_argument("--budget", type=int, nargs=2, metavar=("TOKENS", "TILES"), help="default 16384 48")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--log", type=Path, help="file that keeps all that finetune.py says")
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        checkpoint, output_dir = Path(folder, "checkpoint"), Path(folder, "run")
        if not make_checkpoint(checkpoint, args.tokenizer, args.device):
            return 1
        made = time.perf_counter()
        log = args.log or Path(folder, "finetune.log")
        code = train(training_command(args, checkpoint, output_dir, more), log)
        print(f"checkpoint written in {made - started:.0f} s, finetune.py ran {time.perf_counter() - made:.0f} s")
        if code:
            print(f"finetune.py ended with {code}; the end of what it said:")
            print("".join(log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[-30:]))
            return 1
        state = json.loads((output_dir / "trainer_state.json").read_text(encoding="utf-8"))
        summary = json.loads((output_dir / "train_summary.json").read_text(encoding="utf-8"))
    print(
        f"{summary['steps']} steps on {summary['ranks']} x {summary['device']} in {summary['dtype']}, "
        f"{summary['attn_kernel']}, {summary['max_packed_tokens']}/{summary['num_images_expected']}, "
        f"{args.workers} workers each, {summary['samples_per_pack']:.1f} samples a row"
    )
    report(state["log_history"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
