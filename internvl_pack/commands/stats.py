"""`internvl-pack stats META`: what the data is made of, and what packing would make of it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config import RowOptions
from ..errors import UserError
from ..options import add_options, count, make
from ._options import (
    META_HELP,
    STAND_IN,
    StepOptions,
    WorkerOptions,
    add_run_options,
    num_workers,
    open_samples,
    packing_config,
    shown_options,
    survey_root,
)
from ._table import table

HELP = "Tokens, tiles and supervised shares of the data; predicted packs, fill and steps; plots by --out."

# Rows that are measured in this process: starting others takes longer.
SMALL = 2000


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("meta", help=META_HELP)
    parser.add_argument("--out", metavar="DIR", help="write plots (PNG) and one self-contained page, stats.html")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    add_options(parser, WorkerOptions)
    add_options(add_run_options(parser), RowOptions, "pad_seq_to_mult")


def run(args: argparse.Namespace) -> int:
    from ..config import check_budget
    from ..estimate.stats import gather
    from ..survey.validate import root_lines

    num_workers(args)  # report a mistake before anything is opened
    config, step = packing_config(args), make(StepOptions, vars(args))
    if args.out:
        _prepare(Path(args.out))
    samples = open_samples(args)
    check_budget(config, samples.encoder)
    stats = gather(
        samples,
        config,
        root=survey_root(args),
        packs_per_step=step.packs,
        num_ranks=step.ranks,
        num_workers=num_workers(args, small=samples.num_rows < SMALL),
        follow=_follow,
    )
    result = stats.as_json() | {"meta": args.meta, "tokenizer": args.tokenizer}
    _show(result)
    without_images = {d.name for d in stats.datasets if d.reasons["image_missing"]}
    for line in root_lines(without_images, samples.specs):
        print(line)
    if args.out:
        from ..report.plots import PLOTS, write_report

        names = ("conv_style", "dynamic_image_size", "use_thumbnail", "max_dynamic_patch", "oversize", "seed")
        page = write_report(stats, result, Path(args.out), options=shown_options(args, *names))
        plots = ", ".join(f"{name}.png" for name in PLOTS)
        print(f"{page}: {page.stat().st_size / 1e6:.1f} MB, with {plots}")
    if args.json:
        print(json.dumps(result))
    return 0


def _prepare(folder: Path) -> None:
    """Check before anything is measured that the report can be written.

    Raises:
        UserError: matplotlib is missing, or the folder cannot be written.
    """
    from ..report.plots import matplotlib

    matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--out {folder} cannot be written")


def _follow(what: str, total: int, steps: Iterable[Any]) -> Iterator[Any]:
    from tqdm import tqdm

    with tqdm(total=total, unit=" samples", desc=what, disable=None, delay=2) as bar:
        for done, result in steps:
            bar.update(done)
            yield result


def _print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)) -> None:
    print(table(header, rows, left=left), end="\n\n")


def _show(r: dict[str, Any]) -> None:
    """Tables on standard output."""
    from ..report.rows import datasets_of, of_dataset, of_policy

    if r["tokenizer"] is None:
        print(f"No --tokenizer: {STAND_IN}.")
    budget = r["budget"]
    datasets = datasets_of(r)
    rows = [[d["name"], *of_dataset(d).values()] for d in datasets]
    _print_table(["dataset", *of_dataset(datasets[0])], rows)
    names = ("mean", "p5", "p50", "p95", "p99", "max")
    rows = []
    for d in datasets:
        for unit in ("tokens", "tiles"):
            values = (f"{d[unit][name]:,.1f}" if name == "mean" else f"{d[unit][name]:,}" for name in names)
            rows.append([d["name"] if unit == "tokens" else "", unit, *values])
    _print_table(["a sample", "", *names], rows, left=(0, 1))
    share = r["share_of_budget"]
    print(
        f"A sample takes {share['tokens']['p50']:.1%} of the {count(budget['max_packed_tokens'], 'tokens')} of a row "
        f"(95 % of them at most {share['tokens']['p95']:.1%}, the longest {share['tokens']['max']:.1%}) and "
        f"{share['tiles']['p50']:.1%} of its {count(budget['num_images_expected'], 'tiles')} "
        f"({share['tiles']['p95']:.1%}, {share['tiles']['max']:.1%}).\n"
    )
    if r["reasons"]:
        rows = [[reason, f"{count:,}", "\n".join(r["examples"][reason])] for reason, count in r["reasons"].items()]
        _print_table(["bad samples, by reason", "samples", "first"], rows, left=(0, 2))
    shown = ("policy", "packs", "over bound", "tokens full", "tiles full", "a pack", "split", "steps")
    rows = []
    for name, p in r["packing"].items():
        fields = of_policy(name, p, "~")
        chosen = " (chosen)" if name == budget["packing_policy"] else ""
        rows.append([fields["policy"] + chosen, *(fields[heading] for heading in shown[1:])])
    _print_table(shown, rows)
    p, pad = r["packing"][budget["packing_policy"]], r["padding"]
    refused = ", ".join(f"{count:,} {reason}" for reason, count in p["refused"].items())
    lines = [
        f"{count(budget['packs_a_step'], 'packs')} a step: "
        f"{count(r['steps_an_epoch'], 'steps')} an epoch, {p['steps_over_bound']:.3f} times the least possible"
        + ("" if p["exact"] else f" (extrapolated from {count(p['planned_samples'], 'samples')})")
        + (f"; left out: {refused}" if refused else ""),
        f"padding avoided: of batches of 4 padded to their longest {pad['batch_4']:.1%} would be padding, of 16 "
        f"{pad['batch_16']:.1%}; of packed rows {pad['packed']:.1%}",
    ]
    lines += [line for line in (r["tree_line"], r["trouble"]) if line]
    print("\n".join(lines))
