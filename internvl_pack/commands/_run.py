"""Options of a training run that `stats` and `preview` look at: finetune.py's names and defaults."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ..config import NOT_NEEDED, PackingConfig
from ..errors import UserError
from ..packing.policies import POLICIES
from ..packing.split import OVERSIZE
from ..survey.table import root_of
from ._options import add_encoding, boolean, option

STAND_IN = "a small one built from the data stands in: token counts differ from the model's"


def add_run_options(parser: argparse.ArgumentParser) -> None:
    defaults = PackingConfig()
    data = parser.add_argument_group("how samples become tokens and tiles: as given to finetune.py")
    data.add_argument("--tokenizer", metavar="PATH", help=f"the model's checkpoint or tokenizer (default: {STAND_IN})")
    add_encoding(data)
    rows = parser.add_argument_group("how samples share rows")
    option(rows, "max_packed_tokens", int, defaults.max_packed_tokens, "token budget of a row")
    option(rows, "num_images_expected", int, defaults.num_images_expected, "tile budget of a row")
    option(rows, "max_seq_length", int, None, "tokens of one sample at most")
    option(rows, "max_buffer_size", int, defaults.max_buffer_size, "look-ahead, samples")
    option(rows, "packing_policy", str, defaults.packing_policy, f"one of {', '.join(POLICIES)}")
    option(rows, "oversize", str, defaults.oversize, f"what exceeds a budget: {', '.join(OVERSIZE)}")
    option(rows, "repeat_system_prompt", boolean, False, "begin later parts of a split sample with its system turn")
    option(rows, "max_attention_cost", int, None, "sum of squared sample lengths of a row at most")
    option(rows, "pad_to_multiple_of", int, 1, "round each sample's share of the budget up to this many tokens")
    option(rows, "pad_seq_to_mult", int, 1, "pad each sample of a row to a multiple of this many tokens")
    option(rows, "cost_model", str, defaults.cost_model, "whose operations packs are balanced by")
    option(rows, "seed", int, defaults.seed, "of the order")
    option(rows, "replacement", boolean, False, "draw samples with replacement")
    option(rows, "use_data_resampling", boolean, False, "weigh datasets by the square root of their length")
    option(rows, "shuffle_buffer_size", int, None, "samples shuffled together, shard after shard (default: all)")
    option(rows, "survey_dir", str, None, "folder of the lengths (default: INTERNVL_PACK_CACHE, or the user's cache)")
    for name in NOT_NEEDED:
        option(rows, name, int, None, "not needed any more")
    where = parser.add_argument_group("where it is trained")
    option(where, "ranks", int, 1, "data-parallel processes")
    option(where, "per_device_train_batch_size", int, 1, "packs flattened into one row")
    option(where, "gradient_accumulation_steps", int, 1, "rows of a rank that share an optimizer step")
    option(where, "dataloader_num_workers", int, 0, "reader processes a rank: packs are the same with any number")


def check_at_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Check the options that have a lower bound.

    Raises:
        UserError: one is below `least`; names it.
    """
    for name in names:
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)}: give at least {least}")


def packing_config(args: argparse.Namespace) -> PackingConfig:
    """The packing options of a command.

    Raises:
        UserError: an option has a value that it cannot have; names it.
    """
    if args.packing_policy not in POLICIES:
        raise UserError(f"--packing_policy {args.packing_policy} is unknown: use one of {', '.join(POLICIES)}")
    check_at_least(args, 1, "ranks", "per_device_train_batch_size", "gradient_accumulation_steps", "pad_seq_to_mult")
    check_at_least(args, 0, "dataloader_num_workers")
    names = PackingConfig.__dataclass_fields__
    options = {name: value for name, value in vars(args).items() if name in names}
    options["pad_to_multiple_of"] = (
        math.lcm(args.pad_to_multiple_of, args.pad_seq_to_mult)
        if args.pad_to_multiple_of > 0
        else args.pad_to_multiple_of
    )
    return PackingConfig(**options)


def packs_per_step(args: argparse.Namespace) -> int:
    """Of the run, over all ranks."""
    return args.ranks * args.per_device_train_batch_size * args.gradient_accumulation_steps


def survey_root(args: argparse.Namespace) -> Path | None:
    """Where lengths are kept; nowhere for a tokenizer that stands in: no run would find them."""
    return root_of(args.survey_dir) if args.tokenizer else None


def shown_options(args: argparse.Namespace, *names: str) -> list[tuple[str, str]]:
    """Options and their values, for a report."""
    return [(f"--{name}", str(value)) for name in names if (value := getattr(args, name)) is not None]
