"""Options of a training run that `stats` and `preview` look at: finetune.py's names and defaults."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from typing import Any

from ..config import PackingConfig, auto_lanes
from ..errors import UserError
from ..packing.policies import POLICIES
from ..packing.split import OVERSIZE
from ..sources import DatasetSpec, Source, load_meta, open_source
from .plan import _load_tokenizer
from .validate import _boolean, _option, _texts

STAND_IN = "a small one built from the data stands in: token counts differ from the model's"


def add_run_options(parser: argparse.ArgumentParser) -> None:
    defaults = PackingConfig()
    data = parser.add_argument_group("how samples become tokens and tiles: as given to finetune.py")
    data.add_argument("--tokenizer", metavar="PATH", help=f"the model's checkpoint or tokenizer (default: {STAND_IN})")
    _option(data, "conv_style", str, None, "chat format (default: the checkpoint's `template`, else internvl2_5)")
    _option(data, "force_image_size", int, 448, "side of a tile, pixels")
    _option(data, "down_sample_ratio", float, 0.5, "of patches to tokens, a side")
    _option(data, "min_dynamic_patch", int, 1, "tiles of an image at least, without the thumbnail")
    _option(data, "max_dynamic_patch", int, 12, "tiles of an image at most, without the thumbnail")
    _option(data, "dynamic_image_size", _boolean, False, "cut images into several tiles")
    _option(data, "use_thumbnail", _boolean, False, "add the whole image as one more tile")
    _option(data, "min_num_frame", int, 8, "frames of a video at least")
    _option(data, "max_num_frame", int, 32, "frames of a video at most")
    _option(data, "max_image_pixels", int, None, "width x height above which an image is refused")
    _option(data, "allow_truncated_images", _boolean, False, "accept images that are cut off or damaged")
    _option(data, "apply_exif_orientation", _boolean, True, "turn photographs upright")
    rows = parser.add_argument_group("how samples share rows")
    _option(rows, "max_packed_tokens", int, defaults.max_packed_tokens, "token budget of a row")
    _option(rows, "num_images_expected", int, defaults.num_images_expected, "tile budget of a row")
    _option(rows, "max_seq_length", int, None, "tokens of one sample at most")
    _option(rows, "max_buffer_size", int, defaults.max_buffer_size, "look-ahead, samples a lane")
    _option(rows, "packing_policy", str, defaults.packing_policy, f"one of {', '.join(POLICIES)}")
    _option(rows, "oversize", str, defaults.oversize, f"what exceeds a budget: {', '.join(OVERSIZE)}")
    _option(rows, "repeat_system_prompt", _boolean, False, "begin later parts of a split sample with its system turn")
    _option(rows, "max_attention_cost", int, None, "sum of squared sample lengths of a row at most")
    _option(rows, "pad_to_multiple_of", int, 1, "round each sample's share of the budget up to this many tokens")
    _option(rows, "pad_seq_to_mult", int, 1, "pad each sample of a row to a multiple of this many tokens")
    _option(rows, "balance_reservoir", int, 0, "packs a lane holds back to even out the ranks' work")
    _option(rows, "cost_model", str, defaults.cost_model, "whose operations packs are balanced by")
    _option(rows, "seed", int, defaults.seed, "of the order")
    _option(rows, "replacement", _boolean, False, "draw samples with replacement")
    _option(rows, "use_data_resampling", _boolean, False, "weigh datasets by the square root of their length")
    _option(rows, "shuffle_buffer_size", int, None, "samples shuffled together, shard after shard (default: all)")
    _option(rows, "num_lanes", int, None, "logical streams (default: from the size of the data)")
    where = parser.add_argument_group("where it is trained")
    _option(where, "ranks", int, 1, "data-parallel processes")
    _option(where, "per_device_train_batch_size", int, 1, "packs flattened into one row")
    _option(where, "dataloader_num_workers", int, 0, "reader processes a rank, which lanes are a multiple of")


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
    if args.num_lanes is not None:
        check_at_least(args, 1, "num_lanes")
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
    from ..encode.sample import EncodeConfig, Encoder
    from ..encode.tiles import tokens_per_tile

    limit = args.max_image_pixels
    encode = EncodeConfig(
        conv_style=args.conv_style or _style_of(args.tokenizer),
        image_size=args.force_image_size,
        tokens_per_tile=tokens_per_tile(args.force_image_size, down_sample_ratio=args.down_sample_ratio),
        min_dynamic_patch=args.min_dynamic_patch,
        max_dynamic_patch=args.max_dynamic_patch,
        dynamic_image_size=args.dynamic_image_size,
        use_thumbnail=args.use_thumbnail,
        min_num_frame=args.min_num_frame,
        max_num_frame=args.max_num_frame,
        max_image_pixels=EncodeConfig.max_image_pixels if limit is None else limit,
        allow_truncated_images=args.allow_truncated_images,
        apply_exif_orientation=args.apply_exif_orientation,
    )
    specs = load_meta(args.meta)
    sources = [open_source(spec) for spec in specs]
    tokenizer = _load_tokenizer(args.tokenizer) if args.tokenizer else _stand_in(sources)
    return specs, sources, Encoder(tokenizer, encode), tokenizer


def _stand_in(sources: Sequence[Source]) -> Any:
    from ..tiny import tiny_tokenizer

    return tiny_tokenizer(_texts(sources), vocab_size=1024)


def _style_of(checkpoint: str | None) -> str:
    """The chat format that a checkpoint in InternVL's own format names, else the default."""
    if checkpoint is not None and os.path.isfile(os.path.join(checkpoint, "config.json")):
        from transformers import PreTrainedConfig

        from ..encode.chat import known_templates
        from ..model.original import template_of

        template = template_of(PreTrainedConfig.get_config_dict(checkpoint)[0])
        if template is not None:
            if template not in known_templates():
                raise UserError(
                    f"--conv_style is missing: the checkpoint was trained with {template!r}, which is not known "
                    f"here: choose one of {', '.join(known_templates())}"
                )
            return template
    return "internvl2_5"


def shown_options(args: argparse.Namespace, *names: str) -> list[tuple[str, str]]:
    """Options and their values, for a report."""
    return [(f"--{name}", str(value)) for name in names if (value := getattr(args, name)) is not None]
