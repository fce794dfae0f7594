"""Command lines of `finetune.py`: parsing with one-line errors, and flags of InternVL's scripts that have gone."""

from __future__ import annotations

import json
import logging
from argparse import SUPPRESS, HelpFormatter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments

from internvl_pack.errors import UserError
from internvl_pack.options import add_options, options_of, unknown_option

from .arguments import DataTrainingArguments, ModelArguments, PackingArguments, PackTrainingArguments
from .preference import PreferenceArguments

logger = logging.getLogger(__name__)

# Flags of older scripts, or of transformers, and the flag that took their place.
RENAMED = {
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "gradient_checkpointing": "grad_checkpoint",
    "activation_checkpointing": "grad_checkpoint",
    "pad_to_max_length": "strict_mode",
}
# Flags of older scripts that have no effect any more, and why leaving them out is right.
DROPPED = {
    "group_by_length": "--use_packed_ds True makes rows of equal length",
    "allow_overflow": "budgets are never exceeded, longer samples follow --oversize",
    "pad2square": "images are cut by their shape or resized",
    "use_fast_tokenizer": "the checkpoint's own tokenizer is used",
    "ps_version": "the native model pixel-shuffles the one way",
    "vision_select_layer": "it is part of the checkpoint's config",
    "save_safetensors": "checkpoints are always safetensors",
    "logging_dir": "set TENSORBOARD_LOGGING_DIR",
    "per_device_eval_batch_size": "rows of held-out data are made as the training's",
    "length_path": "lengths are counted from the data",
    "split_annotations": "rows are read where they lie, no rank loads all annotations",
    "unfreeze_lm_head": "the head is trained or frozen with the language model",
    "use_custom_flash_attn": "packed attention takes the fastest kernel there is, see --attn_kernel",
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        "a layer is checkpointed as a whole, without reentrance",
    ),
    "use_liger": "--loss_kernel auto takes liger-kernel's loss where it is installed",
    "normalize_type": "pixels are normalised by ImageNet's mean and deviation",
    "num_lanes": "all readers follow one plan",
    "balance_reservoir": "packs of a step are of like cost by themselves",
}


NO = ("false", "no", "n", "f", "0")
# Flags of `DROPPED` that would train something else than what is trained here, but for these values; and what to do.
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "pad2square": (NO, "images are not padded to squares here: pad the files"),
    "allow_overflow": (NO, "a row never exceeds its budgets: raise --max_packed_tokens"),
    "ps_version": (("v2",), "the native model shuffles pixels as v2 does: take a checkpoint of that kind"),
    "vision_select_layer": (("-1",), "the checkpoint's config says which layer: set vision_feature_layer there"),
    "unfreeze_lm_head": (NO, "the head is trained with the language model: use --freeze_llm False"),
    "normalize_type": (
        ("imagenet",),
        "the native InternVL is trained on ImageNet's mean and deviation: use imagenet",
    ),
}
# Our options, by the headings of help and docs/options.md.
GROUPS = {
    "Packing": PackingArguments,
    "Data": DataTrainingArguments,
    "Model": ModelArguments,
    "Preference": PreferenceArguments,
    "Training": PackTrainingArguments,
}
KINDS = (ModelArguments, DataTrainingArguments, PackTrainingArguments)
# The options that help shows first.
FIRST = (
    "model_name_or_path",
    "meta_path",
    "output_dir",
    "use_packed_ds",
    "max_packed_tokens",
    "num_images_expected",
    "dynamic_image_size",
    "learning_rate",
    "bf16",
    "deepspeed",
)
# Flags that would train something else, whatever their value, and what to do.
GONE = {
    "mlp_path": "a projector is not loaded from a file of its own: put its weights (mlp1) into the checkpoint, or "
    "train one with --vision_path and --llm_path",
}


# Another name of an option: what a path of data without a meta file is given by.
ALIASES = {"data": "meta_path"}

PROGRAM = "finetune.py"


