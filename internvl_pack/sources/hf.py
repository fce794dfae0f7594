"""Samples of anything with `__len__` and `__getitem__` that gives dicts: a Hugging Face `Dataset`, a list, your own.

    source = DatasetSource("charts", datasets.load_from_disk("charts"))

A row holds `conversations` and, under `image` or `images`, nothing, one image or a list of them. An image is a PIL
image, compressed bytes, {"bytes": ..., "path": ...} as the datasets library stores it, or a path below `root`.

Columns of the datasets library's `Image` type are read without decoding. The look-ahead keeps no bytes: a reference
names row and place and reads the row again.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from ..errors import SampleError, UserError
from .base import RawSample, Source, own_id
from .refs import MAX_IMAGE_BYTES, FolderResolver, ImageRef

_FINGERPRINT_ROWS = 16


class Rows(Protocol):
    """What a `DatasetSource` reads: rows in random access, the same ones every time."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class DatasetSource(Source):
    """The rows of `dataset` as samples. Sample ids are `<name>/<row>`.

    Args:
        name: the dataset's, the first part of every sample id.
        dataset: see the module's docstring. It is forked or pickled into workers.
        root: folder that paths are joined to.
        conversations: key of the turns: a list of {"from", "value"} or {"role", "content"} dicts.
        image: key of the images; None looks for `image`, then `images`.

    Raises:
        UserError: `dataset` has no length or cannot be read by row.
    """

    def __init__(
        self,
        name: str,
        dataset: Rows,
        *,
        root: str = "",
        conversations: str = "conversations",
        image: str | None = None,
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"dataset {name!r}: {type(dataset).__name__} has no length or no rows by number; a streamed dataset "
                "must be saved first (load_dataset without streaming=True)"
            )
        if isinstance(dataset, Mapping):
            raise UserError(f"dataset {name!r} is a mapping of {', '.join(map(str, dataset))}: give one split of it")
        self.name = name
        self._rows = _undecoded(dataset)
        self._conversations = conversations
        self._image = image
        self._resolver = FolderResolver(root)
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def sample_id(self, row: int) -> str:
        return f"{self.name}/{row}"

    def origin(self, row: int) -> str:
        return f"{self.name}:row {row}"

    def read(self, row: int) -> RawSample:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        record = self._record(row)
        images = self._images(record)
        data = {key: value for key, value in record.items() if key not in ("image", "images", self._image)}
        data["conversations"] = record.get(self._conversations)
        if images:
            data["image"] = [f"#{place}" for place in range(len(images))]
        return RawSample(self.sample_id(row), own_id(data), self.origin(row), data, _RowResolver(self, row))

    @property
    def fingerprint(self) -> str:
        """A hash of the length and of the turns of 16 rows spread over the dataset; a resume compares it."""
        if self._fingerprint is None:
            digest = hashlib.sha256(str(len(self)).encode())
            count = min(len(self), _FINGERPRINT_ROWS)
            for step in range(count):
                row = self._rows[step * (len(self) - 1) // max(1, count - 1)]
                turns = row.get(self._conversations) if isinstance(row, Mapping) else None
                digest.update(json.dumps(turns, sort_keys=True, default=repr).encode())
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def _record(self, row: int) -> Mapping[str, Any]:
        record = self._rows[row]
        if not isinstance(record, Mapping):
            raise SampleError("not_an_object", f"{self.origin(row)}: the row is a {type(record).__name__}, not a dict")
        return record

    def _images(self, record: Mapping[str, Any]) -> list[Any]:
        key = self._image or ("image" if record.get("image") is not None else "images")
        found = record.get(key)
        if found is None or found == "":
            return []
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def image_ref(self, row: int, place: int) -> ImageRef:
        """The image at a place of a row, as something that is read when its bytes are needed."""
        image = self._images(self._record(row))[place]
        if isinstance(image, Mapping) and image.get("bytes") is None:
            image = image.get("path")
        return self._resolver(image) if isinstance(image, str) else _RowImage(self, row, place)

    def image_bytes(self, row: int, place: int) -> bytes:
        """Compressed bytes of an image that is no file. Raises SampleError."""
        image = self._images(self._record(row))[place]
        where = f"{self.origin(row)}, image {place + 1}"
        if isinstance(image, Mapping):
            image = image.get("bytes")
        if hasattr(image, "save") and hasattr(image, "getexif"):
            image = _as_png(image)
        if not isinstance(image, (bytes, bytearray, memoryview)):
            raise SampleError(
                "image_field", f"{where} is a {type(image).__name__}, not a PIL image, bytes, a dict of them or a path"
            )
        data = bytes(image)
        if not data:
            raise SampleError("image_empty", f"{where} has 0 bytes")
        if len(data) > MAX_IMAGE_BYTES:
            raise SampleError("image_too_many_bytes", f"{where}: {len(data)} bytes")
        return data


@dataclass(frozen=True)
class _RowResolver:
    source: DatasetSource
    row: int

    def __call__(self, name: str) -> ImageRef:
        if not (name.startswith("#") and name[1:].isdecimal()):  # a video's name, or one of the user's own fields
            return self.source._resolver(name)
        return self.source.image_ref(self.row, int(name[1:]))


@dataclass(frozen=True)
class _RowImage:
    """An image inside a row."""

    source: DatasetSource
    row: int
    place: int

    @property
    def name(self) -> str:
        return f"{self.source.origin(self.row)}, image {self.place + 1}"

    def read(self) -> bytes:
        return self.source.image_bytes(self.row, self.place)

    def head(self, num_bytes: int) -> bytes:
        return self.read()[:num_bytes]

    def open(self) -> BinaryIO:
        return io.BytesIO(self.read())


def _as_png(image: Any) -> bytes:
    """A PIL image as it stands, without loss; its EXIF goes with it, so that it is turned upright as a file is."""
    if image.mode not in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA"):
        image = image.convert("RGB")
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=1, exif=image.getexif())
    return stream.getvalue()


def _undecoded(dataset: Any) -> Any:
    """A dataset of the datasets library with its images left compressed; any other as it is."""
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping) or not hasattr(dataset, "cast_column"):
        return dataset
    from datasets import Image

    for name, feature in features.items():
        inner = getattr(feature, "feature", None)
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(feature, list) and feature and isinstance(feature[0], Image):
            dataset = dataset.cast_column(name, [Image(decode=False)])
        elif isinstance(inner, Image):
            dataset = dataset.cast_column(name, type(feature)(Image(decode=False)))
    return dataset


def open_saved_dataset(name: str, path: str, *, split: str | None = None, **columns: Any) -> DatasetSource:
    """Source kind `datasets` of a meta file: a folder that `Dataset.save_to_disk` wrote, or a Parquet or Arrow file.

    Raises:
        UserError: the datasets library is missing, or nothing it reads is there.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"dataset {name!r}: source 'datasets' needs that library: pip install internvl-pack[datasets]"
        ) from None
    try:
        if path.endswith(".parquet"):
            found: Any = datasets.Dataset.from_parquet(path)
        elif path.endswith(".arrow"):
            found = datasets.Dataset.from_file(path)
        else:
            found = datasets.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise UserError(f"dataset {name!r}: {path} cannot be read: {error}") from None
    if split is not None:
        if not isinstance(found, Mapping) or split not in found:
            raise UserError(f"dataset {name!r}: {path} has no split {split!r}")
        found = found[split]
    return DatasetSource(name, found, **columns)
