"""A preset with its data in it: token ids, labels and compressed images beside the packs.

    tokens.parquet                    a row a pack, in the order of packs.parquet: ids, labels, and for each image
                                      which segment it belongs to, its grid, and where its bytes are
    images-<epoch>-<lane>-<part>.tar  WebDataset shards: a key a pack, with a `.json` that says what it holds and
                                      the image files as they were, `<pack>.<image>.<ending>`

Text-only data is then complete without its source: packed fine-tuning from one file. Images stay compressed and are
decoded while training, as ever. Each lane is written by one process; finished lanes are kept when it is stopped.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .encode.sample import Encoded, Encoder, PlannedImage
from .encode.tiles import TileGrid
from .errors import SampleError, UserError, costs_one_sample
from .preset import PRESET, PlannedFragment, Preset, file_facts, group_starts, write_json
from .records import Record
from .scan import arrow_schema, parallel, parquet
from .sources import DatasetSpec, SliceRef, Source
from .sources.files import stamp_of
from .stream import make_segment

TOKENS = "tokens.parquet"
PACKS_PER_GROUP = 16
"""Packs of a row group: some 1 MiB of ids, what is read to get at one of them."""
SHARD_BYTES = 1 << 30
"""Image bytes after which a lane's next shard begins."""

_COLUMNS = {
    "pack": "int64",
    "epoch": "int32",
    "lane": "int32",
    "turn": "int64",
    "input_ids": "list<int32>",
    "labels": "list<int32>",  # not shifted; -100 where untrained
    "cu_seqlens": "list<int32>",
    "sample_ids": "list<string>",
    "sample_loss_tokens": "list<int32>",
    "reasons": "list<string>",  # of each segment: why its sample could not be read, or null; it then has no tokens
    "details": "list<string>",
}
_IMAGE_FIELDS = ("segment", "part", "offset", "size", "width", "height", "columns", "rows", "thumbnail")
_COLUMNS |= {f"image_{name}": "list<int64>" for name in _IMAGE_FIELDS}
_NO_TILES = np.empty((0, 3, 0, 0), dtype=np.uint8)


def materialise(
    preset: Preset, sources: Sequence[Source], specs: Sequence[DatasetSpec], encoder: Encoder, *, num_workers: int = 0
) -> Iterator[int]:
    """Write the data of all packs into the preset's folder, or go on with what was stopped.

    Yields:
        packs written since the last time.

    Raises:
        UserError: the data holds videos, is not what was planned any more, or a process was killed.
    """
    if TOKENS in preset.content["files"]:
        return
    preset.check_fits(specs, sources, encoder)
    work = preset.folder / "work" / "tokens"
    work.mkdir(parents=True, exist_ok=True)
    writer = LaneWriter(preset, sources, specs, encoder, work)
    lanes = [(epoch, lane) for epoch in range(preset.epochs) for lane in range(preset.num_lanes)]
    missing = [lane for lane in lanes if not _lane_path(work, *lane).exists()]
    yield sum(preset.num_packs(*lane) for lane in lanes if lane not in missing)
    yield from parallel(writer, "write_lane", missing, num_workers)
    pq = parquet()
    beside = preset.folder / f"{TOKENS}.part"
    with pq.ParquetWriter(beside, arrow_schema(_COLUMNS), compression="zstd") as joined:
        for lane in lanes:
            file = pq.ParquetFile(_lane_path(work, *lane))
            for group in range(file.num_row_groups):
                joined.write_table(file.read_row_group(group))
    os.replace(beside, preset.folder / TOKENS)
    shards = sorted(preset.folder.glob("images-*.tar"))
    files = preset.content["files"] | {TOKENS: file_facts(preset.folder / TOKENS)}
    files |= {shard.name: {"bytes": shard.stat().st_size} for shard in shards}
    preset.content["files"] = files
    write_json(preset.folder / PRESET, preset.content)
    shutil.rmtree(work.parent, ignore_errors=True)


def _lane_path(work: Path, epoch: int, lane: int) -> Path:
    return work / f"tokens-{epoch:04d}-{lane:06d}.parquet"


def shard_name(epoch: int, lane: int, part: int) -> str:
    return f"images-{epoch:04d}-{lane:06d}-{part:04d}.tar"


# -- writing -------------------------------------------------------------------------------------------


