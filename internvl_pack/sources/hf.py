"""Samples of anything with `__len__` and `__getitem__` that gives dicts: a Hugging Face `Dataset`, a list, your own.

    source = DatasetSource("charts", datasets.load_from_disk("charts"))

A row is a record in any form that `normalised` reads. An image is a PIL image, compressed bytes, {"bytes": ..., "path":
...} as the datasets library stores it, a `data:` URI, or a path (str or Path) below `root`.

Columns of the datasets library's `Image` type are read without decoding. The look-ahead keeps no bytes: a reference
names row and place and reads the row again. A process keeps the row that it read last, since a sample's images are
read one after the other.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import struct
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from ..errors import SampleError, UserError
from .base import RawSample, Source, own_id
from .content import new_hash
from .image_refs import MAX_IMAGE_BYTES, DataRef, FileRef, FolderResolver, ImageRef, ReadsBytes
from .names import is_data_uri, meant
from .normalise import ANSWERS, IMAGES, TURNS, as_list, normalised
from .tables import is_saved, is_table, no_table

_FINGERPRINT_ROWS = 16
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")


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
        conversations: key of the turns; None looks for `conversations` and `messages`.
        image: key of the images; None looks for `image` and `images`.

    Raises:
        UserError: `dataset` has no length, cannot be read by row, or has no such column.
    """

    def __init__(
        self,
        name: str,
        dataset: Rows,
        *,
        root: str = "",
        conversations: str | None = None,
        image: str | None = None,
    ) -> None:
        if isinstance(dataset, Mapping):
            raise UserError(f"dataset {name!r} is a mapping of {', '.join(map(str, dataset))}: give one split of it")
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"dataset {name!r}: {type(dataset).__name__} has no length or no rows by number; a streamed dataset "
                "must be saved first (load_dataset without streaming=True)"
            )
        _check_columns(name, dataset, conversations, image)
        self.name = name
        self._rows = _undecoded(dataset)
        self._conversations = conversations
        self._image = image
        self._resolver = FolderResolver(root)
        self._last: tuple[int, dict[str, Any]] | None = None  # the record read last, with its row

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}

    def __len__(self) -> int:
        return len(self._rows)

    def origin(self, row: int) -> str:
        return f"{self.name}:row {row}"

    def read(self, row: int) -> RawSample:
        self.check_row(row)
        data = dict(self._record(row))
        if images := as_list(data.pop("image", None)):
            data["image"] = [f"#{place}" for place in range(len(images))]
        return RawSample(self.sample_id(row), own_id(data), self.origin(row), data, partial(self.resolve, row))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the length and of the turns of 16 rows spread over the dataset."""
        digest = hashlib.sha256(str(len(self)).encode())
        count = min(len(self), _FINGERPRINT_ROWS)
        for step in range(count):
            digest.update(self._turns_as_json(step * (len(self) - 1) // max(1, count - 1)))
        return digest.hexdigest()[:16]

    @cached_property
    def content(self) -> str:
        """Of a dataset of the datasets library: a hash of all its columns, of images and bytes the lengths alone.

        It reads all text once, about a GB a second. Of other rows: what `Source.content` says.
        """
        table = _table_of(self._rows)
        return super().content if table is None else _mark_of_table(*table)

    def _turns_as_json(self, row: int) -> bytes:
        try:
            record = self._record(row)
            turns = record.get("conversations", [record.get(name) for name in ANSWERS])
        except Exception as error:  # a bad row, which is quarantined when it is read; here it must only be the same
            turns = type(error).__name__
        return json.dumps(turns, sort_keys=True, default=lambda value: type(value).__name__).encode()

    def _record(self, row: int) -> dict[str, Any]:
        """A row as `normalised` gives it; its images are what the row holds."""
        last = self._last
        if last is None or last[0] != row:
            record = self._rows[row]
            if not isinstance(record, Mapping):
                what = f"the row is a {type(record).__name__}, not a dict"
                raise SampleError("not_an_object", what, self.origin(row))
            self._last = last = (row, normalised(self._with_known_names(record)))
        return last[1]

    def _with_known_names(self, record: Mapping[str, Any]) -> dict[str, Any]:
        data = dict(record)
        for chosen, names in ((self._conversations, TURNS), (self._image, IMAGES)):
            if chosen is not None:
                found = data.pop(chosen, None)
                data = {key: value for key, value in data.items() if key not in names} | {names[0]: found}
        return data

    def resolve(self, row: int, name: str) -> ImageRef:
        """What a row's record calls `name`: `#0` is its first image, which is read when its bytes are needed."""
        if not (name.startswith("#") and name[1:].isdecimal()):  # a video's name, or one of the user's own fields
            return self._resolver(name)
        place = int(name[1:])
        image = as_list(self._record(row)["image"])[place]
        if isinstance(image, Mapping) and image.get("bytes") is None:
            image = image.get("path")
        if is_data_uri(image):
            return DataRef(image, place + 1)
        if isinstance(image, (str, os.PathLike)):
            return self._resolver(os.fspath(image))
        file = _file_of(image)
        return _RowImage(self, row, place) if file is None else FileRef(file)

    def image_bytes(self, row: int, place: int, *, head: bool = False) -> bytes:
        """Compressed bytes of an image that is no file; of one that is a PIL image, by `head`, no pixels.

        Raises:
            SampleError: it is none of what an image may be.
        """
        image = as_list(self._record(row)["image"])[place]
        what, origin = f"image {place + 1}", self.origin(row)
        if isinstance(image, Mapping):
            image = image.get("bytes")
        if _is_pillow(image):
            return _png_head(image) if head else _as_png(image)
        if not isinstance(image, (bytes, bytearray, memoryview)):
            raise SampleError(
                "image_field",
                f"{what} is a {type(image).__name__}, not a PIL image, bytes, a dict of them or a path",
                origin,
            )
        if not len(image):
            raise SampleError("image_empty", f"{what} has 0 bytes", origin)
        if len(image) > MAX_IMAGE_BYTES:
            raise SampleError("image_too_many_bytes", f"{what}: {len(image)} bytes", origin)
        return bytes(image)


