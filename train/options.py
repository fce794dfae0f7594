"""Command lines of `finetune.py`: parsing with one-line errors, and flags of InternVL's scripts that have gone."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from internvl_pack.errors import UserError

from .arguments import DataTrainingArguments, ModelArguments, PackTrainingArguments, option_names

logger = logging.getLogger(__name__)

#: Flags of older scripts, and the flag that took their place.
RENAMED = {"warmup_ratio": "warmup_steps", "evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu"}
#: Flags of older scripts that have no effect any more, and why leaving them out is right.
DROPPED = {
    "overwrite_output_dir": "an output folder is never emptied",
    "group_by_length": "packing evens out lengths",
    "do_train": "this program only trains",
    "allow_overflow": "budgets are never exceeded",
    "pad2square": "images are cut by their shape or resized",
    "use_fast_tokenizer": "the fast tokenizer is always used",
    "ps_version": "the native model pixel-shuffles the one way",
    "vision_select_layer": "it is part of the checkpoint's config",
    "save_safetensors": "checkpoints are always safetensors",
    "logging_dir": "set TENSORBOARD_LOGGING_DIR",
    "length_path": "lengths are counted from the data",
}


class _Parser(HfArgumentParser):
    def error(self, message: str) -> None:
        raise UserError(" ".join(message.split()))


def parse(argv: Sequence[str]) -> tuple[ModelArguments, DataTrainingArguments, PackTrainingArguments]:
    """The three groups of options from a command line, or from one JSON file of options.

    Raises:
        UserError: an unknown option or a value it cannot have; names it.
    """
    parser = _Parser(
        (ModelArguments, DataTrainingArguments, PackTrainingArguments),
        prog="finetune",
        description="Fine-tune InternVL on packed or padded rows; transformers' TrainingArguments work too.",
        allow_abbrev=False,
    )
    if len(argv) == 1 and argv[0].endswith(".json"):
        return _from_json(parser, argv[0])
    *groups, rest = parser.parse_args_into_dataclasses(
        modernise(argv), return_remaining_strings=True, look_for_args_file=False
    )
    unknown = [word for word in rest if word.startswith("--")] or rest
    if unknown:
        raise UserError(unknown_option(unknown[0]))
    return tuple(groups)


def _from_json(parser: HfArgumentParser, path: str) -> tuple[Any, ...]:
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file of options")
    try:
        return parser.parse_json_file(path)
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error


def modernise(argv: Sequence[str]) -> list[str]:
    """The command line with the flags of older scripts renamed or left out; says so in the log."""
    words: list[str] = []
    i = 0
    while i < len(argv):
        flag, equals, _ = argv[i].partition("=")
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        if name in DROPPED:
            logger.warning("--%s has no effect here and is ignored: %s", name, DROPPED[name])
            i += 1
            while not equals and i < len(argv) and not argv[i].startswith("--"):
                i += 1
            continue
        if name in RENAMED:
            logger.warning("--%s is now --%s", name, RENAMED[name])
            words.append(argv[i].replace(flag, f"--{RENAMED[name]}", 1))
        else:
            words.append(argv[i])
        i += 1
    return words


def unknown_option(word: str) -> str:
    """The message for an option that does not exist, with the nearest one that does."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    near = difflib.get_close_matches(name, option_names(), n=1)
    hint = f"did you mean --{near[0]}?" if near else "finetune.py --help lists them all"
    return f"unknown option {word!r}: {hint}"
