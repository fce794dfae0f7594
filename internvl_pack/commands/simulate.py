"""`internvl-pack simulate LENGTHS`: what a budget would do to a stream of lengths, before any training."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from internvl_pack.commands._options import add_encoding, encode_config, load_tokenizer, option
from internvl_pack.errors import SampleError, UserError
from internvl_pack.packing.budget import Budget
from internvl_pack.packing.cost import SIZES, CostModel
from internvl_pack.packing.policies import POLICIES
from internvl_pack.packing.simulate import RESERVOIR, SAMPLE, Length, Simulation, read_lengths, simulate
from internvl_pack.packing.split import OVERSIZE

HELP = "Pack a stream of lengths and show how full, fair and even the packs are; --suggest chooses budgets."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "lengths",
        help="CSV file with the columns num_tokens,num_tiles (num_images helps where samples are cut), - for standard "
        "input, or a meta file (JSON), whose images are then read by their headers and texts by --tokenizer",
    )
    option(parser, "max_packed_tokens", int, 8192, "token budget of a row")
    option(parser, "num_images_expected", int, 40, "tile budget of a row")
    option(parser, "max_attention_cost", int, None, "sum of squared sample lengths of a row at most")
    option(parser, "pad_to_multiple_of", int, 1, "round each sample's share of the budget up to this many tokens")
    option(parser, "buffer_size", int, 64, "look-ahead, samples a lane")
    option(parser, "policy", str, "subset_sum", f"one of {', '.join(POLICIES)}")
    option(parser, "lanes", int, 1, "lanes that the stream is dealt to")
    option(parser, "ranks", int, 64, "ranks that step together, in the comparison of their packs")
    option(parser, "reservoir", int, RESERVOIR, "packs a rank holds back in the second comparison")
    option(parser, "model_size", str, "1B", f"{' | '.join(SIZES)}, or a model's config.json: what packs cost")
    option(parser, "oversize", str, "split", f"what exceeds a budget: {', '.join(OVERSIZE)}")
    option(parser, "seed", int, 0, "of the ranks' reshuffled streams")
    parser.add_argument("--suggest", action="store_true", help="try a grid of budgets and say which to use and why")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    meta = parser.add_argument_group("for a meta file")
    option(meta, "tokenizer", str, None, "the model's checkpoint or tokenizer")
    add_encoding(meta, cut=True)


def run(args: argparse.Namespace) -> int:
    cost = CostModel.from_name(args.model_size)
    budget = Budget(args.max_packed_tokens, args.num_images_expected, args.max_attention_cost, args.pad_to_multiple_of)
    options = {
        "policy": args.policy,
        "buffer_size": args.buffer_size,
        "num_ranks": args.ranks,
        "reservoir": args.reservoir,
        "cost": cost,
        "oversize": args.oversize,
        "seed": args.seed,
    }
    with ExitStack() as files:
        lengths = _lengths(args, files)
        if args.suggest:
            return _suggest(lengths, options, args)
        result = simulate(lengths, budget, num_lanes=args.lanes, **options)
    if args.json:
        print(json.dumps(result.report()))
    else:
        print("\n".join(_table(result, budget, args)))
    return 0


def _lengths(args: argparse.Namespace, files: ExitStack) -> Iterator[Length]:
    name = args.lengths
    if name == "-":
        return read_lengths(sys.stdin, "standard input")
    path = Path(name)
    if path.suffix.lower() == ".json":
        return _scan_meta(args)
    try:
        return read_lengths(files.enter_context(path.open(encoding="utf-8", newline="")), name)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from error


def _scan_meta(args: argparse.Namespace) -> Iterator[Length]:
    """Lengths of a meta file's samples in the order of its rows; bad samples are left out and told of at the end."""
    if args.tokenizer is None:
        raise UserError(f"{args.lengths} is a meta file: its texts are counted with a tokenizer, give --tokenizer PATH")
    from tqdm import tqdm

    from internvl_pack.encode.sample import Encoder
    from internvl_pack.sources import load_meta, open_source

    specs = load_meta(args.lengths)
    sources = [open_source(spec) for spec in specs]
    encoder = Encoder(load_tokenizer(args.tokenizer), encode_config(args))
    bad = 0
    with tqdm(total=sum(map(len, sources)), unit=" samples", desc="scanning", disable=None) as bar:
        for spec, source in zip(specs, sources, strict=True):
            for row in range(len(source)):
                bar.update()
                try:
                    record = encoder.load(source, row, spec).record
                except SampleError:
                    bad += 1
                    continue
                images = sum(span.num_tiles > 0 for span in record.spans)
                yield Length(record.num_tokens, record.num_tiles, images or None)
    if bad:
        print(f"{bad:,} samples cannot be used and are left out: see internvl-pack validate", file=sys.stderr)


