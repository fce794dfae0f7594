"""The command `internvl-pack`: finds a command's module by its name and runs it.

A command is a module `internvl_pack/commands/<name>.py` (`_` for `-`) with `HELP: str`, `configure(parser)` and
`run(args) -> int`, or `main(argv) -> int` where it parses its options itself. Only the chosen one is imported in full;
the list of `--help` reads each module's HELP without importing it, so that help stays quick although commands import
torch.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .errors import UserError
from .options import HelpFormatter, unknown_option

COMMANDS = Path(__file__).resolve().parent / "commands"


class Parser(argparse.ArgumentParser):
    """Answers a mistake with one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 fine, 1 the command found something wrong, 2 a user's mistake."""
    argv = list(sys.argv[1:] if argv is None else argv)
    helps = command_helps()
    parser = Parser(prog="internvl-pack", description="Exact, resumable sequence packing for vision-language training.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    module = None
    for name, text in helps.items():
        wanted = name == chosen
        subparser = commands.add_parser(
            name,
            help=text,
            description=text,
            add_help=wanted,
            allow_abbrev=False,
            formatter_class=HelpFormatter,
        )
        if wanted:
            module = importlib.import_module(f"internvl_pack.commands.{name.replace('-', '_')}")
            if not hasattr(module, "main"):
                module.configure(subparser)
    try:
        if chosen is not None and module is not None and hasattr(module, "main"):
            code = module.main(argv[argv.index(chosen) + 1 :])
        else:
            args, rest = parser.parse_known_args(argv)
            if rest:
                if not rest[0].startswith("-"):
                    raise UserError(f"{rest[0]!r} is one word too many: internvl-pack {chosen} --help lists them all")
                known = [option.lstrip("-") for option in commands.choices[str(chosen)]._option_string_actions]
                raise UserError(unknown_option(rest[0], known, f"internvl-pack {chosen}"))
            assert module is not None, "argparse accepts known commands only"
            code = module.run(args)
        sys.stdout.flush()  # a closed pipe shows here, not after the interpreter has gone
        return code
    except UserError as error:
        print(f"internvl-pack: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("internvl-pack: interrupted", file=sys.stderr)
        return 130


def command_helps() -> dict[str, str]:
    """Name and one line of help of every command, in alphabetical order, without importing any."""
    helps = {}
    for path in sorted(COMMANDS.glob("*.py")):
        if not path.stem.startswith("_"):
            found = re.search("^HELP = (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert found, f"{path.name} has no HELP"
            helps[path.stem.replace("_", "-")] = ast.literal_eval(found[1])
    return helps


if __name__ == "__main__":
    sys.exit(main())
