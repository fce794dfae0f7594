"""Writes docs/options.md from the declarations of the options: `python docs/make_options.py`."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import TrainingArguments

from internvl_pack.options import Option, count, options_of
from train.arguments import PackTrainingArguments
from train.options import GROUPS, grouped_options

PAGE = Path(__file__).with_name("options.md")
HEAD = """\
# All options of `train/finetune.py`

<!-- Written by docs/make_options.py: change the declaration of an option, not this page. -->

Names and meanings are those of InternVL's fine-tuning scripts where it has them ([flag by flag](migration.md)).
transformers' `TrainingArguments` work as well (`max_steps`, `save_steps`, `eval_strategy`, `report_to`, ...).
`python train/finetune.py --help` lists all. `python train/finetune.py options.yaml` (or `.json`) takes them from a
file; those of the command line after it take precedence. The commands of `internvl-pack` that look at a run ahead
(`stats`, `preview`, `validate`, `simulate`, `plan`) take those that matter to them under the same names.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, names in grouped_options().items():
        rows = [row(name, field.default, said) for name, field, said in options_of(GROUPS[title], names)]
        parts.append("\n".join([f"## {title}\n", "| option | default | meaning |", "| --- | --- | --- |", *rows, ""]))
    theirs = {field.name: field.default for field in fields(TrainingArguments)}
    others = [
        f"`{field.name}` {field.default}"
        for field in fields(PackTrainingArguments)
        if field.name in theirs and field.default != theirs[field.name]
    ]
    parts.append(f"Of `TrainingArguments` these have other defaults here: {', '.join(others)}.\n")
    return "\n".join(parts)


def row(name: str, default: Any, said: Option) -> str:
    """The line of an option."""
    shown = "none" if default is None else f"{default}" if said.unit is None else count(default, said.unit)
    text = re.sub(r"--(\w+)", r"`\1`", said.text(None).replace("|", "\\|"))
    more = f" [More]({said.page})." if said.page else ""
    return f"| `{name}` | {shown} | {text}{more} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
