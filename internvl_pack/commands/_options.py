"""Options that several commands share, filled from training's declarations, and what is made of their values."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import NOT_NEEDED, PackingConfig, RowOptions
from ..encode.config import EncodeConfig
from ..encode.tiles import TileOptions
from ..errors import naming
from ..options import add_argument, add_options, make, option
from ..packing.cost import model_config
from ..sources import Source
from ..survey.table import root_of

if TYPE_CHECKING:
    from ..samples import Samples
    from ..survey.survey import Survey

BUDGETS = ("max_packed_tokens", "num_images_expected", "max_seq_length")
META_HELP = "meta file (JSON) of the datasets, or a path of data itself: JSON lines, Parquet, tar shards, a folder"
STAND_IN = "a small one built from the data stands in: token counts differ from the model's"


@dataclass(kw_only=True)
class StepOptions:
    """Where a run is trained: what its optimizer steps consist of."""

    ranks: int = option(1, "Data-parallel processes.", unit="ranks", at_least=1)
    per_device_train_batch_size: int = option(1, "Packs flattened into one row.", unit="packs", at_least=1)
    gradient_accumulation_steps: int = option(
        1, "Rows of a rank that share an optimizer step.", unit="rows", at_least=1
    )
    dataloader_num_workers: int = option(
        0, "Reader processes of each rank; packs are the same with any number.", unit="processes", at_least=0
    )

    @property
    def packs(self) -> int:
        """Of an optimizer step, over all ranks."""
        return self.ranks * self.per_device_train_batch_size * self.gradient_accumulation_steps


@dataclass(kw_only=True)
class WorkerOptions:
    """Who reads the data of a command."""

    workers: int | None = option(
        None, "Processes. Default: one a CPU core, 8 at most; 0: in this process.", unit="processes", at_least=0
    )


def num_workers(args: argparse.Namespace, *, small: bool = False) -> int:
    """Processes to use, none by default where the work is `small`: starting them takes longer.

    Raises:
        UserError: fewer than none.
    """
    workers = make(WorkerOptions, vars(args)).workers
    if workers is None:
        return 0 if small else min(8, os.cpu_count() or 1)
    return workers


def add_encoding(parser: argparse.ArgumentParser, tokenizer: str = "", *, required: bool = False) -> None:
    """How samples become tokens and tiles.

    Args:
        tokenizer: what to add to the help of that option, such as what its default is.
    """
    group = parser.add_argument_group("how samples become tokens and tiles: as given to training")
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        required=required,
        help="The model's checkpoint, whose chat format and tile sizes are the defaults, or a tokenizer. " + tokenizer,
    )
    add_options(group, EncodeConfig)
    add_options(group, TileOptions)


def add_run_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """All that decides on the packs of a training run; returns the group of its rows."""
    add_encoding(parser, f"Default: {STAND_IN}.")
    rows = parser.add_argument_group("how samples share rows: as given to training")
    names = PackingConfig.__dataclass_fields__.keys() - {"on_error", "max_bad_fraction"}
    add_options(rows, PackingConfig, *names)
    add_not_needed(rows)
    add_options(parser.add_argument_group("where it is trained"), StepOptions)
    return rows


def add_not_needed(parser: Any) -> None:
    """Options of earlier releases, which are accepted."""
    for name in NOT_NEEDED:
        add_argument(parser, name, type=int, help=argparse.SUPPRESS)


def packing_config(args: argparse.Namespace, **changes: Any) -> PackingConfig:
    """The packing options of a command; what was left open of tiles and costs is written into `args`.

    Raises:
        UserError: an option has a value that is not allowed; names it.
    """
    if args.num_images_expected is None:
        args.num_images_expected = _tiles(args)
    if getattr(args, "cost_model", None) == PackingConfig.cost_model and (folder := _native_folder(args)):
        args.cost_model = folder  # whose pictures cost otherwise than InternVL's tiles
    given = {name: getattr(args, name) for name in NOT_NEEDED if hasattr(args, name)} | changes
    if hasattr(args, "pad_seq_to_mult"):
        padded = make(RowOptions, vars(args)).pad_seq_to_mult
        given["pad_to_multiple_of"] = math.lcm(args.pad_to_multiple_of, padded)
    return make(PackingConfig, vars(args), **given)


def _tiles(args: argparse.Namespace) -> int:
    from ..checkpoints.encoding import default_tiles, served_by
    from ..checkpoints.internvl_format_files import config_of

    with naming("--tokenizer "):
        checkpoint = config_of(getattr(args, "tokenizer", None))
    return default_tiles(served_by(checkpoint, getattr(args, "family_check", None)), args.max_packed_tokens)


def _native_folder(args: argparse.Namespace) -> str | None:
    """The checkpoint of `--tokenizer` where it is a local one of native resolution."""
    from ..encode.families import family_of

    folder = getattr(args, "tokenizer", None)
    if not folder or not Path(folder, "config.json").is_file():
        return None
    kind = getattr(args, "family_check", None) or model_config(folder).get("model_type")
    return folder if family_of(kind).grid_positions else None


def survey_root(args: argparse.Namespace) -> Path | None:
    """Where lengths are kept; nowhere for a tokenizer that stands in: no run would find them."""
    return root_of(args.survey_dir) if args.tokenizer else None


def shown_options(args: argparse.Namespace, *names: str) -> list[tuple[str, str]]:
    """Options and their values, for a report."""
    return [(f"--{name}", str(value)) for name in names if (value := getattr(args, name)) is not None]


def encode_config(args: argparse.Namespace) -> EncodeConfig:
    """Of `add_encoding`'s options; what they leave open is the checkpoint's, as in training.

    Raises:
        UserError: options that cannot be used, or a chat format of the checkpoint that is not known here.
    """
    from ..checkpoints import encoding
    from ..checkpoints.internvl_format_files import config_of

    with naming("--tokenizer "):
        checkpoint = config_of(args.tokenizer)
    return encoding.in_its_chat_format(vars(args), checkpoint)


def open_samples(args: argparse.Namespace) -> Samples:
    """The data of `args.meta`, encoded with `args.tokenizer` or a stand-in and `add_encoding`'s options."""
    return open_with_tokenizer(args)[0]


