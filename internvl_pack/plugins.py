"""Registries of what users may add, and the modules of theirs that add to them.

    INTERNVL_PACK_PLUGINS=my_sources,my_templates internvl-pack validate meta.json

The modules are imported when an unknown name is asked for. The variable reaches every process that a launcher starts.
A meta file cannot name a module: data runs no code.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .errors import UserError

VARIABLE = "INTERNVL_PACK_PLUGINS"

_Factory = TypeVar("_Factory", bound=Callable[..., Any])


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


def find_in(registry: Mapping[str, _Factory], name: str | None) -> _Factory | None:
    """The factory of this name, those of plugins included; None where there is none."""
    if name is not None and name not in registry:
        load_plugins()
    return registry.get(name or "")


def add_to(registry: dict[str, Any], what: str, name: str, factory: _Factory) -> _Factory:
    """Enter a factory. One defined anew, as a notebook's cell that runs again does, takes its own place.

    Raises:
        UserError: another one has the name.
    """
    there = registry.get(name)
    if there is not None and _home(there) != _home(factory):
        raise UserError(f"{what} {name!r} is registered already, by {'.'.join(_home(there))}: choose another name")
    registry[name] = factory
    return factory


def _home(factory: Any) -> tuple[str, str]:
    kind = factory if hasattr(factory, "__qualname__") else type(factory)
    return str(kind.__module__), kind.__qualname__