@dataclass(frozen=True)
class _RowImage(ReadsBytes):
    """An image inside a row."""

    source: DatasetSource
    row: int
    place: int

    @property
    def name(self) -> str:
        return f"{self.source.origin(self.row)}, image {self.place + 1}"

    def _read(self, limit: int | None) -> bytes:
        return self.source.image_bytes(self.row, self.place, head=limit is not None)[:limit]


def _check_columns(name: str, dataset: Any, conversations: str | None, image: str | None) -> None:
    """Check that a table has the columns that are named, and one with turns or answers.

    Raises:
        UserError: it has not.
    """
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list) or _has_transform(dataset):
        return
    for option, chosen in (("conversations", conversations), ("image", image)):
        if chosen is not None and chosen not in columns:
            raise UserError(f"dataset {name!r}: option {option!r}: no column {chosen!r}{meant(chosen, columns)}")
    if conversations is None and not any(key in columns for key in (*TURNS, *ANSWERS)):
        near = [column for column in columns if "did you mean" in meant(column, TURNS, cutoff=0.75)]
        raise UserError(
            f"dataset {name!r}: no column {' or '.join(map(repr, TURNS))} (there are {', '.join(columns)}): name that "
            'of the turns in the meta file: {"source": "datasets", "options": {"path": ..., "conversations": '
            f'"{near[0] if near else "..."}"}}}}'
        )


# -- Pillow's images -------------------------------------------------------------------------------------


def _is_pillow(image: Any) -> bool:
    return hasattr(image, "save") and hasattr(image, "getexif")


def _file_of(image: Any) -> str | None:
    """The file that a PIL image was opened from and has not been read from yet: forked workers share its position."""
    name = getattr(image, "filename", None)
    if getattr(image, "fp", None) is None or not isinstance(name, str) or image.tell():
        return None
    return name if os.path.isfile(name) else None


def _as_png(image: Any) -> bytes:
    """A PIL image as it stands, without loss; its EXIF goes with it, so that it is turned upright as a file is."""
    stream, exif = io.BytesIO(), image.getexif()
    if image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    image.save(stream, "PNG", compress_level=0, exif=exif)  # it lives for a moment only
    return stream.getvalue()


def _png_head(image: Any) -> bytes:
    """What `_as_png` begins with: one pixel's PNG with the size (big-endian, bytes 16 to 24) of the whole."""
    from PIL import Image

    pixel = Image.new("L", (1, 1))
    pixel.getexif().update(image.getexif())
    png = _as_png(pixel)
    header = png[12:16] + struct.pack(">II", *image.size) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]


# -- the datasets library ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TableRows:
    """Rows of a dataset of the datasets library as its table holds them: no image is decoded, at whatever depth."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.dataset[row].to_pylist()[0]


def _undecoded(dataset: Any) -> Any:
    """A dataset of the datasets library with its images left compressed; any other as it is.

    So is one with a transform of the user's, which may want pixels.
    """
    if not isinstance(getattr(dataset, "features", None), Mapping) or not hasattr(dataset, "with_format"):
        return dataset
    return dataset if _has_transform(dataset) else _TableRows(dataset.with_format("arrow"))


def _has_transform(dataset: Any) -> bool:
    """Whether rows pass a function of the user's, after which columns may be others."""
    return getattr(dataset, "format", {}).get("type") == "custom"


