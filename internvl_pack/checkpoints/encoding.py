"""How a checkpoint's model wants its samples encoded: what options leave open is read from its config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import PackingConfig
from ..encode.config import EncodeConfig
from ..encode.families import family_of
from ..encode.tiles import TileOptions, tokens_per_tile
from ..errors import UserError
from ..options import make, options_of
from ..sources.names import meant
from .internvl_format_files import chat_style, config_of


def encode_config_of(checkpoint: str | Path, **options: Any) -> EncodeConfig:
    """The `EncodeConfig` of a model's checkpoint: its tile sizes, chat format and family, and options of yours.

        encode = encode_config_of("OpenGVLab/InternVL3-1B-hf", dynamic_image_size=True, use_thumbnail=True)

    Args:
        checkpoint: folder or hub name.
        options: by their names on a command line (docs/options.md): `max_dynamic_patch`, `conv_style`, `max_pixels`,
            `objective`, ...; what is left out is the checkpoint's, or its default.

    Raises:
        UserError: no such checkpoint or option, or an option that is not allowed.
    """
    known = [name for config in (EncodeConfig, TileOptions) for name, _, _ in options_of(config)]
    if unknown := next((name for name in options if name not in known), None):
        raise UserError(f"encode_config_of: unknown option {unknown!r}{meant(unknown, known)}")
    config = config_of(checkpoint)
    if not config:
        raise UserError(f"{checkpoint}: no config.json of a model there: give a checkpoint's folder or hub name")
    return in_its_chat_format(options, config)


def in_its_chat_format(options: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> EncodeConfig:
    """As `encode_config`, where the options name no `conv_style` in the checkpoint's.

    Raises:
        UserError: as `encode_config`, or the checkpoint's chat format is not known here.
    """
    checkpoint = served_by(checkpoint, options.get("family_check"))
    return encode_config({**options, "conv_style": chat_style(options.get("conv_style"), checkpoint)}, checkpoint)


def encode_config(options: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> EncodeConfig:
    """The `EncodeConfig` of a run.

    Args:
        options: by their names on a command line; `conv_style` is the caller's, see `chat_style`.
        checkpoint: config.json of the model or of its vision tower; empty for a model of the usual sizes.

    Raises:
        UserError: an option is not allowed, or a tile does not divide into whole tokens.
    """
    checkpoint = served_by(checkpoint, options.get("family_check"))
    decided = family_of(checkpoint.get("model_type")).encoding(options, checkpoint)
    if decided is not None:
        known = options.get("family_check") is None  # what is tried is pictures alone
        return make(EncodeConfig, options, takes_videos=known, **decided)
    bounds = ("min_pixels", "max_pixels", "video_max_pixels")
    if given := next((name for name in bounds if options.get(name) is not None), None):
        raise UserError(
            f"--{given} {options[given]}: it bounds pictures of models of native resolution, and this one cuts them "
            "into tiles; use --max_dynamic_patch"
        )
    size, ratio = options.get("force_image_size"), options.get("down_sample_ratio")
    if size is None:
        size = _vision_side(checkpoint, "image_size", EncodeConfig.image_size)
    if ratio is None:
        ratio = checkpoint.get("downsample_ratio", TileOptions.down_sample_ratio)
    tokens = tokens_per_tile(size, _vision_side(checkpoint, "patch_size", 14), ratio)
    return make(EncodeConfig, options, image_size=size, tokens_per_tile=tokens)


def served_by(checkpoint: Mapping[str, Any], family: str | None) -> Mapping[str, Any]:
    """A checkpoint's config with the `model_type` by whose rules it is packed.

    Args:
        family: of `--family_check`; None for its own.
    """
    return checkpoint if family is None else {**checkpoint, "model_type": family}


def default_tiles(checkpoint: Mapping[str, Any], max_packed_tokens: int) -> int:
    """`num_images_expected` where it is not given: a row of a model of native resolution may be all image tokens."""
    native = family_of(checkpoint.get("model_type")).grid_positions
    return max_packed_tokens if native else PackingConfig.num_images_expected


def _vision_side(config: Mapping[str, Any], name: str, default: int) -> int:
    """Pixels along a tile or a patch, from a checkpoint's config, which may give both sides, or none."""
    size = config.get("vision_config", config).get(name, default)
    return size if isinstance(size, int) else size[0]
