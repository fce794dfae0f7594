"""Modules of the user's own that register sources and chat templates, imported when an unknown name is asked for.

    INTERNVL_PACK_PLUGINS=my_sources,my_templates internvl-pack validate meta.json

The variable reaches every process that a launcher starts. A meta file cannot name a module: data runs no code.
"""

from __future__ import annotations

import importlib
import os

from .errors import UserError

VARIABLE = "INTERNVL_PACK_PLUGINS"


def load_plugins() -> None:
    """Import the modules named in INTERNVL_PACK_PLUGINS, separated by commas; each runs once a process.

    Raises:
        UserError: one of them is not there. What a module itself raises is passed on as it is.
    """
    for name in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise  # the module is there and lacks another
            raise UserError(
                f"{VARIABLE}: there is no module {name!r}: add its folder to PYTHONPATH or install it"
            ) from None
