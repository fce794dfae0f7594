"""From a meta file to samples by row: annotation files of JSON lines and WebDataset tar shards."""

from __future__ import annotations

from .base import RawSample, Source
from .meta import DatasetSpec, load_meta
from .refs import FileRef, ImageRef, SliceRef

__all__ = ["DatasetSpec", "FileRef", "ImageRef", "RawSample", "SliceRef", "Source", "load_meta", "open_source"]


def open_source(spec: DatasetSpec) -> Source:
    """Open one dataset of a meta file and say once, as warnings, what is odd or broken in it.

    Uses the index files beside the data (`internvl-pack index`) where they are current, else indexes in memory.

    Raises:
        UserError: a file is missing, unreadable or of a kind that cannot be read, such as a JSON array.
    """
    from .jsonl import JsonlSource
    from .shards import ShardSource

    if spec.annotation is not None:
        source: Source = JsonlSource(spec.name, spec.annotation, root=spec.root)
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
