"""`internvl-pack validate META`: which samples a run would leave out, and why, before it starts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TextIO

from ..config import PackingConfig
from ..errors import SampleError, UserError
from ..packing.split import OVERSIZE
from ..sources import Source, load_meta, open_source
from ..validate import NUM_EXAMPLES, BadSample, Checker, Report, validate

HELP = "Check every sample of a meta file as training would see it; exit code 1 if any is bad."

TOKENIZER_TEXTS = 2000
"""Texts of the data that the stand-in tokenizer is built from."""


def configure(parser: argparse.ArgumentParser) -> None:
    defaults = PackingConfig()
    parser.add_argument("meta", help="meta file (JSON) of the datasets")
    parser.add_argument(
        "--decode", action="store_true", help="decode all pixels; without it images are judged by their headers"
    )
    parser.add_argument(
        "--workers", type=int, default=None, help="processes (default: one a CPU core, 8 at most; 0: in this process)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    parser.add_argument("--quarantine", metavar="FILE", help="write the bad samples, one JSON object a line")
    run_options = parser.add_argument_group("options of the run that is checked for")
    run_options.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="the model's tokenizer (default: a small one built from the data; verdicts are the same)",
    )
    _option(run_options, "conv_style", str, "internvl2_5", "chat format")
    _option(run_options, "force_image_size", int, 448, "side of a tile, pixels")
    _option(run_options, "down_sample_ratio", float, 0.5, "of patches to tokens, a side")
    _option(run_options, "min_dynamic_patch", int, 1, "tiles of an image at least, without the thumbnail")
    _option(run_options, "max_dynamic_patch", int, 12, "tiles of an image at most, without the thumbnail")
    _option(run_options, "dynamic_image_size", _boolean, True, "cut images into several tiles")
    _option(run_options, "use_thumbnail", _boolean, True, "add the whole image as one more tile")
    _option(run_options, "min_num_frame", int, 8, "frames of a video at least")
    _option(run_options, "max_num_frame", int, 32, "frames of a video at most")
    _option(run_options, "max_image_pixels", int, None, "width x height above which an image is refused")
    _flag(run_options, "allow_truncated_images", "accept images that are cut off or damaged")
    _option(run_options, "max_packed_tokens", int, defaults.max_packed_tokens, "token budget of a row")
    _option(run_options, "num_images_expected", int, defaults.num_images_expected, "tile budget of a row")
    _option(run_options, "max_seq_length", int, None, "tokens of one sample at most")
    _option(run_options, "oversize", str, defaults.oversize, f"what exceeds a budget: {', '.join(OVERSIZE)}")


def _option(group: Any, name: str, kind: Any, default: Any, text: str) -> None:
    """An option by finetune's name, written with `_` or `-`."""
    shown = f" (default: {default})" if default is not None else ""
    group.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=kind, default=default, help=text + shown)


def _flag(group: Any, name: str, text: str) -> None:
    group.add_argument(
        f"--{name}", f"--{name.replace('_', '-')}", type=_boolean, nargs="?", const=True, default=False, help=text
    )


def _boolean(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"give True or False, not {text!r}")
    return values[text.lower()]


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    if args.workers is not None and args.workers < 0:
        raise UserError(f"--workers must be at least 0, not {args.workers}")
    num_workers = min(8, os.cpu_count() or 1) if args.workers is None else args.workers
    checker = build_checker(args)
    num_rows = sum(len(source) for source in checker.sources)
    num_workers = 0 if num_rows < 2000 and args.workers is None and not args.decode else num_workers
    report = Report()
    listed: list[BadSample] | None = [] if args.json else None
    with ExitStack() as stack:
        quarantine = stack.enter_context(_opened(args.quarantine)) if args.quarantine else None
        bar = stack.enter_context(tqdm(total=num_rows, unit=" samples", desc="validating", disable=None))
        for num_samples, bad in validate(checker, num_workers=num_workers):
            report.count(num_samples, bad)
            bar.update(num_samples)
            if bad:
                bar.set_postfix_str(f"{report.samples - report.good} bad")
            if quarantine is not None:
                quarantine.writelines(_line(sample.as_json()) for sample in bad)
            if listed is not None:
                listed.extend(bad)
    show(report, checker)
    if listed is not None:
        result = {
            "samples": report.samples,
            "good": report.good,
            "reasons": dict(report.reasons.most_common()),
            "bad_samples": [sample.as_json() for sample in listed],
            "warnings": [line for source in checker.sources for line in source.warnings],
        }
        print(json.dumps(result))
    return 1 if report.reasons else 0