class LaneWriter:
    """Writes lanes. Picklable, for workers."""

    def __init__(
        self, preset: Preset, sources: Sequence[Source], specs: Sequence[DatasetSpec], encoder: Encoder, work: Path
    ) -> None:
        self.preset, self.encoder, self.work = preset, encoder, work
        self.sources, self.specs = list(sources), list(specs)
        config = preset.config()
        parts = config.parts(specs, sources)
        self.mixtures = [config.mixture(parts, epoch) for epoch in range(preset.epochs)]

    def write_lane(self, epoch: int, lane: int) -> int:
        """Write a lane's ids and images. Returns its packs."""
        import pyarrow as pa

        path = _lane_path(self.work, epoch, lane)
        beside = path.with_name(f"{path.name}.{os.getpid()}.part")
        shards = _Shards(self.preset.folder, epoch, lane)
        count = self.preset.num_packs(epoch, lane)
        schema = arrow_schema(_COLUMNS)
        with parquet().ParquetWriter(beside, schema, compression="zstd") as writer:
            rows: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
            for turn in range(count):
                for name, value in self._row(epoch, lane, turn, shards).items():
                    rows[name].append(value)
                if len(rows["pack"]) == PACKS_PER_GROUP or turn == count - 1:
                    writer.write_table(pa.table(rows, schema=schema))
                    rows = {name: [] for name in _COLUMNS}
        shards.close()
        os.replace(beside, path)
        return count

    def _row(self, epoch: int, lane: int, turn: int, shards: _Shards) -> dict[str, Any]:
        fragments = self.preset.pack(epoch, lane, turn)
        row: dict[str, Any] = {name: [] for name in _COLUMNS}
        row |= {"pack": turn * self.preset.num_lanes + lane, "epoch": epoch, "lane": lane, "turn": turn}
        row["cu_seqlens"].append(0)
        ids, labels, images = [], [], []
        for number, fragment in enumerate(fragments):
            length = 0
            row["sample_ids"].append(fragment.sample_id)
            row["sample_loss_tokens"].append(fragment.sample_loss_tokens)
            try:
                with costs_one_sample(f"sample {fragment.sample_id}"):
                    encoded = self._encoded(epoch, fragment)
                    found = [(number, image, image.ref.read()) for image in _images_of(encoded, fragment)]
            except SampleError as error:
                row["reasons"].append(error.reason)
                row["details"].append(error.told)
            else:
                row["reasons"].append(None)
                row["details"].append(None)
                segment = make_segment(encoded, fragment, _NO_TILES)
                ids.append(segment.input_ids)
                labels.append(segment.labels)
                images += found
                length = len(segment.input_ids)
            row["cu_seqlens"].append(row["cu_seqlens"][-1] + length)
        row["input_ids"] = np.concatenate(ids) if ids else []
        row["labels"] = np.concatenate(labels) if labels else []
        for (number, image, _), (part, offset, size) in zip(images, shards.add(row, images), strict=True):
            grid = image.grid
            values = (number, part, offset, size, *image.size, grid.columns, grid.rows, int(grid.thumbnail))
            for name, value in zip(_IMAGE_FIELDS, values, strict=True):
                row[f"image_{name}"].append(value)
        return row

    def _encoded(self, epoch: int, fragment: PlannedFragment) -> Encoded:
        which, index = self.mixtures[epoch].locate(fragment.position)
        encoded = self.encoder.load(self.sources[which], index, self.specs[which])
        if encoded.record.num_tokens != fragment.sample_tokens:
            raise UserError(
                f"preset {self.preset.folder} does not fit the data any more: {fragment.sample_id} had "
                f"{fragment.sample_tokens} tokens and has {encoded.record.num_tokens} now: plan it again"
            )
        return encoded


def _images_of(encoded: Encoded, fragment: PlannedFragment) -> Iterator[PlannedImage]:
    first = 0
    for image in encoded.images:
        if not isinstance(image, PlannedImage):
            raise UserError(f"--materialise: {fragment.sample_id} has a video, whose frames are not kept as images")
        if fragment.tile_start <= first < fragment.tile_stop:
            yield image
        first += image.grid.num_tiles