class Parser(HfArgumentParser):
    """Our options by their declarations, in groups, and transformers' TrainingArguments."""

    def __init__(self, program: str = PROGRAM) -> None:
        processes = "" if program == PROGRAM else "[--nproc N] "
        super().__init__(
            TrainingArguments,  # type: ignore[arg-type]  # its own type asks for an instance
            prog=program,
            usage=f"{program} {processes}[FILE.json|FILE.yaml] [--OPTION VALUE ...]",
            description="Fine-tune InternVL on packed or padded rows. Options may stand in a JSON or YAML file; those "
            "of the command line take precedence."
            + (" --nproc starts N processes of this machine, one a GPU (default: 1)." if processes else ""),
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            conflict_handler="resolve",  # our declarations replace transformers'
        )
        for action in self._actions:
            if action.dest != "help":
                action.help = SUPPRESS
        first = self.add_argument_group("the ten that matter first")
        for name in FIRST:
            add_options(first, next(kind for kind in KINDS if name in kind.__dataclass_fields__), name)
        ours = grouped_options()
        for title, names in ours.items():
            add_options(self.add_argument_group(title.lower()), GROUPS[title], *(n for n in names if n not in FIRST))
        shown = {name for names in ours.values() for name in names}
        others = sorted(name for name in option_names() if name not in shown)
        self.epilog = f"Options of transformers' TrainingArguments work as well: {', '.join(others)}."

    def error(self, message: str) -> NoReturn:
        raise UserError(" ".join(message.split()))


def grouped_options() -> dict[str, list[str]]:
    """Our options by the heading under which help and docs/options.md show them."""
    groups: dict[str, list[str]] = {}
    for title, kind in GROUPS.items():
        shown = {name for names in groups.values() for name in names}
        groups[title] = [name for name, *_ in options_of(kind) if name not in shown]
    return groups


def option_names() -> list[str]:
    """Every option of finetune.py; those of transformers that are called otherwise here are none."""
    gone = RENAMED.keys() | DROPPED.keys()
    return [f.name for kind in KINDS for f in fields(kind) if f.init and f.name not in gone]


def parse(
    argv: Sequence[str], program: str = PROGRAM
) -> tuple[ModelArguments, DataTrainingArguments, PackTrainingArguments]:
    """The three groups of options from a command line, which may begin with a file of options.

    Args:
        program: what the user calls it by.

    Raises:
        UserError: an unknown option or a value it cannot have; names it.
    """
    if argv and not argv[0].startswith("-"):
        argv = [*words_of(argv[0]), *argv[1:]]
    words, notes = translate(argv)
    for note in notes:
        logger.warning("%s", note)
    values, rest = Parser(program).parse_known_args(words)
    unknown = [word for word in rest if word.startswith("--")]
    if unknown:
        raise UserError(unknown_option(unknown[0], option_names(), program))
    if rest:
        raise UserError(f"{rest[0]!r} is neither an option nor the value of one: give --OPTION VALUE")
    model, data, training = ({f.name: getattr(values, f.name) for f in fields(kind) if f.init} for kind in KINDS)
    return ModelArguments(**model), DataTrainingArguments(**data), PackTrainingArguments(**training)


def words_of(path: str) -> list[str]:
    """A file of options as a command line, so that both are checked alike; null leaves an option out.

    Raises:
        UserError: no such file, or no options in it.
    """
    if not path.endswith((".json", ".yaml", ".yml")):
        raise UserError(f"{path!r} is no option: give --OPTION VALUE, or a file of options, .json or .yaml, first")
    try:
        text = Path(path).read_text(encoding="utf-8")
        options = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"{path}: the file of options cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not {'JSON' if path.endswith('.json') else 'YAML'}: {error}") from error
    if not isinstance(options, dict):
        raise UserError(f"{path}: give one object of options, name: value")
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        if value is not None:
            words += [f"--{name}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return words


def translate(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the command line with the flags of older scripts renamed or left out, a line for each of them).

    Raises:
        UserError: a flag, or the value of one, that would train something else.
    """
    words: list[str] = []
    notes: list[str] = []
    i = 0
    while i < len(argv):
        word = argv[i]
        i += 1
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        if name in GONE:
            raise UserError(f"--{name}: {GONE[name]}")
        if name in DROPPED:
            given = [value] if equals else []
            while not equals and i < len(argv) and not argv[i].startswith("--"):
                given.append(argv[i])
                i += 1
            harmless, why = REFUSED.get(name, ((), ""))
            if why and (value := " ".join(given) or "True").lower() not in harmless:
                raise UserError(f"--{name} {value}: {why}, and leave the flag out")
            notes.append(f"--{name} has no effect here and is ignored: {DROPPED[name]}")
            continue
        if name in RENAMED:
            notes.append(f"--{name} is now --{RENAMED[name]}")
        now = RENAMED.get(name) or ALIASES.get(name)
        words.append(word.replace(flag, f"--{now}", 1) if now else word)
    return words, notes