def build_checker(args: argparse.Namespace) -> Checker:
    """Raises UserError: data, tokenizer or options that cannot be used."""
    from ..encode.images import ImageRules
    from ..encode.sample import EncodeConfig, Encoder
    from ..encode.tiles import tokens_per_tile

    config = PackingConfig(
        max_packed_tokens=args.max_packed_tokens,
        num_images_expected=args.num_images_expected,
        max_seq_length=args.max_seq_length,
        oversize=args.oversize,
    )
    if config.oversize in ("drop", "error") and not args.tokenizer:
        raise UserError(f"--oversize {config.oversize} depends on token counts: give the model's --tokenizer")
    encode = EncodeConfig(
        conv_style=args.conv_style,
        image_size=args.force_image_size,
        tokens_per_tile=tokens_per_tile(args.force_image_size, down_sample_ratio=args.down_sample_ratio),
        min_dynamic_patch=args.min_dynamic_patch,
        max_dynamic_patch=args.max_dynamic_patch,
        dynamic_image_size=args.dynamic_image_size,
        use_thumbnail=args.use_thumbnail,
        min_num_frame=args.min_num_frame,
        max_num_frame=args.max_num_frame,
        max_image_pixels=args.max_image_pixels if args.max_image_pixels is not None else ImageRules().max_image_pixels,
        allow_truncated_images=args.allow_truncated_images,
    )
    specs = load_meta(args.meta)
    sources = [open_source(spec) for spec in specs]
    tokenizer = _load_tokenizer(args.tokenizer) if args.tokenizer else _stand_in(sources)
    return Checker(sources, specs, Encoder(tokenizer, encode), config, decode=args.decode)


def _load_tokenizer(path: str) -> Any:
    from ..model.tokenizers import load_tokenizer

    try:
        return load_tokenizer(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--tokenizer {path} cannot be loaded: {error}") from None


def _stand_in(sources: Sequence[Source]) -> Any:
    from ..tiny import tiny_tokenizer

    print(
        "No --tokenizer: a small one built from the data stands in. Token counts differ from the model's, verdicts "
        "do not."
    )
    return tiny_tokenizer(_texts(sources), vocab_size=1024)


def _texts(sources: Sequence[Source]) -> Iterator[str]:
    """Some texts of each dataset, of records that can be read."""
    for source in sources:
        rows = max(1, TOKENIZER_TEXTS // len(sources))
        for row in range(0, len(source), max(1, len(source) // rows)):
            try:
                turns = source.read(row).data.get("conversations")
            except SampleError:
                continue
            for turn in turns if isinstance(turns, list) else ():
                text = turn.get("value") if isinstance(turn, dict) else None
                if isinstance(text, str):
                    yield text[:2000]


def _opened(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--quarantine {path} cannot be written: {error.strerror}") from None


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def show(report: Report, checker: Checker) -> None:
    """The table of reasons on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A file or pipe gets whole lines: rich would cut them at 80 columns.
    console = Console(width=None if os.isatty(1) else 200)
    how = "pixels decoded" if checker.decode else "images judged by their headers"
    if report.reasons:
        table = Table("reason", "samples", f"first {NUM_EXAMPLES}", show_lines=True)
        table.columns[1].justify = "right"
        for reason, count in report.reasons.most_common():
            examples = "\n".join(sample.detail for sample in report.examples[reason])
            table.add_row(reason, f"{count:,}", Text(examples))
        console.print(table)
    bad = report.samples - report.good
    console.print(Text(f"{report.samples:,} samples: {report.good:,} good, {bad:,} bad ({how})"))
