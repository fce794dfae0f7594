"""A launch script of InternVL's, read without running it: the command that does the same here, and what differs.

    text -> logical lines -> variables (assignments, as bash would expand them) -> the line that starts a training
    program -> its words -> options translated as `finetune.py` does

Understood is what these scripts consist of: assignments with defaults (`${GPUS:-8}`), whole-number arithmetic,
`$(pwd)`, and one call by torchrun, srun, deepspeed or python. What cannot be known before the run (`$RANK`, or a
command's output) is left for the shell to fill in.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from internvl_pack.encode.formats import known_templates
from internvl_pack.errors import UserError
from internvl_pack.options import unknown_option

from .environment import find_deepspeed_config
from .options import option_names, translate

PROGRAM = re.compile(r"(?:.*/)?internvl_chat_(\w+)\.py")
FINETUNE = Path(__file__).resolve().parent / "finetune.py"
# Variables of the environment that only InternVL's code reads.
OWN_VARIABLES = {"PYTHONPATH", "LAUNCHER", "USE_TCS_LOADER", "VLLM_CACHE_ROOT", "JOBLOG", "TENSORBOARD_DIR"}
PREFERENCE_PROGRAMS = {"mpo", "dpo"}  # and objectives
TRAINING_PROGRAMS = {"finetune", "pretrain", *PREFERENCE_PROGRAMS}

_ASSIGNMENT = re.compile(r"\s*(export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_END_OF_COMMAND = re.compile(r"\d?>.*|\||\|\||&&?|;|<.*")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.Div: lambda a, b: int(a / b),  # bash's: towards zero
    ast.Mod: int.__mod__,
}


@dataclass(frozen=True)
class Translation:
    """environment: exports that still mean something; command: its words, launcher first; notes: what was changed."""

    environment: dict[str, str]
    command: list[str]
    notes: list[str]

    def __str__(self) -> str:
        lines = [f"# {note}" for note in self.notes]
        lines += [f"export {name}={_quoted(value)}" for name, value in self.environment.items()]
        return "\n".join([*lines, " \\\n  ".join(_by_option(self.command))])


def translate_script(name: str, text: str, environment: Mapping[str, str] | None = None) -> Translation:
    """The command of a launch script for `finetune.py`.

    Args:
        name: of the script, for messages and `$0`.
        text: what it holds.
        environment: variables that the script takes over; default: this process's.

    Raises:
        UserError: no training program is started, or one that is not there, or with an option that would train
            something else.
    """
    variables, exports = dict(os.environ if environment is None else environment), dict[str, str]()
    for line in _logical_lines(text):
        if (assignment := _ASSIGNMENT.fullmatch(line)) and " " not in _unspaced(assignment[3]):
            value = _expand(_unquoted(assignment[3]), variables, name)
            variables[assignment[2]] = value
            if assignment[1] and assignment[2] not in OWN_VARIABLES:
                exports[assignment[2]] = value
            continue
        words = _command_words(line, variables, name)
        place = next((i for i, word in enumerate(words) if PROGRAM.fullmatch(word)), None)
        if place is not None:
            return _translated(name, words[:place], words[place], words[place + 1 :], exports)
    raise UserError(
        f"{name}: it starts none of InternVL's training programs (internvl_chat_finetune.py, ..._pretrain.py)"
    )


def _translated(
    name: str, launcher: list[str], program: str, options: list[str], exports: dict[str, str]
) -> Translation:
    match = PROGRAM.fullmatch(program)
    assert match is not None, "chosen by it"
    kind = match[1]
    if kind not in TRAINING_PROGRAMS:
        raise UserError(f"{name}: {Path(program).name} is no training program that is known here")
    try:
        words, notes = translate(options)
        if kind in PREFERENCE_PROGRAMS and "--loss_type" not in words:  # which says it itself
            words = ["--objective", kind, *words]
            notes = [f"--objective {kind}, which was the program's name", *notes]
        notes = [f"{program} is now {FINETUNE.parent.name}/{FINETUNE.name}", *notes]
        _check_names(words)
        notes += _notes_on_values(words)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    return Translation(exports, [*launcher, str(FINETUNE), *words], notes)


def _check_names(words: list[str]) -> None:
    known = set(option_names())
    for word in words:
        if word.startswith("--") and word[2:].partition("=")[0].replace("-", "_") not in known:
            raise UserError(unknown_option(word, known, "finetune.py"))


def _notes_on_values(words: list[str]) -> list[str]:
    """What the run would say of the values, or refuse."""
    values = {word: value for word, value in pairwise(words) if word.startswith("--")}
    notes = []
    style = values.get("--conv_style")
    if style is not None and style not in known_templates():
        raise UserError(f"--conv_style {style}: choose one of {', '.join(known_templates())}")
    deepspeed = values.get("--deepspeed")
    if (
        deepspeed is not None
        and "$" not in deepspeed
        and (found := find_deepspeed_config(deepspeed)) != Path(deepspeed)
    ):
        notes.append(f"--deepspeed {deepspeed} is {found.parent.parent.name}/{found.parent.name}/{found.name}")
    if values.get("--overwrite_output_dir", "False").lower() != "true":
        notes.append("without --overwrite_output_dir True the run goes on from the newest checkpoint in --output_dir")
    return notes


# --- the shell's part -----------------------------------------------------------------------------


def _logical_lines(text: str) -> list[str]:
    joined = text.replace("\r\n", "\n").replace("\\\n", " ")
    return [line for line in joined.split("\n") if line.strip() and not line.lstrip().startswith("#")]


def _unspaced(value: str) -> str:
    """The value of an assignment with what may hold spaces (quotes, substitutions) taken out."""
    return re.sub(r"\$\(\(.*?\)\)|\$\(.*?\)|\$\{[^{}]*\}|\"[^\"]*\"|'[^']*'", "", value.strip())


def _unquoted(value: str) -> str:
    value = value.strip()
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"" and value[0] not in value[1:-1]:
        return value[1:-1]
    return value


def _command_words(line: str, variables: Mapping[str, str], name: str) -> list[str]:
    try:
        raw = shlex.split(line, comments=True)
    except ValueError:  # a quote that goes over lines
        return []
    words: list[str] = []
    for word in raw:
        if _END_OF_COMMAND.fullmatch(word):
            break
        expanded = _expand(word, variables, name)
        words += expanded.split() if _VARIABLE.fullmatch(word) and "$" not in expanded else [expanded]
    return words


def _expand(text: str, variables: Mapping[str, str], name: str) -> str:
    """As bash would; what is not known stays as it is."""

    def variable(match: re.Match[str]) -> str:
        braced, default, bare = match.groups()
        value = variables.get(braced or bare)
        if default is not None and not value:
            value = _unquoted(default)
        return match[0] if value is None else value

    def arithmetic(match: re.Match[str]) -> str:
        filled = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda m: variables.get(m[1], m[1]), match[1])
        try:
            return str(_whole_number(ast.parse(filled.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return f"$(({filled}))"

    text = text.replace("$(pwd)", os.getcwd()).replace('$(basename "$0")', Path(name).name)
    text = _ARITHMETIC.sub(arithmetic, text)
    text = re.sub(
        r"\$\{(\w+)%\.\*\}", lambda m: variables[m[1]].rpartition(".")[0] if m[1] in variables else m[0], text
    )
    for _ in range(4):  # a default may name another variable
        text, before = _VARIABLE.sub(variable, text), text
        if text == before:
            break
    return text


def _whole_number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_whole_number(node.left), _whole_number(node.right))
    raise ValueError("not a whole number")


def _quoted(word: str) -> str:
    """As a word of a shell; what is left for the shell to fill in stays open to it."""
    if "$" not in word:
        return shlex.quote(word)
    return '"' + re.sub(r'(["\\`])', r"\\\1", word) + '"'


def _by_option(words: list[str]) -> list[str]:
    """The words of a command as lines: an option with its values each."""
    lines: list[str] = []
    for word in words:
        begins = word.startswith("-") and not re.fullmatch(r"-\d.*", word)
        if not lines or begins or word in ("python", str(FINETUNE)):
            lines.append(_quoted(word))
        else:
            lines[-1] += f" {_quoted(word)}"
    return lines
