"""Command lines of `finetune.py`: parsing with one-line errors, and flags of InternVL's scripts that have gone."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

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
        argv = words_of(argv[0])
    *groups, rest = parser.parse_args_into_dataclasses(
        modernise(argv), return_remaining_strings=True, look_for_args_file=False
    )
    unknown = [word for word in rest if word.startswith("--")] or rest
    if unknown:
        raise UserError(unknown_option(unknown[0]))
    return tuple(groups)


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
