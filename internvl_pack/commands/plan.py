"""`internvl-pack plan META --out DIR`: plan every pack of a run before it starts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..config import PackingConfig
from ..errors import UserError
from ..packing.offline import OFFLINE_POLICIES
from ..packing.policies import POLICIES
from ..packing.split import OVERSIZE
from .validate import _boolean, _option

HELP = "Plan every pack of a run before it starts: writes a preset for finetune.py --packing preset."


def configure(parser: argparse.ArgumentParser) -> None:
    defaults = PackingConfig()
    parser.add_argument("meta", help="meta file (JSON) of the datasets")
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="folder of the preset; a plan that was stopped goes on"
    )
    parser.add_argument("--tokenizer", metavar="PATH", required=True, help="the model's checkpoint or tokenizer")
    parser.add_argument(
        "--workers", type=int, default=None, help="processes (default: one a CPU core, 8 at most; 0: in this process)"
    )
    parser.add_argument(
        "--epochs", type=int, default=1, help="epochs to plan; training repeats them in another order (default: 1)"
    )
    parser.add_argument(
        "--materialise",
        "--materialize",
        action="store_true",
        help="also write token ids and labels, and the compressed images: training then needs no other data",
    )
    run = parser.add_argument_group("options of the run that is planned; training must have the same")
    _option(run, "conv_style", str, "internvl2_5", "chat format")
    _option(run, "force_image_size", int, 448, "side of a tile, pixels")
    _option(run, "down_sample_ratio", float, 0.5, "of patches to tokens, a side")
    _option(run, "min_dynamic_patch", int, 1, "tiles of an image at least, without the thumbnail")
    _option(run, "max_dynamic_patch", int, 12, "tiles of an image at most, without the thumbnail")
    _option(run, "dynamic_image_size", _boolean, False, "cut images into several tiles")
    _option(run, "use_thumbnail", _boolean, False, "add the whole image as one more tile")
    _option(run, "max_image_pixels", int, None, "width x height above which an image is refused")
    _option(run, "allow_truncated_images", _boolean, False, "accept images that are cut off or damaged")
    _option(run, "apply_exif_orientation", _boolean, True, "turn photographs upright")
    _option(run, "max_packed_tokens", int, defaults.max_packed_tokens, "token budget of a row")
    _option(run, "num_images_expected", int, defaults.num_images_expected, "tile budget of a row")
    _option(run, "max_seq_length", int, None, "tokens of one sample at most")
    _option(run, "oversize", str, defaults.oversize, f"what exceeds a budget: {', '.join(OVERSIZE)}")
    _option(run, "repeat_system_prompt", _boolean, False, "begin later parts of a split sample with its system turn")
    _option(run, "max_attention_cost", int, None, "sum of squared sample lengths of a row at most")
    _option(run, "pad_to_multiple_of", int, 1, "round each sample's share of the budget up to this many tokens")
    _option(run, "replacement", _boolean, False, "draw samples with replacement")
    _option(run, "use_data_resampling", _boolean, False, "weigh datasets by the square root of their length")
    how = parser.add_argument_group("how packs are planned; training takes these from the preset")
    policies = (*POLICIES, *OFFLINE_POLICIES)
    _option(how, "packing_policy", str, defaults.packing_policy, f"one of {', '.join(policies)}")
    _option(how, "max_buffer_size", int, defaults.max_buffer_size, "look-ahead, samples a lane")
    _option(how, "balance_reservoir", int, 0, "packs a lane holds back to even out the ranks' work")
    _option(how, "num_lanes", int, None, "logical streams; ranks x workers x packs a batch of the training divide them")
    _option(how, "seed", int, defaults.seed, "of the order")
    _option(how, "on_error", str, defaults.on_error, "a sample that cannot be used: skip and count it, or stop")


def run(args: argparse.Namespace) -> int:
    from ..planning import plan_preset
    from ..scan import parquet
    from ..sources import load_meta, open_source

    if args.workers is not None and args.workers < 0:
        raise UserError(f"--workers must be at least 0, not {args.workers}")
    num_workers = min(8, os.cpu_count() or 1) if args.workers is None else args.workers
    parquet()  # before anything else is done: is it installed?
    config, policy = _config(args)
    encoder = _encoder(args)
    specs = load_meta(args.meta)
    sources = [open_source(spec) for spec in specs]
    preset = plan_preset(
        Path(args.out),
        specs,
        sources,
        encoder,
        config,
        policy=policy,
        epochs=args.epochs,
        num_workers=num_workers,
        follow=_follow,
    )
    if args.materialise:
        from ..materialise import materialise

        packs = sum(map(sum, preset.content["packs_per_lane"]))
        _follow("materialising", packs, materialise(preset, sources, specs, encoder, num_workers=num_workers))
    _show(preset)
    return 0


def _config(args: argparse.Namespace) -> tuple[PackingConfig, str | None]:
    """The run's options, and the offline policy where one is asked for."""
    policy = args.packing_policy
    if policy not in (*POLICIES, *OFFLINE_POLICIES):
        known = ", ".join((*POLICIES, *OFFLINE_POLICIES))
        raise UserError(f"--packing_policy {policy} is unknown: use one of {known}")
    names = PackingConfig.__dataclass_fields__
    options = {name: value for name, value in vars(args).items() if name in names and name != "packing_policy"}
    if policy in OFFLINE_POLICIES:
        if args.balance_reservoir:
            raise UserError(f"--balance_reservoir does not go with --packing_policy {policy}: it has no look-ahead")
        return PackingConfig(**options), policy
    return PackingConfig(**options, packing_policy=policy), None