def _table_of(rows: Any) -> tuple[Any, Any] | None:
    """(Arrow table, table of the chosen rows' numbers or None) of a dataset of the datasets library."""
    dataset = rows.dataset if isinstance(rows, _TableRows) else rows
    table, chosen = getattr(dataset, "data", None), getattr(dataset, "_indices", None)
    if not hasattr(dataset, "features") or not hasattr(table, "column_names"):
        return None
    return table, chosen


def _mark_of_table(table: Any, chosen: Any) -> str:
    """A hash of the values of Arrow tables, the same however they are cut into chunks."""
    hashes: dict[str, Any] = {}
    for part in (table,) if chosen is None else (table, chosen):
        for name in part.column_names:
            for chunk in part.column(name).chunks:
                _hash_array(hashes, name, chunk)
    digest = new_hash()
    for place in sorted(hashes):
        digest.update(f"{place}\0".encode() + hashes[place].digest())
    return digest.hexdigest()


def _hash_array(hashes: dict[str, Any], place: str, array: Any) -> None:
    """Add an array's values to the hashes of its leaves, by their places: `conversations[].value`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def add(what: str, data: Any) -> None:
        hashes.setdefault(place + what, new_hash()).update(data)

    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _hash_array(hashes, place, array.storage)
    add("?", array.is_valid().to_numpy(zero_copy_only=False))
    if pa.types.is_struct(kind):
        for index, child in enumerate(array.flatten()):
            _hash_array(hashes, f"{place}.{kind.field(index).name}", child)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        add("#", pc.fill_null(pc.list_value_length(array), 0).to_numpy())
        _hash_array(hashes, f"{place}[]", array.flatten())
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        add("#", pc.fill_null(pc.binary_length(array), 0).to_numpy())
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        add("#", pc.fill_null(pc.binary_length(array), 0).to_numpy())
        text = array.drop_null().cast(pa.large_string())
        if len(text):
            _, offsets, data = text.buffers()
            ends = np.frombuffer(offsets, np.int64)[text.offset :]
            add("", memoryview(data)[ends[0] : ends[len(text)]])
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        add("", pc.fill_null(array, 0).to_numpy())
    else:  # dates, decimals, categories: few and short
        add("", "\0".join(map(str, array.to_pylist())).encode("utf-8", "surrogatepass"))
    return None


def open_saved_dataset(
    name: str,
    path: str,
    *,
    split: str | None = None,
    root: str = "",
    conversations: str | None = None,
    image: str | None = None,
) -> DatasetSource:
    """Source kind `datasets` of a meta file.

    Args:
        path: of a folder that `save_to_disk` wrote, a Parquet or Arrow file, a folder of Parquet files, as those of
            the hub, or a pattern of Parquet files (`data/train-*.parquet`).
        split: of a folder that holds several.
        root, conversations, image: see `DatasetSource`.

    Raises:
        UserError: the datasets library is missing, or nothing it reads is there.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"dataset {name!r}: Parquet, Arrow and saved Datasets need the datasets library: pip install "
            "'internvl-pack[datasets]' (in a checkout: pip install -e '.[datasets]')"
        ) from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if not is_table(path):
        raise UserError(f"dataset {name!r}: {path} {no_table(path)}")
    try:
        if path.endswith(".arrow"):
            found: Any = datasets.Dataset.from_file(path)
        elif is_saved(path):
            found = datasets.load_from_disk(path)
        elif os.path.isdir(path):  # splits by the names of files and folders, as the hub finds them
            found = datasets.load_dataset("parquet", data_dir=path)
            found = found if split is not None or len(found) > 1 else next(iter(found.values()))
        else:
            found = datasets.Dataset.from_parquet([path] if os.path.exists(path) else sorted(glob.glob(path)))
    except Exception as error:  # the library's own kinds, pyarrow's and the system's
        raise UserError(f"dataset {name!r}: {path} cannot be read: {str(error) or type(error).__name__}") from error
    if split is not None:
        if not isinstance(found, Mapping) or split not in found:
            there = f"has {', '.join(found)}" if isinstance(found, Mapping) else "is not split"
            raise UserError(f"dataset {name!r}: no split {split!r}: {path} {there}")
        found = found[split]
    elif isinstance(found, Mapping):
        one = f"folder, such as {os.path.join(path, next(iter(found)))}," if is_saved(path) else "files' names"
        raise UserError(
            f"dataset {name!r}: {path} has {', '.join(found)}: choose one by its {one} or the option 'split' "
            'of {"source": "datasets", "options": {"path": ..., "split": ...}}'
        )
    return DatasetSource(name, found, root=root, conversations=conversations, image=image)
