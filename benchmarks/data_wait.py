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
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.finetune_runs import ROOT, launcher, make_checkpoint, parser_of_runs, run_logged, training_options
from benchmarks.measuring import Table

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


def training_command(args: argparse.Namespace, checkpoint: Path, output_dir: Path, more: Sequence[str]) -> list[str]:
    words = training_options(
        args, checkpoint, output_dir, deepspeed="zero_stage1", max_steps=args.steps, logging_steps=LOG_EVERY
    )
    start = launcher(args.gpus) if args.gpus > 1 else [sys.executable]
    return [*start, str(ROOT / "train" / "finetune.py"), *words, *more]


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
    parser = parser_of_runs(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        checkpoint, output_dir = Path(folder, "checkpoint"), Path(folder, "run")
        if not make_checkpoint(checkpoint, args.tokenizer, "tiny" if args.device == "cpu" else "1b", args.device):
            return 1
        made = time.perf_counter()
        log = args.log or Path(folder, "finetune.log")
        code = run_logged(training_command(args, checkpoint, output_dir, more), log, args.device)
        print(f"checkpoint written in {made - started:.0f} s, finetune.py ran {time.perf_counter() - made:.0f} s")
        if code:
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
