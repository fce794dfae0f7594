"""Command lines of `finetune.py`: parsing with one-line errors, and flags of InternVL's scripts that have gone."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from transformers import HfArgumentParser

from internvl_pack.errors import UserError

from .arguments import DataTrainingArguments, ModelArguments, PackTrainingArguments, option_names

logger = logging.getLogger(__name__)

# Flags of older scripts, and the flag that took their place.
RENAMED = {"warmup_ratio": "warmup_steps", "evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu"}
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
    "length_path": "lengths are counted from the data",
    "split_annotations": "rows are read where they lie, no rank loads all annotations",
    "unfreeze_lm_head": "the head is trained or frozen with the language model",
    "use_custom_flash_attn": "packed attention takes the fastest kernel there is, see --attn_kernel",
    "use_liger": "--loss_kernel auto takes liger-kernel's loss where it is installed",
}


def _unless(wanted: str, why: str) -> Callable[[str], str | None]:
    return lambda value: None if value == wanted else why


def _if_true(why: str) -> Callable[[str], str | None]:
    return lambda value: why if value.lower() in ("true", "yes", "y", "t", "1") else None


# Values at which a flag of `DROPPED` would train something else than what is trained here: they are refused.
REFUSED: dict[str, Callable[[str], str | None]] = {
    "pad2square": _if_true("images are not padded to squares here: pad the files"),
    "allow_overflow": _if_true("a row never exceeds its budgets: raise --max_packed_tokens"),
    "ps_version": _unless("v2", "the native model shuffles pixels as v2 does: take a checkpoint of that kind"),
    "vision_select_layer": _unless("-1", "the checkpoint's config says which layer: set vision_feature_layer there"),
    "unfreeze_lm_head": _if_true("the head is trained with the language model: use --freeze_llm False"),
}
# What preference optimisation needs that is not here.
PREFERENCES = (
    "preference optimisation (MPO, DPO) is not done here: it needs pairs of a chosen and a rejected answer and the "
    "model it began with as a reference; train the chosen answers as conversations instead, without this flag"
)
# Flags that would train something else, whatever their value, and what to do.
GONE = {
    **dict.fromkeys(("sigmoid_loss_weight", "bco_pair_loss_weight", "loss_type", "rpo_alpha"), PREFERENCES),
    "mlp_path": "a projector is not loaded from a file of its own: put its weights (mlp1) into the checkpoint, or "
    "train one with --vision_path and --llm_path",
}


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(" ".join(message.split()))


def parse(argv: Sequence[str]) -> tuple[ModelArguments, DataTrainingArguments, PackTrainingArguments]:
    """The three groups of options from a command line, or from one JSON file of options.

    Raises:
        UserError: an unknown option or a value it cannot have; names it.
    """
    kinds: Any = (ModelArguments, DataTrainingArguments, PackTrainingArguments)  # its own type asks for instances
    parser = _Parser(
        kinds,
        prog="finetune",
        description="Fine-tune InternVL on packed or padded rows; transformers' TrainingArguments work too.",
        allow_abbrev=False,
    )
    if len(argv) == 1 and argv[0].endswith(".json"):
        argv = words_of(argv[0])
    parsed: tuple[Any, ...] = parser.parse_args_into_dataclasses(
        modernise(argv), return_remaining_strings=True, look_for_args_file=False
    )
    model_args, data_args, training_args, rest = parsed
    unknown = [word for word in rest if word.startswith("--")] or rest
    if unknown:
        raise UserError(unknown_option(unknown[0]))
    return model_args, data_args, training_args


def words_of(path: str) -> list[str]:
    """A JSON file of options as a command line, so that both are checked alike; null leaves an option out.

    Raises:
        UserError: no such file, or not one JSON object.
    """
    try:
        options = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: the file of options cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(options, dict):
        raise UserError(f"{path}: give one JSON object of options")
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        if value is not None:
            words += [f"--{name}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return words


def modernise(argv: Sequence[str]) -> list[str]:
    """The command line with the flags of older scripts renamed or left out; says so in the log.

    Raises:
        UserError: a flag, or the value of one, that would train something else.
    """
    words, notes = translate(argv)
    for note in notes:
        logger.warning("%s", note)
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
        flag, equals, value = argv[i].partition("=")
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        if name in GONE:
            raise UserError(f"--{name}: {GONE[name]}")
        if name in DROPPED:
            i += 1
            given = [value] if equals else []
            while not equals and i < len(argv) and not argv[i].startswith("--"):
                given.append(argv[i])
                i += 1
            check_dropped(name, " ".join(given) or "True")
            notes.append(f"--{name} has no effect here and is ignored: {DROPPED[name]}")
            continue
        if name in RENAMED:
            notes.append(f"--{name} is now --{RENAMED[name]}")
            words.append(argv[i].replace(flag, f"--{RENAMED[name]}", 1))
        else:
            words.append(argv[i])
        i += 1
    return words, notes


def check_dropped(name: str, value: str) -> None:
    """Check the values of flags that are left out.

    Raises:
        UserError: one would train something else.
    """
    why = REFUSED.get(name, lambda value: None)(value)
    if why is not None:
        raise UserError(f"--{name} {value}: {why}, and leave the flag out")


def unknown_option(word: str) -> str:
    """The message for an option that does not exist, with the nearest one that does."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    near = difflib.get_close_matches(name, option_names(), n=1)
    hint = f"did you mean --{near[0]}?" if near else "finetune.py --help lists them all"
    return f"unknown option {word!r}: {hint}"
