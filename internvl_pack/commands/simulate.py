"""`internvl-pack simulate LENGTHS`: what a budget would do to an epoch of lengths, before any training."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from ..config import PackingConfig
from ..errors import UserError
from ..estimate.figures import PackingEstimate
from ..estimate.simulate import LengthTable, read_lengths, report, simulate, surveyed_lengths
from ..estimate.suggest import TOKEN_BUDGETS, suggest
from ..options import add_argument, add_options, count, make, option
from ..packing.cost import CostModel
from ..survey.survey import Survey
from ..survey.table import root_of
from ._options import META_HELP, add_encoding, measure_with_bar, open_samples, packing_config

HELP = "Pack an epoch of lengths and show how full, fair and even its packs are; --suggest chooses budgets."
SUGGEST_SAMPLES = 20_000  # that a grid of budgets is tried on

PACKING = (
    *("max_packed_tokens", "num_images_expected", "oversize", "share_prefix", "max_buffer_size", "packing_policy"),
    *("max_attention_cost", "pad_to_multiple_of", "cost_model", "seed"),
)
# Names of earlier releases, and training's.
RENAMED = (
    ("policy", "packing_policy", str),
    ("buffer_size", "max_buffer_size", int),
    ("model_size", "cost_model", str),
)


@dataclass(kw_only=True)
class SimulateOptions:
    """What is simulated."""

    ranks: int = option(64, "Ranks that step together.", unit="ranks", at_least=1)
    workers: int | None = option(None, "Accepted; the steps are the same with any number of readers.", at_least=0)
    global_batch: int | None = option(
        None, "Packs of an optimizer step over all ranks. Default: one a rank.", unit="packs", at_least=1
    )
    samples: int | None = option(
        None,
        "Samples of the epoch, drawn from the lengths with --seed. Default: all, in order.",
        unit="samples",
        at_least=1,
    )


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "lengths",
        help="CSV file with the columns num_tokens,num_tiles (num_images helps where samples are cut), - for standard "
        f"input, or data, of which images are then read by their headers and texts by --tokenizer: a {META_HELP}",
    )
    add_options(parser, PackingConfig, *PACKING)
    add_options(parser, SimulateOptions)
    for old, name, kind in RENAMED:
        add_argument(parser, old, dest=name, type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--suggest", action="store_true", help="try a grid of budgets and say which to use and why")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    add_encoding(parser, "Needed for data.")


def run(args: argparse.Namespace) -> int:
    config = packing_config(args)
    cost = CostModel.from_name(config.cost_model)
    make(SimulateOptions, vars(args))
    if args.workers is not None:
        print("--workers makes no difference: the steps are the same with any number of readers", file=sys.stderr)
    lengths, largest_image = lengths_of(args, config)
    if args.samples is not None:
        lengths = lengths.drawn(args.samples, args.seed)
    if args.suggest:
        if args.samples is None and len(lengths) > SUGGEST_SAMPLES:
            lengths = lengths.drawn(SUGGEST_SAMPLES, args.seed)
        return _suggest(lengths, config, cost, largest_image, args)
    result = simulate(lengths, config, cost, num_ranks=args.ranks, packs_per_step=args.global_batch)
    if args.json:
        print(json.dumps(report(result)))
    else:
        print("\n".join(_table(result, args)))
    return 0


def lengths_of(args: argparse.Namespace, config: PackingConfig) -> tuple[LengthTable, int | None]:
    """The lengths that `args.lengths` names, and the tiles of the largest image where that is known.

    Raises:
        UserError: they cannot be read, or data comes without a tokenizer.
    """
    name = args.lengths
    if name == "-":
        return read_lengths(sys.stdin, "standard input"), None
    if not _holds_lengths(name):
        return _surveyed(args, config)
    try:
        with open(name, encoding="utf-8", newline="") as file:
            return read_lengths(file, name), None
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from error


def _holds_lengths(name: str) -> bool:
    """A .csv file, a pipe, or a file whose first line names the column of tokens; anything else is data."""
    if name.lower().endswith(".csv"):
        return True
    if not os.path.isfile(name):
        return os.path.exists(name) and not os.path.isdir(name)
    with contextlib.suppress(OSError), open(name, "rb") as file:
        head = file.readline(1000)
        return b"num_tokens" in head and not head.startswith((b"{", b"["))
    return False


def _surveyed(args: argparse.Namespace, config: PackingConfig) -> tuple[LengthTable, int]:
    """Of samples, in the order in which an epoch trains them."""
    if args.tokenizer is None:
        raise UserError(
            f"{args.lengths} holds no lengths but data, whose texts are counted with a tokenizer: give --tokenizer PATH"
        )
    args.meta = args.lengths
    samples = open_samples(args).joined(config, root_of(None))
    samples.check_some(samples.num_rows)
    room = config.room
    if getattr(args, "suggest", False):  # budgets of the grid are smaller
        room = room._replace(max_tokens=min(TOKEN_BUDGETS), max_tiles=1)
    survey = Survey(samples, room, root_of(None))
    measure_with_bar(survey)
    encode = samples.encoder.config
    tiles = max(spec.max_dynamic_patch or encode.max_dynamic_patch for spec in samples.specs) + encode.use_thumbnail
    return surveyed_lengths(survey, samples.mixture(config, 0)), tiles if encode.dynamic_image_size else 1


def _table(epoch: PackingEstimate, args: argparse.Namespace) -> list[str]:
    r = report(epoch)
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(epoch.refused.items()))
    lines = [
        f"{count(epoch.budget[0], 'tokens')} and {count(epoch.budget[1], 'tiles')} a row, "
        f"policy {args.packing_policy}, look-ahead {args.max_buffer_size}",
        "",
        f"samples              {r['samples']:>12,}   {r['split']:,} of them split; dropped "
        f"{r['dropped']:,}{f' ({dropped})' if dropped else ''}",
        f"fragments            {r['fragments']:>12,}",
        f"packs                {r['packs']:>12,}   last ones included",
        f"lower bound          {r['lower_bound']:>12,}   no packer can do with fewer",
    ]
    if epoch.trees:
        saved = f"with {r['branches']:,} branches; sharing saves {r['saved_tokens']:,} tokens"
        lines.insert(-2, f"prefix trees         {r['trees']:>12,}   {saved}")
    lines += [f"  {name:<25}{bound:>8,}" for name, bound in epoch.bounds.items()]
    lines += [
        f"packs over bound     {r['packs_over_bound']:>12.4f}",
        f"tokens filled        {r['token_fill']:>12.2%}",
        f"tiles filled         {r['tile_fill']:>12.2%}",
        f"time a sample        {r['us_per_sample']:>12.1f}   microseconds of one core",
        f"wait                 {r['max_wait_samples']:>12,}   samples at most, {r['p99_wait_samples']:,} for 99 %",
        f"steps                {r['steps']:>12,}   of {count(epoch.packs_per_step, 'packs')} on "
        f"{count(epoch.num_ranks, 'ranks')}; {r['steps_not_full']:,} not full, {r['steps_empty']:,} empty",
        f"steps over bound     {r['steps_over_bound']:>12.4f}",
        f"rank efficiency      {r['rank_efficiency']:>12.3f}   mean over max cost of a step, {args.cost_model}",
        f"  whole epoch        {r['epoch_efficiency']:>12.3f}   its last step, which may not be full, included",
    ]
    return lines


def _suggest(
    lengths: LengthTable, config: PackingConfig, cost: CostModel, largest_image: int | None, args: argparse.Namespace
) -> int:
    found = suggest(
        lengths,
        config,
        cost,
        num_ranks=args.ranks,
        packs_per_step=args.global_batch,
        largest_image=largest_image,
    )
    chosen = found.chosen
    if args.json:
        result: dict[str, Any] = {
            "max_packed_tokens": chosen.max_tokens,
            "num_images_expected": chosen.max_tiles,
            "reason": found.reason,
            "trials": [
                {
                    "max_packed_tokens": trial.max_tokens,
                    "num_images_expected": trial.max_tiles,
                    "worth": trial.worth,
                    **trial.report,
                }
                for trial in found.trials
            ],
        }
        print(json.dumps(result))
        return 0
    print("tokens  tiles   packs  over bound  tokens full  tiles full   steps  over bound  ranks even  of use")
    for trial in found.trials:
        r = trial.report
        mark = "  <-" if trial is chosen else ""
        print(
            f"{trial.max_tokens:>6} {trial.max_tiles:>6} {r['packs']:>7,} {r['packs_over_bound']:>11.4f} "
            f"{r['token_fill']:>12.1%} {r['tile_fill']:>11.1%} {r['steps']:>7,} {r['steps_over_bound']:>11.4f} "
            f"{r['rank_efficiency']:>11.3f} {trial.worth:>7.1%}{mark}"
        )
    budgets = f"--max_packed_tokens {chosen.max_tokens} --num_images_expected {chosen.max_tiles}"
    said = f"No recommendation, though {budgets} wastes least here" if found.of_few_steps else f"Use {budgets}"
    print(f"\n{said} for {args.cost_model}:\n{found.reason}.")
    return 0