def open_with_tokenizer(args: argparse.Namespace) -> tuple[Samples, Any]:
    """As `open_samples`, with the tokenizer.

    Raises:
        UserError: data, tokenizer or options that cannot be used.
    """
    from ..encode.sample import Encoder
    from ..samples import Samples
    from ..sources import load_meta, open_source

    encode = encode_config(args)
    specs = load_meta(args.meta)
    sources = tuple(open_source(spec) for spec in specs)
    tokenizer = load_tokenizer(args.tokenizer, args.family_check) if args.tokenizer else stand_in_tokenizer(sources)
    return Samples(sources, tuple(specs), Encoder(tokenizer, encode)), tokenizer


def measure_with_bar(survey: Survey, processes: int = 0) -> None:
    """Measure all samples that the survey does not know.

    Raises:
        UserError: reading cannot continue, or a worker was killed.
    """
    from tqdm import tqdm

    from ..survey.workers import measure_all

    with tqdm(total=survey.samples.num_rows, unit=" samples", desc="surveying", disable=None, delay=2) as bar:
        for done in measure_all(survey, processes):
            bar.update(done)


def load_tokenizer(path: str, family: str | None = None) -> Any:
    """As finetune.py loads it: that of a bare language model gets the tokens for images.

    Args:
        family: of `--family_check`.

    Raises:
        UserError: there is none.
    """
    from ..checkpoints import tokenizers
    from ..checkpoints.internvl_format_files import config_of
    from ..encode.families import is_family

    with naming("--tokenizer "):
        tokenizer = tokenizers.load_tokenizer(path)
        whole = family is not None or is_family(config_of(path).get("model_type"))
    if not whole:
        tokenizers.add_image_tokens(tokenizer)
    return tokenizer


def stand_in_tokenizer(sources: Sequence[Source]) -> Any:
    """A small one built from the data: counts differ from the model's."""
    from ..testing.tiny import source_texts, tiny_tokenizer

    return tiny_tokenizer(source_texts(sources), vocab_size=1024)
