"""Options of a training run that `stats` and `preview` look at: finetune.py's names and defaults."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..config import PackingConfig, auto_lanes
from ..errors import UserError
from ..packing.policies import POLICIES
from ..packing.split import OVERSIZE
from ..sources import DatasetSpec, Source, load_meta, open_source
from ._options import add_encoding, boolean, encode_config, load_tokenizer, option, stand_in_tokenizer

STAND_IN = "a small one built from the data stands in: token counts differ from the model's"


def add_run_options(parser: argparse.ArgumentParser) -> None:
    defaults = PackingConfig()
    data = parser.add_argument_group("how samples become tokens and tiles: as given to finetune.py")
    data.add_argument("--tokenizer", metavar="PATH", help=f"the model's checkpoint or tokenizer (default: {STAND_IN})")
    add_encoding(data, conv_style=None)
    rows = parser.add_argument_group("how samples share rows")
    option(rows, "max_packed_tokens", int, defaults.max_packed_tokens, "token budget of a row")
    option(rows, "num_images_expected", int, defaults.num_images_expected, "tile budget of a row")
    option(rows, "max_seq_length", int, None, "tokens of one sample at most")
    option(rows, "max_buffer_size", int, defaults.max_buffer_size, "look-ahead, samples a lane")
    option(rows, "packing_policy", str, defaults.packing_policy, f"one of {', '.join(POLICIES)}")
    option(rows, "oversize", str, defaults.oversize, f"what exceeds a budget: {', '.join(OVERSIZE)}")
    option(rows, "repeat_system_prompt", boolean, False, "begin later parts of a split sample with its system turn")
    option(rows, "max_attention_cost", int, None, "sum of squared sample lengths of a row at most")
    option(rows, "pad_to_multiple_of", int, 1, "round each sample's share of the budget up to this many tokens")
    option(rows, "pad_seq_to_mult", int, 1, "pad each sample of a row to a multiple of this many tokens")
    option(rows, "balance_reservoir", int, 0, "packs a lane holds back to even out the ranks' work")
    option(rows, "cost_model", str, defaults.cost_model, "whose operations packs are balanced by")
    option(rows, "seed", int, defaults.seed, "of the order")
    option(rows, "replacement", boolean, False, "draw samples with replacement")
    option(rows, "use_data_resampling", boolean, False, "weigh datasets by the square root of their length")
    option(rows, "shuffle_buffer_size", int, None, "samples shuffled together, shard after shard (default: all)")
    option(rows, "num_lanes", int, None, "logical streams (default: from the size of the data)")
    where = parser.add_argument_group("where it is trained")
    option(where, "ranks", int, 1, "data-parallel processes")
    option(where, "per_device_train_batch_size", int, 1, "packs flattened into one row")
    option(where, "dataloader_num_workers", int, 0, "reader processes a rank, which lanes are a multiple of")


def check_at_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Raises UserError naming the option that is below `least`."""
    for name in names:
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)}: give at least {least}")


def packing_config(args: argparse.Namespace) -> PackingConfig:
    """Raises UserError for options that make no sense."""
    if args.packing_policy not in POLICIES:
        raise UserError(f"--packing_policy {args.packing_policy} is unknown: use one of {', '.join(POLICIES)}")
    check_at_least(args, 1, "ranks", "per_device_train_batch_size", "pad_seq_to_mult")
    check_at_least(args, 0, "dataloader_num_workers")
    names = PackingConfig.__dataclass_fields__
    options = {name: value for name, value in vars(args).items() if name in names}
    options["pad_to_multiple_of"] = (
        math.lcm(args.pad_to_multiple_of, args.pad_seq_to_mult)
        if args.pad_to_multiple_of > 0
        else args.pad_to_multiple_of
    )
    return PackingConfig(**options)


def lanes_of(args: argparse.Namespace, num_positions: int) -> int:
    """Lanes of the run, as finetune.py takes them.

    Raises:
        UserError: ranks x workers x packs a batch do not divide them.
    """
    from ..lanes import Topology

    packs, workers = args.per_device_train_batch_size, args.dataloader_num_workers
    lanes = args.num_lanes or auto_lanes(num_positions, args.ranks, workers, packs)
    Topology(num_lanes=lanes, num_ranks=args.ranks, num_workers=workers, packs_per_batch=packs)
    return lanes


def open_data(args: argparse.Namespace) -> tuple[tuple[DatasetSpec, ...], list[Source], Any, Any]:
    """(specs, sources, encoder, tokenizer) of the run.

    Raises:
        UserError: data, tokenizer or options that cannot be used.
    """
    from ..encode.sample import Encoder

    style = None
    if args.tokenizer:
        from ..checkpoints.internvl_format_files import chat_style

        style = chat_style(args.conv_style, args.tokenizer)
    encode = encode_config(args, style)
    specs = load_meta(args.meta)
    sources = [open_source(spec) for spec in specs]
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else stand_in_tokenizer(sources)
    return specs, sources, Encoder(tokenizer, encode), tokenizer


def shown_options(args: argparse.Namespace, *names: str) -> list[tuple[str, str]]:
    """Options and their values, for a report."""
    return [(f"--{name}", str(value)) for name in names if (value := getattr(args, name)) is not None]
