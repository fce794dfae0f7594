"""From a meta file to samples by row: annotation files of JSON lines, WebDataset tar shards, kinds of your own."""

from __future__ import annotations

from ..options import count
from .base import RawSample, Source
from .image_refs import FileRef, FolderResolver, ImageRef, SliceRef
from .meta import DatasetSpec, load_meta
from .registry import known_sources, open_registered, register_source

__all__ = [
    "DatasetSpec",
    "FileRef",
    "FolderResolver",
    "ImageRef",
    "RawSample",
    "SliceRef",
    "Source",
    "known_sources",
    "load_meta",
    "open_source",
    "register_source",
]


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
        source = open_registered(spec)
    elif spec.annotation is not None:
        source = JsonlSource(spec.name, spec.annotation, root=spec.root, hosts=spec.hosts)
    else:
        source = ShardSource(spec.name, spec.shards or (), caption=spec.caption)
    if spec.length is not None and spec.length != len(source):
        source.warnings = (
            *source.warnings,
            f"{spec.meta_file or 'meta file'}: 'length' says {spec.length}, it has {count(len(source), 'rows')}; "
            "the real count is used",
        )
    source.log_warnings()
    return source