class _Shards:
    """The tar shards of one lane; a lane without images has none."""

    def __init__(self, folder: Path, epoch: int, lane: int) -> None:
        self._folder, self._epoch, self._lane = folder, epoch, lane
        self._part = -1
        self._tar: tarfile.TarFile | None = None
        self._bytes = 0
        for left in folder.glob(f"images-{epoch:04d}-{lane:06d}-*.tar"):  # of a stopped run
            left.unlink()

    def add(self, row: dict[str, Any], images: Sequence[tuple[int, PlannedImage, bytes]]) -> list[tuple[int, int, int]]:
        """Append a pack's images. Returns (part, offset, size) of each."""
        if not images:
            return []
        if self._tar is None or self._bytes >= SHARD_BYTES:
            self.close()
            self._part += 1
            self._bytes = 0
            name = shard_name(self._epoch, self._lane, self._part)
            self._tar = tarfile.TarFile(self._folder / name, "w", format=tarfile.USTAR_FORMAT)
        key = f"{row['pack']:012d}"
        segments = [{"sample_id": name, "images": []} for name in row["sample_ids"]]
        members = []
        for number, (segment, _, data) in enumerate(images):
            member = f"{key}.{number:04d}.{_ending(data)}"
            segments[segment]["images"].append(member)
            members.append((member, data))
        about = {"pack": row["pack"], "lane": row["lane"], "turn": row["turn"], "segments": segments}
        places = [self._write(member, data) for member, data in [(f"{key}.json", _json(about)), *members]]
        return places[1:]

    def _write(self, name: str, data: bytes) -> tuple[int, int, int]:
        assert self._tar is not None
        info = tarfile.TarInfo(name)
        info.size = len(data)
        offset = self._tar.offset + tarfile.BLOCKSIZE  # a ustar header is one block
        self._tar.addfile(info, io.BytesIO(data))
        self._bytes += len(data)
        return self._part, offset, len(data)

    def close(self) -> None:
        if self._tar is not None:
            self._tar.close()
            self._tar = None


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _ending(data: bytes) -> str:
    """The usual ending of an image file, by its first bytes."""
    starts = {b"\x89PNG": "png", b"\xff\xd8": "jpg", b"GIF8": "gif", b"BM": "bmp", b"II*\0": "tif", b"MM\0*": "tif"}
    for start, ending in starts.items():
        if data.startswith(start):
            return ending
    return "webp" if data[8:12] == b"WEBP" else "img"


# -- reading -------------------------------------------------------------------------------------------


class PackStore:
    """Reads what `materialise` wrote. Picklable; keeps a few row groups."""

    def __init__(self, preset: Preset) -> None:
        if TOKENS not in preset.content["files"]:
            raise UserError(
                f"preset {preset.folder} holds no data of its own: give its --meta_path, or "
                "add the data by internvl-pack plan --materialise"
            )
        self.folder = preset.folder
        self.data = preset.content["data"]
        self._first_group = group_starts(preset.content["packs_per_lane"], PACKS_PER_GROUP)
        self._open()

    def _open(self) -> None:
        self._file: Any = None
        self._group = lru_cache(maxsize=4)(self._read_group)
        self._stamp = lru_cache(maxsize=None)(stamp_of)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k in ("folder", "data", "_first_group")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def row(self, epoch: int, lane: int, turn: int) -> dict[str, Any]:
        """All columns of a pack, as numpy arrays (ids, labels) and lists."""
        group, at = divmod(turn, PACKS_PER_GROUP)
        columns = self._group(os.getpid(), self._first_group[epoch, lane] + group)
        arrays = ("input_ids", "labels")
        row = {name: columns[name][at].as_py() for name in columns if name not in arrays}
        return row | {name: columns[name][at].values.to_numpy() for name in arrays}

    def _read_group(self, pid: int, group: int) -> Any:
        if self._file is None or self._file[0] != pid:
            self._file = (pid, parquet().ParquetFile(self.folder / TOKENS))
        table = self._file[1].read_row_group(group, use_threads=False)
        return {name: table[name].combine_chunks() for name in table.column_names}

    def segment(self, row: dict[str, Any], number: int, fragment: PlannedFragment, *, data_augment: bool) -> Encoded:
        """Segment `number` of a pack as a sample of its own, its images undecoded.

        Raises:
            SampleError: its sample could not be read when the preset was materialised.
        """
        if row["reasons"][number] is not None:
            raise SampleError(row["reasons"][number], row["details"][number])
        start, stop = row["cu_seqlens"][number : number + 2]
        record = Record(fragment.sample_id, stop - start, fragment.num_tiles, row["sample_loss_tokens"][number])
        images = []
        for values in zip(*(row[f"image_{name}"] for name in _IMAGE_FIELDS), strict=True):
            image = dict(zip(_IMAGE_FIELDS, values, strict=True))
            if image["segment"] == number:
                path = str(self.folder / shard_name(row["epoch"], row["lane"], image["part"]))
                ref = SliceRef(path, image["offset"], image["size"], self._stamp(path), fragment.sample_id)
                grid = TileGrid(image["columns"], image["rows"], bool(image["thumbnail"]))
                images.append(PlannedImage(ref, (image["width"], image["height"]), grid))
        return Encoded(record, row["input_ids"][start:stop], row["labels"][start:stop], tuple(images), data_augment)
