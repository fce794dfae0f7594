"""`internvl-pack estimate MODEL LENGTHS`: memory of a GPU by part and time of an epoch, before a run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

import numpy as np

from ..checkpoints.encoding import default_tiles
from ..config import PackingConfig
from ..errors import UserError
from ..model.flops import peak_flops
from ..model.memory import Sizes, memory
from ..options import add_options, count, from_config, make, option
from ..packing.cost import SIZES, CostModel, model_config
from ._options import add_encoding, packing_config
from .simulate import lengths_of

HELP = "Estimate memory of a GPU by part and the time of an epoch from a model's config and lengths."


@dataclass(kw_only=True)
class EstimateOptions:
    """What is estimated."""

    gpus: int = option(1, "Processes that train.", unit="GPUs", at_least=1)
    zero: int = option(1, "Stage of ZeRO; 0: without.", at_least=0, at_most=3)
    grad_checkpoint: bool = option(False, "Every layer computes its activations again in the backward pass.")
    compile: bool = option(False, "Layers are compiled, as by training's --compile.")
    num_images_expected: int | None = from_config(PackingConfig, "num_images_expected", at_least=1)
    card: str = option("H200", "Name of the GPU.")
    mfu: float = option(0.35, "Share of the GPU's peak that whole steps reach; docs/measurements.md has some.")
    measure: bool = option(
        False, "Measure forward and backward on the device at hand instead of --card and --mfu; takes up to a minute."
    )


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"{' | '.join(SIZES)}, a config.json, or the folder that holds one")
    parser.add_argument(
        "lengths",
        help="data (a meta file or a path of data), or a CSV file with the columns num_tokens,num_tiles, a row a "
        "sample of an epoch; - for standard input",
    )
    add_options(parser, EstimateOptions)
    add_options(parser, PackingConfig, "max_packed_tokens")
    add_encoding(parser, "Needed for data.")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    make(EstimateOptions, vars(args))
    if not 0.0 < args.mfu <= 1.0:
        raise UserError(f"--mfu {args.mfu}: give a share of the card's peak, above 0 and at most 1")
    peak = peak_flops(args.card)
    if peak is None:
        raise UserError(
            f"--card {args.card}: its peak is not known; give H100, H200, B200 or another of model/flops.py"
        )
    cost = CostModel.from_name(args.model)
    if args.num_images_expected is None:
        args.num_images_expected = default_tiles(model_config(args.model), args.max_packed_tokens)
    config = packing_config(args)
    lengths = lengths_of(args, config)[0]
    each_tokens, each_tiles = lengths.sizes()
    tokens, tiles = int(each_tokens.sum()), int(each_tiles.sum())
    sizes_of_each = (each_tokens, each_tiles, 0, lengths.tile_pairs())
    operations = float(cost.of(*(np.asarray(sizes, np.float64) for sizes in sizes_of_each)).sum())
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
    rate = None
    if args.measure:
        from ..model.rate import measure_rate  # imports PyTorch

        shuffled = np.random.default_rng(0).permutation(len(each_tokens))[: args.max_packed_tokens]
        samples = list(zip(each_tokens[shuffled].tolist(), each_tiles[shuffled].tolist(), strict=True))
        budget = (args.max_packed_tokens, args.num_images_expected)
        how = {"checkpointed": args.grad_checkpoint, "compiled": args.compile}
        rate = measure_rate(model_config(args.model), samples, budget, **how)
    seconds = operations / (args.gpus * (rate.operations_per_second if rate else peak * args.mfu))
    if args.json:
        figures = {"parameters": sizes.parameters, "memory": asdict(found) | {"peak": found.peak}}
        figures["measured"] = asdict(rate) if rate else None
        print(json.dumps(figures | {"packs": packs, "tokens": tokens, "tiles": tiles, "seconds": seconds}))
        return 0
    print(f"{sizes.parameters / 1e9:.2f} G parameters, all of them trained; {count(args.gpus, 'GPUs')}, GB of each:")
    for name, size in asdict(found).items():
        print(f"  {name:<12}{size / 1e9:8.1f}{'  instead of activations' if name == 'step' else ''}")
    print(f"  {'peak':<12}{found.peak / 1e9:8.1f}")
    if rate:
        print(
            f"measured on {rate.device}: {rate.seconds:.3g} s forward and backward of a row of {rate.tokens:,} tokens "
            f"and {count(rate.tiles, 'tiles')}, layers {'' if rate.compiled else 'not '}compiled; "
            "the optimizer and what GPUs exchange come on top"
        )
    how_fast = f"on {args.gpus} x {rate.device}" if rate else f"at {args.mfu:.0%} of {args.gpus} x {args.card}"
    size = f"{count(packs, 'packs')} at least, {count(tokens, 'tokens')}, {count(tiles, 'tiles')}"
    print(f"an epoch: {size}; {seconds / 3600:.2f} h {how_fast}")
    return 0