def _table(result: Simulation, budget: Budget, args: argparse.Namespace) -> list[str]:
    report = result.report()
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in result.dropped.items())
    lines = [
        f"{budget.max_tokens:,} tokens and {budget.max_tiles} tiles a row, policy {args.policy}, look-ahead "
        f"{args.buffer_size}, {args.lanes} lane{'s' * (args.lanes > 1)}",
        "",
        f"samples              {report['samples']:>12,}   {report['split']:,} of them split; dropped "
        f"{report['dropped']:,}{f' ({dropped})' if dropped else ''}",
        f"fragments            {report['fragments']:>12,}",
        f"packs                {report['packs']:>12,}   last ones included",
        f"lower bound          {report['lower_bound']:>12,}   no packer can do with fewer",
    ]
    lines += [f"  {name:<25}{bound:>8,}" for name, bound in result.lower_bounds.items()]
    lines += [
        f"packs over bound     {report['packs_over_bound']:>12.4f}",
        f"tokens filled        {report['token_fill']:>12.2%}",
        f"tiles filled         {report['tile_fill']:>12.2%}",
        f"time a sample        {report['us_per_sample']:>12.1f}   microseconds of one core",
        f"wait                 {report['max_wait_samples']:>12,}   samples at most, "
        f"{report['p99_wait_samples']:,} for 99 %",
        f"rank efficiency      {report['rank_efficiency']:>12.3f}   mean over max cost of a step, {args.ranks} ranks, "
        f"{args.model_size}",
        f"  with a reservoir   {report['rank_efficiency_reservoir']:>12.3f}   of {args.reservoir} packs a rank",
    ]
    return lines


def _suggest(lengths: Iterable[Length], options: dict[str, Any], args: argparse.Namespace) -> int:
    from internvl_pack.packing.suggest import suggest

    # The grid is tried on the stream's beginning: choosing needs no more, and it must be read several times.
    found = suggest(list(islice(lengths, SAMPLE)), **options)
    chosen = found.chosen
    if args.json:
        print(
            json.dumps(
                {
                    "max_packed_tokens": chosen.budget.max_tokens,
                    "num_images_expected": chosen.budget.max_tiles,
                    "reason": found.reason,
                    "trials": [
                        {
                            "max_packed_tokens": trial.budget.max_tokens,
                            "num_images_expected": trial.budget.max_tiles,
                            "worth": trial.worth,
                            **trial.simulation.report(),
                        }
                        for trial in found.trials
                    ],
                }
            )
        )
        return 0
    print("tokens  tiles   packs  over bound  tokens full  tiles full  ranks even  with reservoir  of use")
    for trial in found.trials:
        r = trial.simulation.report()
        mark = "  <-" if trial is chosen else ""
        print(
            f"{trial.budget.max_tokens:>6} {trial.budget.max_tiles:>6} {r['packs']:>7,} {r['packs_over_bound']:>11.4f} "
            f"{r['token_fill']:>12.1%} {r['tile_fill']:>11.1%} {r['rank_efficiency']:>11.3f} "
            f"{r['rank_efficiency_reservoir']:>15.3f} {trial.worth:>7.1%}{mark}"
        )
    print(
        f"\nUse --max_packed_tokens {chosen.budget.max_tokens} --num_images_expected {chosen.budget.max_tiles} "
        f"for {args.model_size}:\n{found.reason}."
    )
    return 0
