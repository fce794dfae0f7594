"""A preset: every pack of a run, planned before training and kept in a folder.

    packs.parquet     a row a pack, in the order epoch, lane, turn; PACKS_PER_GROUP rows a row group
    refused.parquet   a row a sample that leaves the run, with its reason
    preset.json       settings, hashes of the data and the tokenizer, statistics; written last, so a folder
                      without it is no preset

Nothing in it depends on the time, the machine, its folder or the number of processes: two runs over the same data give
the same bytes. It holds no tokens and no pixels: training reads the samples as streaming does, so it must be the same
data, which is checked (`Preset.check_fits`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from .config import PackingConfig
from .errors import UserError
from .packing.offline import OFFLINE_POLICIES
from .records import Fragment
from .scan import parquet
from .sources import DatasetSpec, Source
from .sources.addresses import system_path

VERSION = 1
PRESET = "preset.json"
PACKS = "packs.parquet"
REFUSED = "refused.parquet"
PACKS_PER_GROUP = 256
"""Packs of a row group: what is read to get at one of them, some 2 ms."""
ALL_BAD_ROWS = 32

#: Options of a run that do not choose packs, or that training on a preset takes from the preset.
_NOT_COMPARED = (
    "on_error",
    "max_bad_fraction",
    "num_lanes",
    "packing",
    "packing_policy",
    "max_buffer_size",
    "balance_reservoir",
    "seed",
    "shuffle",
)
_DIGEST_BLOCK = 1 << 20
_DIGEST_BLOCKS = 64

PACK_COLUMNS = {
    "pack": "int64",  # of the epoch's global sequence
    "epoch": "int32",
    "lane": "int32",
    "turn": "int64",
    "num_tokens": "int32",
    "num_padded_tokens": "int32",  # segments rounded up to pad_to_multiple_of
    "num_tiles": "int32",
    "cu_seqlens": "list<int32>",
    "cu_seqlens_padded": "list<int32>",
    "sample_ids": "list<string>",
    "positions": "list<int64>",  # in the epoch's order
    "lengths": "list<int32>",  # tokens of each segment
    "tiles": "list<int32>",
}
#: Fields of the fragments, one list each; the column's name is the field's with an s.
FRAGMENT_FIELDS = (
    "index",
    "count",
    "token_start",
    "token_stop",
    "tile_start",
    "tile_stop",
    "num_prefix_tokens",
    "num_context_tokens",
    "sample_tokens",
    "sample_tiles",
    "sample_loss_tokens",
)
PACK_COLUMNS |= {name: "list<int32>" for name in FRAGMENT_FIELDS}
REFUSED_COLUMNS = {
    "epoch": "int32",
    "lane": "int32",
    "position": "int64",
    "sample_id": "string",
    "source": "string",  # its place, below the meta file's folder where it lies there; null for what budgets refuse
    "reason": "string",
    "detail": "string",
}


@dataclass(frozen=True, slots=True)
class PlannedFragment(Fragment):
    """A fragment with what the ledger and the loss need to know of its whole sample."""

    sample_tokens: int = 0
    sample_tiles: int = 0
    sample_loss_tokens: int = 0


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def file_facts(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _hash_file(file)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _hash_file(file: Any) -> Any:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


def plan_settings(config: PackingConfig, policy: str | None) -> dict[str, Any]:
    """Options that the packs depend on, by name, as JSON values."""
    options = {k: v for k, v in asdict(config).items() if k not in ("on_error", "max_bad_fraction", "packing")}
    return options | ({"packing_policy": policy} if policy else {})


def data_facts(specs: Sequence[DatasetSpec], sources: Sequence[Source], encoder: Any) -> dict[str, Any]:
    """The data and the tokenizer of a preset, as JSON values without paths: the data may be moved."""
    data = [
        {
            "name": spec.name,
            "rows": len(source),
            "repeat_time": spec.repeat_time,
            "weight": spec.weight,
            "max_dynamic_patch": spec.max_dynamic_patch,
            "data_augment": spec.data_augment,
            "content": source.fingerprint or content_digest(spec),
        }
        for spec, source in zip(specs, sources, strict=True)
    ]
    meta = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    return {"meta_sha256": meta, "data": data, "encode": encoder.fingerprint()}


def content_digest(spec: DatasetSpec) -> str:
    """A hash of the sizes and contents of a dataset's files.

    An annotation file up to 64 MiB is hashed in full, of a larger one 64 blocks of 1 MiB spread over it, of a shard
    its first and last 64 kB: terabytes are not read for it. Beyond that, training compares every sample with what was
    planned of it.
    """
    digest = hashlib.sha256()
    if spec.annotation is not None:
        _digest_file(digest, spec.annotation, _DIGEST_BLOCK, _DIGEST_BLOCKS)
    for path in spec.shards or ():
        _digest_file(digest, path, 64 << 10, 2)
    return digest.hexdigest()


def _digest_file(digest: Any, path: str, block: int, blocks: int) -> None:
    with open(system_path(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        if size <= block * blocks:
            while data := file.read(1 << 20):
                digest.update(data)
            return
        for i in range(blocks):
            file.seek(i * (size - block) // (blocks - 1))
            digest.update(file.read(block))


# -- reading -------------------------------------------------------------------------------------------


def group_starts(counts: Sequence[Sequence[int]], per_group: int) -> dict[tuple[int, int], int]:
    """The first row group of each (epoch, lane), each lane beginning a new one."""
    starts, groups = {}, 0
    for epoch, lanes in enumerate(counts):
        for lane, count in enumerate(lanes):
            starts[epoch, lane] = groups
            groups += -(-count // per_group)
    return starts


class Preset:
    """A preset that has been read. Picklable; keeps a few row groups.

    Raises:
        UserError: the folder holds no complete preset, or one of another version, or a file is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        path = self.folder / PRESET
        try:
            self.content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            unfinished = "; its planning has not been finished" if (self.folder / "work").is_dir() else ""
            raise UserError(
                f"preset {self.folder}: no {PRESET} there{unfinished}: internvl-pack plan META --out {self.folder}"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"preset {path} cannot be read: {error}") from None
        if self.content.get("version") != VERSION:
            raise UserError(
                f"preset {path} has version {self.content.get('version')!r}, this release reads version {VERSION}: "
                "plan it again"
            )
        for name, facts in self.content["files"].items():
            file = self.folder / name
            found = file.stat().st_size if file.is_file() else None
            if found != facts["bytes"]:
                raise UserError(f"preset {file} has {found} bytes, {facts['bytes']} when it was planned: plan it again")
        self.settings: dict[str, Any] = self.content["settings"]
        self.num_lanes: int = self.settings["num_lanes"]
        self.epochs: int = self.content["epochs"]
        self._index()

    def _index(self) -> None:
        """Where each lane of each epoch begins: its first row and its first row group."""
        counts = self.content["packs_per_lane"]
        self._first_group = group_starts(counts, PACKS_PER_GROUP)
        self._file: Any = None
        self._group = lru_cache(maxsize=8)(self._read_group)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_file", "_group")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._index()

    @property
    def digest(self) -> str:
        """What tells this preset from others."""
        return self.content["files"][PACKS]["sha256"][:16]

    def num_packs(self, epoch: int, lane: int) -> int:
        """Packs of a lane in a planned epoch."""
        return self.content["packs_per_lane"][epoch][lane]

    def pack(self, epoch: int, lane: int, turn: int) -> tuple[PlannedFragment, ...]:
        """The fragments of pack `turn` of a lane in a planned epoch."""
        group, at = divmod(turn, PACKS_PER_GROUP)
        columns = self._group(os.getpid(), self._first_group[epoch, lane] + group)
        ids, positions = columns["sample_ids"][at].as_py(), columns["positions"][at].as_py()
        values = [columns[name][at].as_py() for name in FRAGMENT_FIELDS]
        return tuple(PlannedFragment(*each) for each in zip(positions, ids, *values, strict=True))

    def _read_group(self, pid: int, group: int) -> Any:
        """`pid` keeps a forked process from its parent's file position."""
        if self._file is None or self._file[0] != pid:
            self._file = (pid, parquet().ParquetFile(self.folder / PACKS))
        columns = ["sample_ids", "positions", *FRAGMENT_FIELDS]
        table = self._file[1].read_row_group(group, columns=columns, use_threads=False)
        return {name: table[name].combine_chunks() for name in columns}

    def refused(self, epoch: int, lane: int) -> list[dict[str, Any]]:
        """Samples of a lane that left the run when it was planned, by REFUSED_COLUMNS."""
        filters = [("epoch", "=", epoch), ("lane", "=", lane)]
        return parquet().read_table(self.folder / REFUSED, filters=filters, use_threads=False).to_pylist()

    def config(self, run: PackingConfig | None = None) -> PackingConfig:
        """The run's options with what the preset decides; without a run, all of the preset's.

        Raises:
            UserError: options that packs depend on differ, named.
        """
        policy = self.settings["packing_policy"]
        # The streaming packer is not used; its option must only be one that it knows.
        planned = {**self.settings, "packing_policy": "greedy" if policy in OFFLINE_POLICIES else policy}
        if run is None:
            return PackingConfig(**planned)
        given = asdict(run)
        changes = [
            (name, value, given[name])
            for name, value in planned.items()
            if name not in _NOT_COMPARED and given[name] != value
        ]
        if changes[:1] == [("max_seq_length", planned["max_seq_length"], run.max_seq_length)]:
            limits = (planned["max_seq_length"], run.max_seq_length)
            if all(n is None or n >= run.max_packed_tokens for n in limits):  # beyond the budget it limits nothing
                del changes[0]
        if changes:
            raise UserError(f"preset {self.folder} was planned with other options: {_tell(changes)}")
        return replace(run, **planned, packing=True)

    def check_fits(self, specs: Sequence[DatasetSpec], sources: Sequence[Source], encoder: Any) -> None:
        """Raises UserError naming what differs between the preset and the data, tokenizer or tile options."""
        self.check_encoder(encoder)
        now = data_facts(specs, sources, encoder)
        if now["meta_sha256"] == self.content["meta_sha256"]:
            return
        planned = {entry["name"]: entry for entry in self.content["data"]}
        found = {entry["name"]: entry for entry in now["data"]}
        changes: list[tuple[str, Any, Any]] = []
        for name in [*planned, *(n for n in found if n not in planned)]:
            if name not in found or name not in planned:
                changes.append((f"dataset {name!r}", _there(name in planned), _there(name in found)))
                continue
            for key, value in planned[name].items():
                if found[name][key] != value:
                    old, new = (value, found[name][key]) if key != "content" else (value[:8], found[name][key][:8])
                    changes.append((f"{key} of dataset {name!r}", old, new))
        if not changes:
            changes = [("order of the datasets", list(planned), list(found))]
        raise UserError(f"preset {self.folder} does not fit the data any more: {_tell(changes)}")

    def check_encoder(self, encoder: Any) -> None:
        """Raises UserError naming the tokenizer or the tile options that differ."""
        planned, now = self.content["encode"], encoder.fingerprint()
        changes = [
            (name, planned.get(name), now.get(name))
            for name in sorted(planned.keys() | now.keys())
            if planned.get(name) != now.get(name)
        ]
        if changes:
            raise UserError(f"preset {self.folder} was planned for another encoding: {_tell(changes)}")


def _there(there: bool) -> str:
    return "there" if there else "not there"


def _tell(changes: Sequence[tuple[str, Any, Any]]) -> str:
    shown = "; ".join(f"{name} was {old!r} and is {new!r} now" for name, old, new in changes[:4])
    more = f"; and {len(changes) - 4} more" if len(changes) > 4 else ""
    return f"{shown}{more}. Set it back, or plan again into another folder"
