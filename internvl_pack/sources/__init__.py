"""From a meta file to samples by row: annotation files of JSON lines, WebDataset tar shards, kinds of your own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..errors import UserError
from ..plugins import load_plugins
from .base import RawSample, Source
from .meta import DatasetSpec, load_meta
from .refs import FileRef, ImageRef, SliceRef

__all__ = [
    "DatasetSpec",
    "FileRef",
    "ImageRef",
    "RawSample",
    "SliceRef",
    "Source",
    "known_sources",
    "load_meta",
    "open_source",
    "register_source",
]

SourceFactory = Callable[..., Source]
_KINDS: dict[str, SourceFactory] = {}


def register_source(kind: str) -> Callable[[SourceFactory], SourceFactory]:
    """Register a factory under the name that meta files write as `source`.

    The factory is called as `factory(name, **options)` with the entry's `options`; relative paths in them are the
    factory's business, except `path`, which stands against the meta file's folder.

    Raises:
        UserError: the kind is taken.
    """

    def register(factory: SourceFactory) -> SourceFactory:
        if _KINDS.get(kind, factory) is not factory:
            raise UserError(f"source {kind!r} is registered already: choose another name")
        _KINDS[kind] = factory
        return factory

    return register


def known_sources() -> tuple[str, ...]:
    """The kinds that a meta file may name as `source`."""
    return tuple(sorted(_KINDS))


@register_source("datasets")
def _datasets(name: str, **options: Any) -> Source:
    from .hf import open_saved_dataset

    return open_saved_dataset(name, **options)


def open_source(spec: DatasetSpec) -> Source:
    """Open one dataset of a meta file and say once, as warnings, what is odd or broken in it.

    Uses the index files beside the data (`internvl-pack index`) where they are current, else indexes in memory.

    Raises:
        UserError: a file is missing, unreadable or of a kind that cannot be read, such as a JSON array; or the kind
            of source is unknown, or does not take the entry's options.
    """
    from .jsonl import JsonlSource
    from .shards import ShardSource

    if spec.source is not None:
        source = _open_registered(spec, spec.source)
    elif spec.annotation is not None:
        source = JsonlSource(spec.name, spec.annotation, root=spec.root)
    else:
        source = ShardSource(spec.name, spec.shards or ())
    if spec.length is not None and spec.length != len(source):
        source.warnings = (
            *source.warnings,
            f"{spec.meta_file or 'meta file'}: 'length' says {spec.length}, there are {len(source)} rows; "
            "the real count is used",
        )
    source.log_warnings()
    return source


def _open_registered(spec: DatasetSpec, kind: str) -> Source:
    where = f"{spec.meta_file or 'meta file'}: dataset {spec.name!r}"
    if kind not in _KINDS:
        load_plugins()
    if kind not in _KINDS:
        raise UserError(
            f"{where}: source {kind!r} is unknown (known: {', '.join(known_sources())}): name the module that "
            "registers it in INTERNVL_PACK_PLUGINS"
        )
    options = dict(spec.options)
    if isinstance(options.get("path"), str):
        options["path"] = os.path.join(os.path.dirname(spec.meta_file), options["path"])
    try:
        return _KINDS[kind](spec.name, **options)
    except TypeError as error:
        raise UserError(f"{where}: source {kind!r} with options {sorted(options)}: {error}") from error
