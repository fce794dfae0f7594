"""Options, each declared once.

A field of `PackingConfig`, `EncodeConfig` or training's arguments holds all that there is to say of an option:

    max_packed_tokens: int = option(8192, "Token budget of a row.", unit="tokens", at_least=1)

Its check, the parsers of training and of the commands, their help, and docs/options.md are made from that.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, TypeVar, get_args, get_type_hints

from .errors import UserError

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a field says of itself beside its name, type and default.

    Attributes:
        help: one sentence or two; where the default is None, what happens then.
        unit: of the value, in the plural.
        at_least, at_most: bounds of the value, both allowed. None as a value is always allowed.
        choices: the values allowed; others may be added to it later, as to a registry.
        flag: the name on a command line, where it is another one; "" where the field is no option there.
        from_checkpoint: on a command line the default is None, which stands for what the checkpoint says.
        page: of docs/, with more about it.
        const: the value of the option without one; True for a bool.
    """

    help: str
    unit: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    choices: Collection[str] = ()
    flag: str | None = None
    from_checkpoint: bool = False
    page: str | None = None
    const: Any = None

    def check(self, name: str, value: Any) -> None:
        """Check a value of the option.

        Raises:
            UserError: it is not allowed.
        """
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise UserError(f"{name} {value!r} is unknown: use one of {', '.join(self.choices)}")
        least, most = self.at_least, self.at_most
        if least is not None and most is not None and not least <= value <= most:
            raise UserError(f"{name} is {value}: give {self._amount(least)} to {self._amount(most)}")
        if least is not None and not value >= least:
            raise UserError(f"{name} is {value}: give at least {self._amount(least)}")

    def _amount(self, number: float) -> str:
        return f"{number:g}" if self.unit is None else count(number, self.unit)

    def text(self, default: Any) -> str:
        """The help, with the choices and the default where it does not name them."""
        text = self.help
        if not all(choice in text for choice in self.choices):
            text += f" One of {', '.join(self.choices)}."
        return text if default is None else f"{text} Default: {default}."


def option(default: Any, help: str, **words: Any) -> Any:
    """A dataclass field that is an option; `words` are those of `Option`."""
    return _field(default, Option(help=help, **words))


class _Help(str):
    """A help text that knows its declaration: transformers' HfArgumentParser gives all metadata to argparse."""

    said: Option


def _field(default: Any, said: Option) -> Any:
    text = _Help(said.help.replace("%", "%%"))
    text.said = said
    optional = {} if said.const is None else {"nargs": "?", "const": said.const}
    return field(default=default, metadata={"help": text, **optional})


def declared_option(f: Field) -> Option | None:
    """What a field of a dataclass says of itself, None where it is no option of ours."""
    return getattr(f.metadata.get("help"), "said", None)


def from_config(config: type, name: str, **changes: Any) -> Any:
    """A field that is declared as the field `name` of another dataclass, but for `changes` (`default`, help ...).

    What is the checkpoint's by default is None here.
    """
    declared = config.__dataclass_fields__[name]  # type: ignore[attr-defined]
    default, said = _of_command_line(declared)
    default = changes.pop("default", default)
    return _field(default, replace(said, flag=None, **changes))


def _of_command_line(declared: Field) -> tuple[Any, Option]:
    """Default and declaration of a field where a checkpoint may have the last word."""
    said = declared_option(declared)
    assert said is not None
    if not said.from_checkpoint:
        return declared.default, said
    text = f"{said.help} Default: the checkpoint's, else {declared.default}."
    return None, replace(said, help=text, from_checkpoint=False)


def options_of(config: type, names: Iterable[str] = ()) -> list[tuple[str, Field, Option]]:
    """(name on a command line, field, option) of each option of a dataclass, or of those of its fields `names`."""
    found = []
    for f in fields(config):
        declared = declared_option(f)
        if declared is not None and declared.flag != "" and (not names or f.name in names):
            found.append((declared.flag or f.name, f, declared))
    return found


