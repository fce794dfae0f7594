"""What the benchmarks of whole runs share: their options, a checkpoint of random weights, and runs of finetune.py."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import versions
from benchmarks.train_step import SHAPES, VISION, internvl_config
from internvl_pack.checkpoints.tokenizers import image_token_id
from internvl_pack.testing.tiny import tiny_internvl_config

ROOT = Path(__file__).resolve().parents[1]
TILE = 448  # pixels along a side
SHAPES = SHAPES | {"8b": SHAPES["8b8"] | {"num_hidden_layers": 28}}


def parser_of_runs(doc: str | None) -> argparse.ArgumentParser:
    """The options that runs have in common; what a program does not know goes to finetune.py."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--meta", required=True, help="meta file of the data")
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer with the tokens for images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpus", type=int, default=1, help="training processes, each with its own workers")
    parser.add_argument("--workers", type=int, default=8, help="loader processes of a GPU")
    parser.add_argument("--budget", type=int, nargs=2, metavar=("TOKENS", "TILES"), help="default 16384 48")
    parser.add_argument("--log", type=Path, help="file that keeps all that finetune.py says")
    return parser


def launcher(num_processes: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]


def run_logged(command: Sequence[str], log: Path, device_name: str) -> int:
    """Run a command, all it says into `log`, whose end is shown where it fails; returns its exit code."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # rows differ in size
    environment.setdefault("OMP_NUM_THREADS", "1" if device_name == "cpu" else "8")
    if device_name == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    with open(log, "w", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code:
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
        print(f"finetune.py ended with {code}; the end of what it said:", *said, sep="\n")
    return code


def save_random_model(
    folder: Path, config: Any, tokenizer: Any, device: torch.device, title: str, seed: int = 0
) -> None:
    """Random weights, made on the device, in bfloat16, on a CPU in float32; and the tokenizer."""
    from transformers import InternVLForConditionalGeneration
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    with device:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = InternVLForConditionalGeneration._from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    million = model.num_parameters() / 1e6
    print(f"{versions(device)}, {os.cpu_count()} CPU cores; {title}: {million:,.0f} M parameters", flush=True)


def write_checkpoint(directory: Path, tokenizer_dir: str, shape: str, device_name: str) -> None:
    """Random weights of a shape of SHAPES or "tiny", and the tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    if shape == "tiny":
        config = tiny_internvl_config(tokenizer, image_size=TILE)
    else:
        text = SHAPES[shape] | {"vocab_size": max(len(tokenizer), SHAPES[shape]["vocab_size"])}
        config = internvl_config(VISION | {"image_size": [TILE, TILE]}, text, image_token_id(tokenizer))
    save_random_model(directory, config, tokenizer, torch.device(device_name), shape)


def in_own_process(function: Callable[..., None], *args: Any) -> bool:
    """Run a function in a process that takes along what it holds of the device's memory; whether it went well."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    return process.exitcode == 0


make_checkpoint = partial(in_own_process, write_checkpoint)


def training_options(args: argparse.Namespace, checkpoint: Path, output_dir: Path, **more: Any) -> list[str]:
    """finetune.py's command line for a row of `args.budget` on `args.device`; `more` comes on top."""
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
        "bf16": not small,
        "compile": not small,
        "grad_checkpoint": False,
        "learning_rate": 1e-5,
        "save_strategy": "no",
        "report_to": "none",
    }
    if small:
        options |= {"use_cpu": True, "optim": "adamw_torch"}
    return [word for name, value in (options | more).items() for word in (f"--{name}", str(value))]
