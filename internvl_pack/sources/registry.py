"""Kinds of sources that a meta file names as `source`, found by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TypeVar

from ..errors import UserError
from ..plugins import VARIABLE, add_to, find_in, load_plugins
from .addresses import is_remote
from .base import Source
from .hf import open_saved_dataset
from .meta import DatasetSpec
from .names import meant

# Options that are paths: relative ones stand against the meta file's folder.
PATH_OPTIONS = ("path", "root")

_KINDS: dict[str, Callable[..., Source]] = {"datasets": open_saved_dataset}

_Factory = TypeVar("_Factory", bound=Callable[..., Source])


def register_source(kind: str) -> Callable[[_Factory], _Factory]:
    """Register a factory, or a subclass of `Source`, under the name that meta files write as `source`.

    It is called as `factory(name, **options)` with the entry's name and `options`. Relative paths in them are the
    factory's business, except `path` and `root`, which stand against the meta file's folder.

    Raises:
        UserError: another factory has the name.
    """
    return lambda factory: add_to(_KINDS, "source", kind, factory)


def known_sources() -> tuple[str, ...]:
    """The kinds that a meta file may name as `source`."""
    load_plugins()
    return tuple(sorted(_KINDS))


def open_registered(spec: DatasetSpec) -> Source:
    """The source that an entry with `source` describes.

    Raises:
        UserError: the kind is unknown, does not take the entry's options, or gives what is no source.
    """
    assert spec.source is not None
    where = f"{spec.meta_file or 'meta file'}: dataset {spec.name!r}"
    factory = find_in(_KINDS, spec.source)
    if factory is None:
        raise UserError(
            f"{where}: source {spec.source!r} is unknown (known: {', '.join(known_sources())}): name the module that "
            f"registers it in {VARIABLE}"
        )
    options = dict(spec.options)
    for key in PATH_OPTIONS:
        if isinstance(path := options.get(key), str) and path and not is_remote(path):
            options[key] = os.path.join(os.path.dirname(spec.meta_file), path)
    signature = inspect.signature(factory)
    known = list(signature.parameters)[1:]  # the first is the name
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        for key in options:
            if key not in known:
                raise UserError(f"{where}: source {spec.source!r} has no option {key!r}{meant(key, known)}")
    try:
        signature.bind(spec.name, **options)
    except TypeError as error:
        raise UserError(f"{where}: 'options' of source {spec.source!r}: {error}") from None
    source = factory(spec.name, **options)
    if not isinstance(source, Source):
        raise UserError(f"{where}: source {spec.source!r} gives a {type(source).__name__}, not a Source")
    if source.name != spec.name:
        raise UserError(
            f"{where}: source {spec.source!r} calls itself {source.name!r}: its factory must keep the name it is given"
        )
    return source
