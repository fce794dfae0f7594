"""`internvl-pack train ...`: fine-tuning from an installed package, as `train/finetune.py` of a checkout does it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import import_module

from ..errors import UserError

HELP = "Fine-tune a model; options as train/finetune.py's, and --nproc N: processes of this machine, one a GPU."


def configure(parser: argparse.ArgumentParser) -> None:
    """The one option that is not of the run."""
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes of this machine (default: 1)")


def main(argv: Sequence[str]) -> int:
    """Train in this process, which torchrun may have started, or start `--nproc` of them. Returns the exit code.

    Raises:
        UserError: `--nproc` is below 1.
    """
    return run_or_start(argv, "train", "internvl_pack.train.finetune")


def run_or_start(argv: Sequence[str], command: str, module: str) -> int:
    """`main` of a module of training on a command's options, in this process or in `--nproc` of them.

    Raises:
        UserError: `--nproc` is below 1.
    """
    program = f"internvl-pack {command}"
    parser = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    configure(parser)
    args, options = parser.parse_known_args(argv)
    if args.nproc < 1:
        raise UserError(f"--nproc {args.nproc}: give at least 1")
    if args.nproc == 1 or "RANK" in os.environ:
        return import_module(module).main(options, program)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it, which warns of it in four lines
    ranks = ["--standalone", "--nproc_per_node", str(args.nproc), "--module", "internvl_pack.cli", command]
    return import_module("internvl_pack.train.launch").main([*ranks, *options])
