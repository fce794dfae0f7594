"""`internvl-pack plan META --out DIR`: plan every pack of a run before it starts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import PackingConfig
from ..errors import UserError
from ..options import add_options, count, from_config, make, option
from ..packing.offline import OFFLINE_POLICIES
from ..packing.policies import POLICIES
from ._options import (
    BUDGETS,
    META_HELP,
    WorkerOptions,
    add_encoding,
    add_not_needed,
    num_workers,
    open_samples,
    packing_config,
)

if TYPE_CHECKING:
    from ..plan.preset import Preset

HELP = "Plan every pack of a run before it starts: writes a preset for finetune.py --packing preset."


@dataclass(kw_only=True)
class PlanOptions:
    """What a plan has beside, or otherwise than, a run."""

    epochs: int = option(1, "Epochs to plan; training repeats them in another order.", unit="epochs", at_least=1)
    packing_policy: str = from_config(PackingConfig, "packing_policy", choices=(*POLICIES, *OFFLINE_POLICIES))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("meta", help=META_HELP)
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="folder of the preset; a plan that was stopped goes on"
    )
    add_options(parser, WorkerOptions)
    parser.add_argument(
        "--materialise",
        "--materialize",
        action="store_true",
        help="also write token ids and labels, and the compressed images: training then needs no other data",
    )
    add_options(parser, PlanOptions, "epochs")
    add_encoding(parser, required=True)
    run = parser.add_argument_group("how samples share rows: training must have the same")
    add_options(
        run,
        PackingConfig,
        *(*BUDGETS, "oversize", "repeat_system_prompt", "share_prefix", "max_attention_cost", "pad_to_multiple_of"),
        *("replacement", "use_data_resampling"),
    )
    how = parser.add_argument_group("how packs are planned: training takes these from the preset")
    add_options(how, PlanOptions, "packing_policy")
    add_options(
        how,
        PackingConfig,
        *("max_buffer_size", "cost_model", "shuffle_buffer_size", "seed", "on_error", "survey_dir"),
    )
    add_not_needed(how)


def run(args: argparse.Namespace) -> int:
    from ..plan.write_preset import plan_preset

    processes = num_workers(args)
    policy = make(PlanOptions, vars(args)).packing_policy
    offline = policy in OFFLINE_POLICIES
    config = packing_config(args, packing_policy=PackingConfig.packing_policy if offline else policy)
    if args.materialise and config.share_prefix:
        raise UserError(
            "--materialise with --share_prefix True: rows of a tree are not kept apart there; leave one out"
        )
    samples = open_samples(args)
    preset = plan_preset(
        args.out,
        samples,
        config,
        policy=policy if offline else None,
        epochs=args.epochs,
        num_workers=processes,
        progress=_follow,
    )
    if args.materialise:
        from ..stream.stored import materialise

        packs = sum(preset.packs_of_epochs)
        _follow("materialising", packs, materialise(preset, samples, num_workers=processes))
    _show(preset)
    return 0


def _follow(what: str, total: int, steps: Iterable[int]) -> None:
    from tqdm import tqdm

    with tqdm(total=total, unit=" packs" if what == "materialising" else " samples", desc=what, disable=None) as bar:
        for done in steps:
            bar.update(done)


def _show(preset: Preset) -> None:
    s, settings = preset.content["statistics"], preset.settings
    row = f"{count(settings['max_packed_tokens'], 'tokens')} and {count(settings['num_images_expected'], 'tiles')}"
    refused = ", ".join(f"{n:,} {reason}" for reason, n in s["refused"].items()) or "none"
    print(
        f"{preset.folder}: {count(s['samples'], 'samples')} in {count(s['packs'], 'packs')} of {row}, "
        f"epochs planned: {preset.epochs}\n"
        f"refused: {refused}\n"
        f"packs over their lower bound {s['packs_over_bound']:.4f}; real tokens over capacity {s['token_fill']:.2%}, "
        f"with alignment padding {s['token_fill_with_alignment']:.2%}; {s['segments'] / s['packs']:.1f} segments a pack"
    )
