"""Options that several commands have: finetune.py's names and defaults, and what is made of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..sources import Source

if TYPE_CHECKING:
    from ..samples import Samples
    from ..survey.survey import Survey


def option(group: Any, name: str, kind: Any, default: Any, text: str) -> None:
    """An option by finetune's name, written with `_` or `-`."""
    shown = f" (default: {default})" if default is not None else ""
    group.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=kind, default=default, help=text + shown)


def flag(group: Any, name: str, text: str) -> None:
    """One that is False, and True where it is given without a value."""
    group.add_argument(
        f"--{name}", f"--{name.replace('_', '-')}", type=boolean, nargs="?", const=True, default=False, help=text
    )


def boolean(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"give True or False, not {text!r}")
    return values[text.lower()]


def add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=int, default=None, help="processes (default: one a CPU core, 8 at most; 0: in this process)"
    )


def num_workers(args: argparse.Namespace, *, small: bool = False) -> int:
    """Processes to use, none by default where the work is `small`: starting them takes longer.

    Raises:
        UserError: fewer than none.
    """
    if args.workers is None:
        return 0 if small else min(8, os.cpu_count() or 1)
    if args.workers < 0:
        raise UserError(f"--workers must be at least 0, not {args.workers}")
    return args.workers


def add_encoding(group: Any) -> None:
    """How samples become tokens and tiles; the defaults are those of training."""
    option(group, "conv_style", str, None, "chat format (default: the checkpoint's `template`, else internvl2_5)")
    option(group, "force_image_size", int, 448, "side of a tile, pixels")
    option(group, "down_sample_ratio", float, 0.5, "of patches to tokens, a side")
    option(group, "min_dynamic_patch", int, 1, "tiles of an image at least, without the thumbnail")
    option(group, "max_dynamic_patch", int, 12, "tiles of an image at most, without the thumbnail")
    option(group, "dynamic_image_size", boolean, False, "cut images into several tiles")
    option(group, "use_thumbnail", boolean, False, "add the whole image as one more tile")
    option(group, "min_num_frame", int, 8, "frames of a video at least")
    option(group, "max_num_frame", int, 32, "frames of a video at most")
    option(group, "max_image_pixels", int, None, "width x height above which an image is refused")
    flag(group, "allow_truncated_images", "accept images that are cut off or damaged")
    option(group, "apply_exif_orientation", boolean, True, "turn photographs upright")
    option(group, "transparent_background", str, None, "colour that transparent pixels are composited on")


def encode_config(args: argparse.Namespace) -> Any:
    """The `EncodeConfig` of `add_encoding`'s options; chat format and patches are the checkpoint's, as in training.

    Raises:
        UserError: options that cannot be used, or a chat format of the checkpoint that is not known here.
    """
    from ..encode.sample import EncodeConfig
    from ..encode.tiles import tokens_per_tile

    style, patch_size = args.conv_style or EncodeConfig.conv_style, 14
    if args.tokenizer:
        from ..checkpoints.internvl_format_files import chat_style, config_of, patch_size_of

        config = config_of(args.tokenizer)
        style, patch_size = chat_style(args.conv_style, config), patch_size_of(config)
    limit = args.max_image_pixels
    return EncodeConfig(
        conv_style=style,
        image_size=args.force_image_size,
        tokens_per_tile=tokens_per_tile(args.force_image_size, patch_size, args.down_sample_ratio),
        min_dynamic_patch=args.min_dynamic_patch,
        max_dynamic_patch=args.max_dynamic_patch,
        dynamic_image_size=args.dynamic_image_size,
        use_thumbnail=args.use_thumbnail,
        min_num_frame=args.min_num_frame,
        max_num_frame=args.max_num_frame,
        max_image_pixels=EncodeConfig.max_image_pixels if limit is None else limit,
        allow_truncated_images=args.allow_truncated_images,
        apply_exif_orientation=args.apply_exif_orientation,
        transparent_background=args.transparent_background,
    )


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
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else stand_in_tokenizer(sources)
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


def load_tokenizer(path: str) -> Any:
    """As finetune.py loads it: that of a bare language model gets the tokens for images.

    Raises:
        UserError: there is none.
    """
    from ..checkpoints import tokenizers

    try:
        tokenizer = tokenizers.load_tokenizer(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--tokenizer {path} cannot be loaded: {str(error).splitlines()[0]}") from None
    tokenizers.add_image_tokens(tokenizer)
    return tokenizer


def stand_in_tokenizer(sources: Sequence[Source]) -> Any:
    """A small one built from the data: counts differ from the model's."""
    from ..testing.tiny import source_texts, tiny_tokenizer

    return tiny_tokenizer(source_texts(sources), vocab_size=1024)
