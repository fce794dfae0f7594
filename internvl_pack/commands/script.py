"""`internvl-pack script FILE.sh`: the command that does here what a launch script of InternVL's does."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from ..errors import UserError

HELP = "Show the command for a launch script of InternVL's, and what of it was translated or left out."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "script", metavar="FILE.sh", help="the launch script; it is read, not run. Variables that are set count"
    )


def run(args: argparse.Namespace) -> int:
    translate_script = import_module("internvl_pack.train.script").translate_script
    try:
        text = Path(args.script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"FILE.sh {args.script}: cannot be read: {error}") from None
    print(translate_script(args.script, text))
    return 0
