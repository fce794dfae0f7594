"""`internvl-pack estimate MODEL LENGTHS`: memory of a GPU by part and time of an epoch, before a run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import numpy as np

from ..config import PackingConfig
from ..errors import UserError
from ..model.flops import peak_flops
from ..model.memory import Sizes, memory
from ..packing.cost import SIZES, CostModel, model_config
from ._options import add_encoding, flag, option
from .simulate import lengths_of

HELP = "Estimate memory of a GPU by part and the time of an epoch from a model's config and lengths."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"{' | '.join(SIZES)}, a config.json, or the folder that holds one")
    parser.add_argument(
        "lengths",
        help="a meta file, or a CSV file with the columns num_tokens,num_tiles, a row a sample of an epoch; - for "
        "standard input",
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="of a meta file: the model's checkpoint or tokenizer")
    add_encoding(parser.add_argument_group("of a meta file: how samples become tokens and tiles"))
    option(parser, "gpus", int, 1, "processes that train")
    option(parser, "zero", int, 1, "stage of ZeRO; 0: without")
    option(parser, "max_packed_tokens", int, 8192, "token budget of a row")
    option(parser, "num_images_expected", int, 40, "tile budget of a row")
    flag(parser, "grad_checkpoint", "every layer computes its activations again")
    flag(parser, "compile", "with --compile")
    option(parser, "card", str, "H200", "name of the card")
    option(parser, "mfu", float, 0.35, "share of the card's peak that whole steps reach; docs/measurements.md has some")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    for name, least in (("gpus", 1), ("max_packed_tokens", 1), ("num_images_expected", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)}: give at least {least}")
    if args.zero not in (0, 1, 2, 3):
        raise UserError(f"--zero {args.zero}: give a stage of ZeRO, 1 to 3, or 0 for none")
    if not 0.0 < args.mfu <= 1.0:
        raise UserError(f"--mfu {args.mfu}: give a share of the card's peak, above 0 and at most 1")
    peak = peak_flops(args.card)
    if peak is None:
        raise UserError(
            f"--card {args.card}: its peak is not known; give H100, H200, B200 or another of model/flops.py"
        )
    cost = CostModel.from_name(args.model)
    config = PackingConfig(max_packed_tokens=args.max_packed_tokens, num_images_expected=args.num_images_expected)
    each_tokens, each_tiles = lengths_of(args, config)[0].sizes()
    tokens, tiles = int(each_tokens.sum()), int(each_tiles.sum())
    operations = float(cost.of(each_tokens.astype(np.float64), each_tiles.astype(np.float64)).sum())
    packs = max(-(-tokens // args.max_packed_tokens), -(-tiles // args.num_images_expected))
    sizes = Sizes.of(model_config(args.model))
    found = memory(
        sizes,
        gpus=args.gpus,
        zero=args.zero,
        tokens=args.max_packed_tokens,
        tiles=args.num_images_expected,
        checkpointed=args.grad_checkpoint,
        compiled=args.compile,
    )
    seconds = operations / (args.gpus * peak * args.mfu)
    if args.json:
        figures = {"parameters": sizes.parameters, "memory": asdict(found) | {"peak": found.peak}}
        print(json.dumps(figures | {"packs": packs, "tokens": tokens, "tiles": tiles, "seconds": seconds}))
        return 0
    print(f"{sizes.parameters / 1e9:.2f} G parameters, all of them trained; of each of {args.gpus} GPUs, GB:")
    for name, size in asdict(found).items():
        print(f"  {name:<12}{size / 1e9:8.1f}{'  instead of activations' if name == 'step' else ''}")
    print(f"  {'peak':<12}{found.peak / 1e9:8.1f}")
    print(
        f"an epoch: {packs:,} packs at least, {tokens:,} tokens, {tiles:,} tiles; "
        f"{seconds / 3600:.2f} h at {args.mfu:.0%} of {args.gpus} x {args.card}"
    )
    return 0