def check_options(values: Any, prefix: str = "") -> None:
    """Checks each option of a dataclass's instance by its declaration.

    Args:
        prefix: of the names in messages, `--` for a command line.

    Raises:
        UserError: names the option and its value.
    """
    for f in fields(values):
        declared = declared_option(f)
        if declared is not None:
            declared.check(prefix + (declared.flag or f.name), getattr(values, f.name))


def make(config: type[_T], values: Mapping[str, Any], **changes: Any) -> _T:
    """A config from options by their names on a command line; where one is missing or None, its default.

    Raises:
        UserError: a value is not allowed.
    """
    given = {}
    for name, f, said in options_of(config):
        if f.name not in changes and (value := values.get(name)) is not None:
            said.check(f"--{name}", value)
            given[f.name] = value
    return config(**given | changes)


# --- command lines --------------------------------------------------------------------------------


def add_options(parser: Any, config: type, *names: str, **defaults: Any) -> None:
    """Adds the options of a dataclass to an argparse parser or a group of one.

    Args:
        names: of the fields; all of them if none is given.
        defaults: of this parser, where they are others.
    """
    hints = get_type_hints(config)
    for name, f, _ in options_of(config, names):
        default, said = _of_command_line(f)
        default = defaults.get(f.name, default)
        kinds = {kind for kind in (hints[f.name], *get_args(hints[f.name])) if isinstance(kind, type)}
        words: dict[str, Any] = {"type": str, "metavar": "VALUE"}
        if bool in kinds:
            words = {"type": boolean, "metavar": "True|False", "nargs": "?", "const": True}
        elif said.const is not None:
            words |= {"nargs": "?", "const": said.const}
        elif kinds & {int, float}:
            words = {"type": int if int in kinds else float, "metavar": (said.unit or "number").upper()}
        add_argument(parser, name, default=default, help=said.text(default).replace("%", "%%"), **words)


class HelpFormatter(argparse.HelpFormatter):
    """A usage line of what has to be given, and `[options]` for the rest, which follow in their groups."""

    def add_usage(self, usage: Any, actions: Iterable[argparse.Action], groups: Any, prefix: Any = None) -> None:
        actions = list(actions)
        shown = [a for a in actions if a.required or not a.option_strings]
        if any(a.option_strings and not a.required and a.dest != "help" for a in actions):
            shown.insert(0, argparse.Action([], "options", metavar="[options]"))
        super().add_usage(usage, shown, groups, prefix)


def add_argument(parser: Any, name: str, **words: Any) -> None:
    """An option by its name with `_`; written with `-` it is taken as well, and not shown."""
    parser.add_argument(f"--{name}", **words)
    if "_" in name:
        words = {"dest": name, **words, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS, "required": False}
        parser.add_argument(f"--{name.replace('_', '-')}", **words)


def boolean(text: str) -> bool:
    """Of a command line's word.

    Raises:
        argparse.ArgumentTypeError: it is neither yes nor no.
    """
    words = {"true": True, "t": True, "yes": True, "y": True, "1": True}
    words |= {"false": False, "f": False, "no": False, "n": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"give True or False, not {text!r}")
    return words[text.lower()]


def unknown_option(word: str, known: Iterable[str], program: str) -> str:
    """The message for an option that `program` does not have, with the nearest of those that it has.

    Near are names of nearly its letters, else those that it abbreviates (`lr`) or is a part of (`epochs`).
    """
    name, known = word.partition("=")[0].lstrip("-").replace("-", "_"), list(known)
    near = difflib.get_close_matches(name, known, n=1) or [
        other
        for other in known
        if f"_{name}_" in f"_{other}_" or name == "".join(part[:1] for part in other.split("_"))
    ]
    meant = " or ".join(f"--{other}" for other in near[:3])
    return f"unknown option {word!r}: " + (f"did you mean {meant}?" if near else f"{program} --help lists them all")


def count(number: float, things: str) -> str:
    """`1 rank`, `2,048 ranks`: a number with its noun, given in the plural."""
    if number == 1:
        things = things.removesuffix("es") if things.endswith(("sses", "ches")) else things.removesuffix("s")
    return f"{number:,} {things}"
