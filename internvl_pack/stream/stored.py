"""A preset with its data in it: token ids, labels and compressed images beside the packs.

    tokens.parquet              a row a pack, in the order of packs.parquet: ids, labels, and for each image the segment
                                that it belongs to, its grid, and where its bytes are
    images-<epoch>-<part>.tar   WebDataset shards of PART_PACKS packs: a key a pack, with a `.json` that says what it
                                holds and the image files as they were, `<pack>.<image>.<ending>`

Training then needs no other data, and decodes images as it does from their files. One process writes each part, and
finished parts are kept when it is stopped.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ..batch.row import Segment
from ..encode.augment import recompress
from ..encode.headers import file_ending
from ..encode.sample import Encoded, Encoder, PlannedImage
from ..encode.tiles import TileGrid
from ..errors import SampleError, UserError, isolate_sample_errors
from ..plan.pack_file import PackRows, RowWriter, arrow_schema, parquet, write_json
from ..plan.preset import PRESET, Preset, file_facts
from ..plan.sequence import PlannedPack
from ..records import Fragment, Record
from ..samples import Samples
from ..sources import SliceRef
from ..sources.files import Stamp, stamp_of
from ..survey.workers import in_order
from .reader import SampleSegments, images_of, make_segment

TOKENS = "tokens.parquet"
# Packs of a row group: some 1 MiB of ids, what is read to get at one of them.
PACKS_PER_GROUP = 16
# Packs that one process writes at a time: whole row groups, and a shard of some 1 GB where images are many.
PART_PACKS = 1024

_COLUMNS = {
    "epoch": "int32",
    "pack": "int64",
    "input_ids": ["int32"],
    "labels": ["int32"],  # not shifted; -100 where untrained
    "cu_seqlens": ["int32"],
    "sample_ids": ["string"],
    # `reason` says why a sample could not be read: it then has no tokens, and all else is null.
    "segments": {"num_loss_tokens": "int32", "data_augment": "bool", "reason": "string", "detail": "string"},
    "images": {name: "int64" for name in ("segment", "offset", "size", "width", "height", "columns", "rows")}
    | {"thumbnail": "bool"},
}
_NO_IDS = np.empty(0, dtype=np.int32)
_NO_TILES = np.empty((0, 3, 0, 0), dtype=np.uint8)


def shard_name(epoch: int, part: int) -> str:
    return f"images-{epoch:04d}-{part:06d}.tar"


# -- writing -------------------------------------------------------------------------------------------


def materialise(preset: Preset, samples: Samples, *, num_workers: int = 0) -> Iterator[int]:
    """Write the data of all packs into the preset's folder, or go on with what was stopped.

    Yields:
        packs written since the last time, or found.

    Raises:
        UserError: the data holds videos, is not what was planned any more, or a process was killed.
    """
    if TOKENS in preset.content["files"]:
        return
    preset.check_fits(samples)
    work = preset.folder / "work"
    work.mkdir(exist_ok=True)
    parts = [(e, p) for e, count in enumerate(preset.packs_of_epochs) for p in range(-(-count // PART_PACKS))]
    missing = [part for part in parts if not _part_path(work, *part).exists()]
    yield sum(len(_packs_of(preset, *part)) for part in parts if part not in missing)
    for part, _ in in_order(partial(_write_part, preset, samples, work), missing, num_workers):
        yield len(_packs_of(preset, *part))
    beside = preset.folder / f"{TOKENS}.part"
    with parquet().ParquetWriter(
        beside, arrow_schema(_COLUMNS), compression="zstd", write_page_checksum=True
    ) as joined:
        for part in parts:
            file = parquet().ParquetFile(_part_path(work, *part))
            for group in range(file.num_row_groups):
                joined.write_table(file.read_row_group(group))
    os.replace(beside, preset.folder / TOKENS)
    preset.content["files"][TOKENS] = file_facts(preset.folder / TOKENS)
    for shard in (preset.folder / shard_name(*part) for part in parts):
        if shard.exists():
            preset.content["files"][shard.name] = {"bytes": shard.stat().st_size}
    write_json(preset.folder / PRESET, preset.content)
    shutil.rmtree(work, ignore_errors=True)


def _part_path(work: Path, epoch: int, part: int) -> Path:
    return work / f"tokens-{epoch:04d}-{part:06d}.parquet"


def _packs_of(preset: Preset, epoch: int, part: int) -> range:
    return range(part * PART_PACKS, min((part + 1) * PART_PACKS, preset.num_packs(epoch)))


def _write_part(preset: Preset, samples: Samples, work: Path, epoch: int, part: int) -> None:
    path = _part_path(work, epoch, part)
    beside = path.with_suffix(".part")
    config = preset.config()
    segments = SampleSegments(samples, config, samples.mixture(config, epoch), epoch)
    with RowWriter(beside, _COLUMNS, PACKS_PER_GROUP) as rows, _Shard(preset.folder / shard_name(epoch, part)) as shard:
        for number in _packs_of(preset, epoch, part):
            row = _stored_row(segments, preset.pack(epoch, number).fragments, epoch, number, shard)
            for segment in row["segments"]:
                segment["detail"] = samples.without_folder(segment.get("detail") or "")
            rows.add(row)
    os.replace(beside, path)


def _stored_row(
    segments: SampleSegments, fragments: list[Fragment], epoch: int, number: int, shard: _Shard
) -> dict[str, Any]:
    ids, labels = [_NO_IDS], [_NO_IDS]  # cu_seqlens begin with 0
    facts: list[dict[str, Any]] = []
    images: list[tuple[int, PlannedImage, bytes]] = []
    for at, fragment in enumerate(fragments):
        try:
            with isolate_sample_errors(source=partial(segments.origin, fragment)):
                encoded = segments.encoded(fragment)
                if encoded.branches:
                    name = encoded.record.sample_id
                    raise UserError(f"--materialise: {name} has several answers, which are not kept apart there")
                images += [(at, image, image.ref.read()) for image in _images_of(encoded, fragment)]
        except SampleError as error:
            facts.append({"reason": error.reason, "detail": error.located_detail})
            ids.append(_NO_IDS)
            labels.append(_NO_IDS)
        else:
            segment = make_segment(encoded, fragment, _NO_TILES)
            facts.append({"num_loss_tokens": segment.num_loss_tokens, "data_augment": encoded.data_augment})
            ids.append(segment.input_ids)
            labels.append(segment.labels)
    row = {"epoch": epoch, "pack": number, "input_ids": np.concatenate(ids), "labels": np.concatenate(labels)}
    row |= {"cu_seqlens": list(accumulate(map(len, ids))), "sample_ids": list(map(segments.name, fragments))}
    return row | {"segments": facts, "images": shard.add(row, images)}


def _images_of(encoded: Encoded, fragment: Fragment) -> Iterator[PlannedImage]:
    for image in images_of(encoded, fragment):
        if not isinstance(image, PlannedImage):
            name = encoded.record.sample_id
            raise UserError(f"--materialise: {name} has a video, whose frames are not kept as images")
        yield image


class _Shard:
    """A tar shard of the images of packs, as a context; without images there is no file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)  # of a stopped run
        self._tar: tarfile.TarFile | None = None

    def add(self, row: dict[str, Any], images: list[tuple[int, PlannedImage, bytes]]) -> list[dict[str, Any]]:
        """Append a pack's images, of the segments with these numbers. Returns what tokens.parquet says of each."""
        if not images:
            return []
        key = f"{row['pack']:012d}"
        members = [f"{key}.{number:04d}.{file_ending(data)}" for number, (_, _, data) in enumerate(images)]
        segments: list[dict[str, Any]] = [{"sample_id": name, "images": []} for name in row["sample_ids"]]
        for member, (segment, _, _) in zip(members, images, strict=True):
            segments[segment]["images"].append(member)
        about = {"pack": row["pack"], "epoch": row["epoch"], "segments": segments}
        self._write(f"{key}.json", json.dumps(about, ensure_ascii=False).encode())
        return [
            {"segment": segment, "offset": self._write(member, data), "size": len(data)}
            | {"width": image.size[0], "height": image.size[1], **asdict(image.grid)}
            for member, (segment, image, data) in zip(members, images, strict=True)
        ]

    def _write(self, name: str, data: bytes) -> int:
        """Returns where the data begins."""
        if self._tar is None:
            self._tar = tarfile.TarFile(self._path, "w", format=tarfile.USTAR_FORMAT)
        info = tarfile.TarInfo(name)
        info.size = len(data)
        offset = self._tar.offset + tarfile.BLOCKSIZE  # a ustar header is one block
        self._tar.addfile(info, io.BytesIO(data))
        return offset

    def __enter__(self) -> _Shard:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tar is not None:
            self._tar.close()