def _encoder(args: argparse.Namespace) -> Any:
    from ..encode.sample import EncodeConfig, Encoder
    from ..encode.tiles import tokens_per_tile

    limit = args.max_image_pixels
    encode = EncodeConfig(
        conv_style=args.conv_style,
        image_size=args.force_image_size,
        tokens_per_tile=tokens_per_tile(args.force_image_size, down_sample_ratio=args.down_sample_ratio),
        min_dynamic_patch=args.min_dynamic_patch,
        max_dynamic_patch=args.max_dynamic_patch,
        dynamic_image_size=args.dynamic_image_size,
        use_thumbnail=args.use_thumbnail,
        max_image_pixels=EncodeConfig.max_image_pixels if limit is None else limit,
        allow_truncated_images=args.allow_truncated_images,
        apply_exif_orientation=args.apply_exif_orientation,
    )
    return Encoder(_load_tokenizer(args.tokenizer), encode)


def _load_tokenizer(path: str) -> Any:
    """As finetune.py loads it: that of a bare language model gets the tokens for images."""
    from ..model.tokenizers import load_tokenizer
    from ..tiny import IMAGE_TOKENS, OTHER_TOKENS

    try:
        tokenizer = load_tokenizer(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--tokenizer {path} cannot be loaded: {str(error).splitlines()[0]}") from None
    if IMAGE_TOKENS[0] not in tokenizer.get_vocab():
        tokenizer.add_tokens([*IMAGE_TOKENS, *OTHER_TOKENS], special_tokens=True)
    return tokenizer


def _follow(what: str, total: int, steps: Any) -> None:
    from tqdm import tqdm

    with tqdm(total=total, unit=" packs" if what == "materialising" else " samples", desc=what, disable=None) as bar:
        for done in steps:
            bar.update(done)


def _show(preset: Any) -> None:
    s, settings = preset.content["statistics"], preset.settings
    row = f"{settings['max_packed_tokens']:,} tokens and {settings['num_images_expected']} tiles"
    refused = ", ".join(f"{n:,} {reason}" for reason, n in s["refused"].items()) or "none"
    print(
        f"{preset.folder}: {s['samples']:,} samples in {s['packs']:,} packs of {row}, {settings['num_lanes']} lanes, "
        f"epochs planned: {preset.epochs}\n"
        f"refused: {refused}\n"
        f"packs over their lower bound {s['packs_over_bound']:.4f}; real tokens over capacity {s['token_fill']:.2%}, "
        f"with alignment padding {s['token_fill_with_alignment']:.2%}; {s['segments_per_pack']:.1f} segments a pack"
    )
