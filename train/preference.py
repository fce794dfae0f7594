"""Options of training on pairs of a chosen and a rejected answer, and the loss that they make.

Names are those of InternVL's scripts and of TRL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from internvl_pack.errors import UserError
from internvl_pack.model.loss.preference import LOSS_TYPES, PreferenceLoss
from internvl_pack.options import option


@dataclass
class PreferenceArguments:
    """How pairs of answers are trained on, with --objective dpo or mpo."""

    loss_type: str | None = option(
        None,
        "Losses of pairs, with commas between: sigmoid (DPO), sigmoid_norm (the same by log-probabilities a token) and "
        "bco_pair. Default: sigmoid for dpo; sigmoid,bco_pair for mpo.",
        page="preference.md#the-loss",
    )
    beta: float = option(0.1, "How strongly answers are held to the reference's; rewards are beta times log-ratios.")
    label_smoothing: float = option(
        0.0, "Probability that the answers of a pair are the wrong way round, for sigmoid and sigmoid_norm.",
        at_least=0, at_most=0.5,
    )  # fmt: skip
    sigmoid_loss_weight: float | None = option(
        None, "Weight of sigmoid or sigmoid_norm. Default: 0.8 for mpo, else 1.", at_least=0
    )
    bco_pair_loss_weight: float | None = option(
        None, "Weight of bco_pair. Default: 0.2 for mpo, else 1.", at_least=0
    )  # fmt: skip
    reference_path: str | None = option(
        None,
        "Folder of stored log-probabilities that internvl-pack reference wrote, instead of a model to hold answers "
        "against. Default: the model without its LoRA where nothing else is trained, else a frozen copy.",
        page="preference.md#the-reference",
    )
    rpo_alpha: float | None = option(
        None, "Weight of the chosen answers' own loss, that of SFT. Default: 1 for mpo, else 0.", at_least=0
    )


DEFAULTS: dict[str, dict[str, Any]] = {
    "dpo": {"loss_type": "sigmoid", "sigmoid_loss_weight": 1.0, "bco_pair_loss_weight": 1.0, "rpo_alpha": 0.0},
    "mpo": {"loss_type": "sigmoid,bco_pair", "sigmoid_loss_weight": 0.8, "bco_pair_loss_weight": 0.2, "rpo_alpha": 1.0},
}
# Options that are of some losses alone.
OF_LOSSES = {
    "label_smoothing": ("sigmoid", "sigmoid_norm"),
    "sigmoid_loss_weight": ("sigmoid", "sigmoid_norm"),
    "bco_pair_loss_weight": ("bco_pair",),
}


def objective_of(objective: str | None, args: PreferenceArguments) -> str:
    """The objective of a run: as given, else that of the script that names its losses.

    Raises:
        UserError: an option of pairs without an objective that is of pairs.
    """
    if objective is None and args.loss_type is not None:
        return "mpo" if "," in args.loss_type else "dpo"
    if objective not in (None, "sft"):
        return str(objective)
    for f in fields(PreferenceArguments):
        if (value := getattr(args, f.name)) != f.default:
            raise UserError(f"--{f.name} {value} is of pairs of answers: give --objective dpo or mpo, or leave it out")
    return "sft"


def preference_loss(objective: str | None, args: PreferenceArguments) -> PreferenceLoss | None:
    """The loss of these options; None for sft.

    Raises:
        UserError: an unknown loss, one twice, none that has a weight, an option of another loss, or a number that is
            not finite.
    """
    if objective not in DEFAULTS:
        return None
    given: Mapping[str, Any] = {name: getattr(args, name) for name in DEFAULTS[objective]}
    chosen = DEFAULTS[objective] | {name: value for name, value in given.items() if value is not None}
    weights: dict[str, float] = {}
    for name in map(str.strip, str(chosen["loss_type"]).split(",")):
        if name not in LOSS_TYPES:
            raise UserError(f"--loss_type {name!r} is unknown: use {', '.join(LOSS_TYPES)}, with commas between")
        if name in weights:
            raise UserError(f"--loss_type {chosen['loss_type']}: {name} is there twice")
        weights[name] = chosen["bco_pair_loss_weight" if name == "bco_pair" else "sigmoid_loss_weight"]
    for name, losses in OF_LOSSES.items():
        if (value := getattr(args, name)) and not weights.keys() & set(losses):
            raise UserError(f"--{name} {value} with --loss_type {chosen['loss_type']}: it is of {' and '.join(losses)}")
    if not args.beta > 0:
        raise UserError(f"--beta {args.beta}: give more than 0")
    for name in ("beta", "sigmoid_loss_weight", "bco_pair_loss_weight", "rpo_alpha"):
        if chosen.get(name, args.beta) == math.inf:
            raise UserError(f"--{name} inf: give a finite number")
    if not any((*weights.values(), chosen["rpo_alpha"])):
        raise UserError(f"all losses of --loss_type {chosen['loss_type']} have weight 0: nothing is trained")
    return PreferenceLoss(weights, args.beta, args.label_smoothing, chosen["rpo_alpha"])