# -- reading -------------------------------------------------------------------------------------------


class StoredSegments:
    """Fragments of a preset that holds its data. A `SegmentSource` of one epoch.

    Raises:
        UserError: the preset does not hold its data.
    """

    def __init__(self, preset: Preset, encoder: Encoder, epoch: int) -> None:
        if TOKENS not in preset.content["files"]:
            raise UserError(
                f"preset {preset.folder} holds no data of its own: give its --meta_path, or add the data by "
                "internvl-pack plan --materialise"
            )
        self._preset, self._encoder, self._epoch = preset, encoder, epoch
        self._planned_epoch, self._order = epoch % preset.epochs, preset.order(epoch)
        self._rows = PackRows(preset.folder / TOKENS, preset.packs_of_epochs, PACKS_PER_GROUP, list(_COLUMNS), _rows_of)
        self._stamps: dict[str, Stamp] = {}
        self._names: dict[int, str] = {}  # of the samples of the last pack, by position

    def segment(self, pack: PlannedPack, fragment: Fragment, out: np.ndarray) -> Segment:
        number = self._order(pack.number)
        row = self._rows.row(self._planned_epoch, number)
        fragments = self._preset.pack(self._epoch, number).fragments
        self._names = {f.position: name for f, name in zip(fragments, row["sample_ids"], strict=True)}
        at = fragments.index(fragment)
        stored, name = row["segments"][at], row["sample_ids"][at]
        if stored["reason"] is not None:
            raise SampleError(stored["reason"], stored["detail"])
        start, stop = row["cu_seqlens"][at : at + 2]
        ids, labels = row["input_ids"][start:stop], row["labels"][start:stop]
        if not len(ids) == len(labels) == fragment.num_tokens:
            raise SampleError(
                "changed_since_survey", f"{len(ids)} tokens are stored, {fragment.num_tokens} were planned"
            )
        shard = str(self._preset.folder / shard_name(self._planned_epoch, number // PART_PACKS))
        images = tuple(self._image(shard, name, image) for image in row["images"] if image["segment"] == at)
        record = Record(name, stop - start, fragment.num_tiles, stored["num_loss_tokens"])
        encoded = Encoded(record, ids, labels, images)
        tiles = self._encoder.decode(encoded, epoch=self._epoch, out=out)
        if stored["data_augment"]:
            with isolate_sample_errors(f"data_augment of {name}"):
                recompress(tiles, name, self._epoch, fragment.tile_start)
        return make_segment(encoded, fragment, tiles)

    def _image(self, shard: str, sample_id: str, stored: dict[str, Any]) -> PlannedImage:
        if shard not in self._stamps:
            self._stamps[shard] = stamp_of(shard)
        ref = SliceRef(shard, stored["offset"], stored["size"], self._stamps[shard], sample_id)
        grid = TileGrid(stored["columns"], stored["rows"], stored["thumbnail"])
        return PlannedImage(ref, (stored["width"], stored["height"]), grid)

    @cached_property
    def _refused(self) -> dict[int, dict[str, Any]]:
        return {row["position"]: row for row in self._preset.refused(self._epoch)}

    def name(self, fragment: Fragment) -> str:
        return self._names.get(fragment.position) or self._refused[fragment.position]["sample_id"]

    def dataset(self, fragment: Fragment) -> str:
        return self._preset.folder.name  # all of it was one data set's to whoever reads it

    def origin(self, fragment: Fragment) -> str:
        refused = self._refused.get(fragment.position, {})
        return refused.get("source") or f"{self._preset.folder / TOKENS}"


def _rows_of(table: Any) -> list[dict[str, Any]]:
    """Ids and labels as arrays, all else as Python values."""
    arrays = ("input_ids", "labels")
    rows = table.drop_columns(list(arrays)).to_pylist()
    for name in arrays:
        column = table[name].combine_chunks()
        for at, row in enumerate(rows):
            row[name] = column[at].values.to_numpy()
    return rows
