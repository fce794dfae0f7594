"""`internvl-pack preview META --out preview.html`: the rows that training will get, on one page."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..config import RowOptions
from ..errors import UserError
from ..options import add_options, count, make, option
from ._options import (
    META_HELP,
    STAND_IN,
    StepOptions,
    add_run_options,
    open_with_tokenizer,
    packing_config,
    shown_options,
)

HELP = "Show packs as training will get them: texts, tiles, boundaries and loss weights on one page."

SHOWN = (
    "max_packed_tokens",
    "num_images_expected",
    "loss_reduction",
    "conv_style",
    "dynamic_image_size",
    "use_thumbnail",
    "max_dynamic_patch",
    "packing_policy",
    "oversize",
    "strict_mode",
    "pad_seq_to_mult",
    "max_seq_length",
    "per_device_train_batch_size",
    "ranks",
    "rank",
    "epoch",
    "seed",
    "preset_path",
)


@dataclass(kw_only=True)
class PreviewOptions:
    """Which rows are shown."""

    packs: int = option(8, "Rows to show, from the epoch's first.", unit="rows", at_least=1)
    epoch: int = option(0, "Whose order is shown.", at_least=0)
    rank: int = option(0, "Whose rows are shown.", at_least=0)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("meta", help=META_HELP)
    parser.add_argument("--out", metavar="FILE", required=True, help="the page, one HTML file")
    parser.add_argument("--json", action="store_true", help="print what was shown as one JSON object on the last line")
    add_options(add_run_options(parser), RowOptions)
    add_options(parser, PreviewOptions)
    parser.add_argument("--preset_path", metavar="DIR", help="Rows of a preset that internvl-pack plan wrote.")


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from ..report.preview import collect, render

    make(PreviewOptions, vars(args))
    out = _target(args.out)
    loader, tokenizer = build(args)
    loader.set_epoch(args.epoch)
    bar = partial(tqdm, total=args.packs, unit=" rows", desc="packing", disable=None, delay=2)
    preview = collect(loader, tokenizer, num_rows=args.packs, follow=bar)
    notes = [] if args.tokenizer else [f"No --tokenizer: {STAND_IN}."]
    page = render(preview, title=f"Packs of {args.meta}", options=shown_options(args, *SHOWN), notes=notes)
    try:
        out.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"--out {args.out} cannot be written: {error.strerror}") from None
    for note in notes:
        print(note)
    segments = sum(s.is_sample for row in preview.rows for s in row.segments)
    size = out.stat().st_size
    left = f"; not pictured: {count(preview.pictures_left_out, 'tiles')}" if preview.pictures_left_out else ""
    print(f"{out}: {count(len(preview.rows), 'rows')} with {count(segments, 'segments')}, {size / 1e6:.1f} MB{left}")
    if preview.ended:
        print(f"epoch {args.epoch} has no more rows")
    if args.json:
        result = {"out": str(out), "bytes": size, "rows": len(preview.rows), "segments": segments}
        print(json.dumps(result | {"left": len(preview.events), "ended": preview.ended}))
    return 0


def _target(name: str) -> Path:
    """Check before any work is done that the page can be written.

    Raises:
        UserError: it cannot.
    """
    out = Path(name)
    if out.is_dir():
        raise UserError(f"--out {name} is a folder: give the page a name, such as {out / 'preview.html'}")
    if not out.parent.is_dir():
        raise UserError(f"--out {name}: there is no folder {out.parent}")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UserError(f"--out {name} cannot be written")
    return out


def build(args: argparse.Namespace) -> tuple[Any, Any]:
    """(loader, tokenizer): the loader of one rank as finetune.py builds it, reading in this process."""
    from ..stream.dataset import PackedDataset
    from ..stream.loader import build_loader

    config, rows, step = packing_config(args), make(RowOptions, vars(args)), make(StepOptions, vars(args))
    if args.rank >= step.ranks:
        raise UserError(f"--rank {args.rank} of --ranks {step.ranks}: give one from 0 to {step.ranks - 1}")
    samples, tokenizer = open_with_tokenizer(args)
    place = {"rank": args.rank, "world_size": step.ranks}
    if args.preset_path:
        from ..stream.preset_dataset import PresetDataset

        dataset: PackedDataset = PresetDataset(args.preset_path, samples, config, **place)
    else:
        dataset = PackedDataset(samples, config=config, **place)
    packs = step.per_device_train_batch_size
    loader = build_loader(
        dataset,
        packs_per_batch=packs,
        accumulation=step.gradient_accumulation_steps,
        loss_reduction=rows.loss_reduction,
        pad_to=config.max_packed_tokens * packs if rows.strict_mode else None,
        pad_seq_to_mult=rows.pad_seq_to_mult,
    )
    return loader, tokenizer
