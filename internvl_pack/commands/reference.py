"""`internvl-pack reference ...`: the answers' log-probabilities by the model that a run begins with, stored."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import train

HELP = "Store the reference's log-probabilities for DPO and MPO; options as of the run, and --nproc N as train has it."


def configure(parser: argparse.ArgumentParser) -> None:
    """The one option that is not of the run."""
    train.configure(parser)


def main(argv: Sequence[str]) -> int:
    """Write in this process, which torchrun may have started, or in `--nproc` of them. Returns the exit code.

    Raises:
        UserError: `--nproc` is below 1.
    """
    return train.run_or_start(argv, "reference", "internvl_pack.train.write_reference")
