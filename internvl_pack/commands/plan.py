"""`internvl-pack plan META --out DIR`: plan every pack of a run before it starts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..config import NOT_NEEDED, PackingConfig
from ..errors import UserError
from ..packing.offline import OFFLINE_POLICIES
from ..packing.policies import POLICIES
from ..packing.split import OVERSIZE
from ._options import add_encoding, add_workers, boolean, num_workers, open_samples, option

if TYPE_CHECKING:
    from ..plan.preset import Preset

HELP = "Plan every pack of a run before it starts: writes a preset for finetune.py --packing preset."


def configure(parser: argparse.ArgumentParser) -> None:
    defaults = PackingConfig()
    parser.add_argument("meta", help="meta file (JSON) of the datasets")
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="folder of the preset; a plan that was stopped goes on"
    )
    parser.add_argument("--tokenizer", metavar="PATH", required=True, help="the model's checkpoint or tokenizer")
    add_workers(parser)
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
    add_encoding(run)
    option(run, "max_packed_tokens", int, defaults.max_packed_tokens, "token budget of a row")
    option(run, "num_images_expected", int, defaults.num_images_expected, "tile budget of a row")
    option(run, "max_seq_length", int, None, "tokens of one sample at most")
    option(run, "oversize", str, defaults.oversize, f"what exceeds a budget: {', '.join(OVERSIZE)}")
    option(run, "repeat_system_prompt", boolean, False, "begin later parts of a split sample with its system turn")
    option(run, "max_attention_cost", int, None, "sum of squared sample lengths of a row at most")
    option(run, "pad_to_multiple_of", int, 1, "round each sample's share of the budget up to this many tokens")
    option(run, "replacement", boolean, False, "draw samples with replacement")
    option(run, "use_data_resampling", boolean, False, "weigh datasets by the square root of their length")
    how = parser.add_argument_group("how packs are planned; training takes these from the preset")
    policies = (*POLICIES, *OFFLINE_POLICIES)
    option(how, "packing_policy", str, defaults.packing_policy, f"one of {', '.join(policies)}")
    option(how, "max_buffer_size", int, defaults.max_buffer_size, "look-ahead, samples")
    option(how, "cost_model", str, defaults.cost_model, "whose operations packs are balanced by")
    option(how, "shuffle_buffer_size", int, None, "samples shuffled together, shard after shard (default: all)")
    option(how, "seed", int, defaults.seed, "of the order")
    option(how, "on_error", str, defaults.on_error, "a sample that cannot be used: skip and count it, or stop")
    option(how, "survey_dir", str, None, "folder of the measured lengths (default: INTERNVL_PACK_CACHE)")
    for name in NOT_NEEDED:
        how.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    from ..plan.write_preset import plan_preset

    processes = num_workers(args)
    config, policy = _config(args)
    samples = open_samples(args)
    preset = plan_preset(
        args.out, samples, config, policy=policy, epochs=args.epochs, num_workers=processes, progress=_follow
    )
    if args.materialise:
        from ..stream.stored import materialise

        packs = sum(preset.packs_of_epochs)
        _follow("materialising", packs, materialise(preset, samples, num_workers=processes))
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
        return PackingConfig(**options), policy
    return PackingConfig(**options, packing_policy=policy), None


def _follow(what: str, total: int, steps: Iterable[int]) -> None:
    from tqdm import tqdm

    with tqdm(total=total, unit=" packs" if what == "materialising" else " samples", desc=what, disable=None) as bar:
        for done in steps:
            bar.update(done)


def _show(preset: Preset) -> None:
    s, settings = preset.content["statistics"], preset.settings
    row = f"{settings['max_packed_tokens']:,} tokens and {settings['num_images_expected']} tiles"
    refused = ", ".join(f"{n:,} {reason}" for reason, n in s["refused"].items()) or "none"
    print(
        f"{preset.folder}: {s['samples']:,} samples in {s['packs']:,} packs of {row}, epochs planned: {preset.epochs}\n"
        f"refused: {refused}\n"
        f"packs over their lower bound {s['packs_over_bound']:.4f}; real tokens over capacity {s['token_fill']:.2%}, "
        f"with alignment padding {s['token_fill_with_alignment']:.2%}; {s['segments'] / s['packs']:.1f} segments a pack"
    )
