"""`internvl-pack validate META`: which samples a run would leave out, and why, before it starts."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from typing import Any, TextIO

from ..config import PackingConfig
from ..errors import UserError
from ..options import add_options, count
from ..survey.validate import (
    NUM_EXAMPLES,
    BadSample,
    Checker,
    Report,
    count_unknown_fields,
    report_lines,
    root_lines,
    validate,
)
from ._options import (
    BUDGETS,
    META_HELP,
    WorkerOptions,
    add_encoding,
    num_workers,
    open_samples,
    packing_config,
    survey_root,
)
from ._table import table

HELP = "Check every sample of a meta file as training would see it; exit code 1 if any is bad."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("meta", help=META_HELP)
    parser.add_argument(
        "--decode", action="store_true", help="decode all pixels; without it images are judged by their headers"
    )
    add_options(parser, WorkerOptions)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    parser.add_argument("--quarantine", metavar="FILE", help="write the bad samples, one JSON object a line")
    add_encoding(parser, "Default: a small one built from the data; verdicts are the same.")
    rows = parser.add_argument_group("budgets that samples are held against: as given to training")
    add_options(rows, PackingConfig, *BUDGETS, "oversize", "survey_dir")


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    num_workers(args)  # report a mistake before anything is opened
    checker = build_checker(args)
    num_rows = checker.samples.num_rows
    processes = num_workers(args, small=num_rows < 2000 and not args.decode)
    report = Report()
    listed: list[BadSample] | None = [] if args.json else None
    with ExitStack() as stack:
        quarantine = stack.enter_context(_opened(args.quarantine)) if args.quarantine else None
        bar = stack.enter_context(tqdm(total=num_rows, unit=" samples", desc="validating", disable=None))
        for num_samples, bad in validate(checker, num_workers=processes):
            report.count(num_samples, bad)
            bar.update(num_samples)
            if bad:
                bar.set_postfix_str(f"{report.samples - report.good} bad")
            if quarantine is not None:
                quarantine.writelines(_line(sample.as_json()) for sample in bad)
            if listed is not None:
                listed.extend(bad)
    show(report, checker)
    unknown = count_unknown_fields(checker.samples.sources)
    for line in [*root_lines(report.without_images, checker.samples.specs), *report_lines(unknown)]:
        print(line)
    if listed is not None:
        result = {
            "samples": report.samples,
            "good": report.good,
            "reasons": dict(report.reasons.most_common()),
            "bad_samples": [sample.as_json() for sample in listed],
            "unknown_fields": dict(unknown.most_common()),
            "warnings": [line for source in checker.samples.sources for line in source.warnings],
        }
        print(json.dumps(result))
    return 1 if report.reasons else 0


def build_checker(args: argparse.Namespace) -> Checker:
    """The checker that the options describe.

    Raises:
        UserError: data, tokenizer or options cannot be used.
    """
    config = packing_config(args)
    if config.oversize in ("drop", "error") and not args.tokenizer:
        raise UserError(f"--oversize {config.oversize} depends on token counts: give the model's --tokenizer")
    samples = open_samples(args)
    if not args.tokenizer:
        print(
            "No --tokenizer: a small one built from the data stands in. Token counts differ from the model's, "
            "verdicts do not."
        )
    return Checker(samples, config, root=survey_root(args), decode=args.decode)


def _opened(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--quarantine {path} cannot be written: {error.strerror}") from None


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def show(report: Report, checker: Checker) -> None:
    """The table of reasons on standard output."""
    how = "pixels decoded" if checker.decode else "images judged by their headers"
    if report.reasons:
        rows = [
            [reason, f"{count:,}", "\n".join(f"{sample.source}: {sample.detail}" for sample in report.examples[reason])]
            for reason, count in report.reasons.most_common()
        ]
        print(table(["reason", "samples", f"first {NUM_EXAMPLES}"], rows, left=(0, 2)))
    bad = report.samples - report.good
    print(f"{count(report.samples, 'samples')}: {report.good:,} good, {bad:,} bad ({how})")
