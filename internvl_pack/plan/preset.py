"""A preset: the sequence of packs of one or more epochs, written down.

    packs.parquet     a row a pack, in order; PACKS_PER_GROUP packs a row group, each epoch beginning a new one
    refused.parquet   a row a sample that enters no pack, with its reason
    preset.json       settings, marks of the data and the tokenizer, statistics; written last, so a folder without it
                      is no preset

Nothing in it depends on the time, the machine, its folder or the number of processes: two plans of the same data give
the same bytes. It holds no tokens and no pixels (stream/stored.py adds them). Training reads the samples, and checks
that they are those that were planned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..config import PackingConfig
from ..errors import SampleError, UserError
from ..ledger import Ledger
from ..order.local_order import BlockWalk
from ..order.permutation import Permutation, derive_seed
from ..packing.offline import OFFLINE_POLICIES
from ..records import Fragment
from ..samples import Samples
from .pack_file import PackRows, parquet
from .packed_state import PLAIN_FIELDS, fragments_of
from .sequence import PlannedPack, Refused

VERSION = 3
PRESET, PACKS, REFUSED = "preset.json", "packs.parquet", "refused.parquet"
PACKS_PER_GROUP = 256

PACK_COLUMNS = {
    "epoch": "int32",
    "pack": "int64",  # its number in the epoch's sequence
    "cost": "int64",  # in the packer's units
    "num_tokens": "int32",
    "num_padded_tokens": "int32",  # segments rounded up to pad_to_multiple_of
    "num_tiles": "int32",
    "cu_seqlens": ["int32"],
    "cu_seqlens_padded": ["int32"],
    "sample_ids": ["string"],
    "lengths": ["int32"],  # tokens of each segment
    "tiles": ["int32"],
    **{name: ["int64"] if name == "position" else ["int32"] for name in Fragment._fields[:PLAIN_FIELDS]},
    # What was read to make it, since the pack before: the ledger's figures.
    "samples_read": "int64",
    "tokens_read": "int64",
    "tokens_cut_off": "int64",
    "split_positions": ["int64"],
    "split_counts": ["int32"],
}
TREE_COLUMNS = {"num_branches": ["int32"], "num_saved_tokens": ["int64"], "num_unseen_pairs": ["int64"]}  # if any are
PICTURE_COLUMNS = {"num_tile_pairs": ["int64"]}  # where they cost something
REFUSED_COLUMNS = {
    "epoch": "int32",
    "pack": "int64",  # the pack that it was refused before; the number of packs where it came after the last
    "position": "int64",  # in the epoch's order
    "sample_id": "string",
    "reason": "string",
    "detail": "string",
    "source": "string",  # its place, below the meta file's folder where it lies there; null for what budgets refuse
}
_READ_COLUMNS = ("samples_read", "tokens_read", "tokens_cut_off", "split_positions", "split_counts")

# Options that training takes from the preset, whatever it is given.
_DECIDED = ("packing_policy", "max_buffer_size", "seed", "shuffle", "shuffle_buffer_size", "cost_model", "share_prefix")


class WrittenPack(NamedTuple):
    """A row of packs.parquet: a pack, and what was read to make it, as `Ledger.read_many` takes it."""

    cost: int
    fragments: list[Fragment]
    read: tuple[int, int, int, dict[int, int]]


def _packs_of(table: Any) -> list[WrittenPack]:
    column = {name: table[name].combine_chunks() for name in table.column_names}
    values = {name: column[name].flatten().to_numpy() for name in Fragment._fields if name in column}
    nothing = np.zeros_like(values["position"])  # what few presets have a column of
    fields = np.stack([values.get(name, nothing) for name in Fragment._fields], axis=1)
    fragments = fragments_of(fields)
    ends = np.cumsum(column["position"].value_lengths().to_numpy()).tolist()
    read = zip(*(column[name].to_pylist() for name in _READ_COLUMNS), strict=True)
    return [
        WrittenPack(cost, fragments[start:end], (*counts, dict(zip(positions, parts, strict=True))))
        for cost, start, end, (*counts, positions, parts) in zip(
            column["cost"].to_pylist(), [0, *ends[:-1]], ends, read, strict=True
        )
    ]


def plan_settings(config: PackingConfig, policy: str | None) -> dict[str, Any]:
    """Options that the packs depend on, by name, as JSON values."""
    options = config.fingerprint() | ({"packing_policy": policy} if policy else {})
    del options["packing"]  # that they are packs
    return options


def data_facts(samples: Samples) -> dict[str, Any]:
    """The data and the encoding that a preset is for, as JSON values without paths: data may be moved."""
    return {"data": samples.fingerprint(), "encode": samples.encoder.fingerprint()}


def file_facts(path: Path) -> dict[str, Any]:
    digest = sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


class Preset:
    """A preset that has been read. Picklable.

    Raises:
        UserError: the folder holds no complete preset, or one of another version, or a file is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()  # a process that changes its folder finds it again
        path = self.folder / PRESET
        try:
            self.content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            begun = (self.folder / f"{PACKS}.part").exists()
            unfinished = "; its planning has not been finished" if begun else ""
            raise UserError(
                f"preset {self.folder}: no {PRESET} there{unfinished}: internvl-pack plan META --out {self.folder}"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"preset {path} cannot be read: {error}") from None
        if not isinstance(self.content, dict):
            raise UserError(f"preset {path} is damaged (it holds no JSON object): plan it again")
        if self.content.get("version") != VERSION:
            raise UserError(
                f"preset {path} has version {self.content.get('version')!r}, this release reads version {VERSION}: "
                "plan it again"
            )
        if (damage := _damage_of(self.content)) is not None:
            raise UserError(f"preset {path} is damaged ({damage}): plan it again")
        for name, facts in self.content["files"].items():
            file = self.folder / name
            found = file.stat().st_size if file.is_file() else None
            if found != facts["bytes"]:
                raise UserError(f"preset {file} has {found} bytes, {facts['bytes']} when it was planned: plan it again")
            if name in (PACKS, REFUSED) and file_facts(file) != facts:
                raise UserError(f"preset {file} has other contents than when it was planned: plan it again")
        self.settings: dict[str, Any] = self.content["settings"]
        self.packs_of_epochs: list[int] = self.content["packs"]
        columns = ("cost", *Fragment._fields, *_READ_COLUMNS)
        self._packs = PackRows(self.folder / PACKS, self.packs_of_epochs, PACKS_PER_GROUP, columns, _packs_of)

    @property
    def epochs(self) -> int:
        """Epochs that were planned; later ones repeat them in turn."""
        return len(self.packs_of_epochs)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that identify this preset."""
        return self.content["files"][PACKS]["sha256"][:16]

    def num_packs(self, epoch: int) -> int:
        return self.packs_of_epochs[epoch % self.epochs]

    def num_positions(self, epoch: int) -> int:
        """Samples of an epoch, refused ones included."""
        return self.content["positions"][epoch % self.epochs]

    def order(self, epoch: int) -> Callable[[int], int]:
        """Which planned pack comes at each place of an epoch: as planned, or, beyond those, in a seeded order."""
        if epoch < self.epochs:
            return int
        return _PackOrder(self.num_packs(epoch), derive_seed(self.settings["seed"], "packs", epoch))

    def pack(self, epoch: int, number: int) -> WrittenPack:
        """The planned pack `number` of an epoch."""
        return self._packs.row(epoch % self.epochs, number)

    def refused(self, epoch: int) -> list[dict[str, Any]]:
        """Samples of an epoch that enter no pack, by REFUSED_COLUMNS."""
        filters = [("epoch", "=", epoch % self.epochs)]
        return parquet().read_table(self.folder / REFUSED, filters=filters, use_threads=False).to_pylist()

    # -- what it fits --------------------------------------------------------------------------------

    def config(self, run: PackingConfig | None = None) -> PackingConfig:
        """The run's options with what the preset decides; without a run, all of the preset's.

        Raises:
            UserError: options that packs depend on differ, named.
        """
        planned = {"share_prefix": False} | {k: v for k, v in self.settings.items() if k != "cost_model"}
        if planned["packing_policy"] in OFFLINE_POLICIES:
            del planned["packing_policy"]  # no packer of a stream, which is not used
        if run is None:
            try:
                return PackingConfig(**planned)
            except TypeError as error:  # an option of no release, or a value of another type
                raise UserError(f"preset {self.folder} is damaged (settings: {error}): plan it again") from None
        if run.share_prefix and not planned["share_prefix"]:
            raise UserError(
                f"preset {self.folder} was planned without share_prefix: leave it out, or plan again with it into "
                "another folder"
            )
        given = asdict(run)
        changes = [(k, v, given[k]) for k, v in planned.items() if k not in _DECIDED and given[k] != v]
        if changes[:1] == [("max_seq_length", planned["max_seq_length"], run.max_seq_length)]:
            limits = (planned["max_seq_length"], run.max_seq_length)
            if all(n is None or n >= run.max_packed_tokens for n in limits):  # beyond the budget it limits nothing
                del changes[0]
        if changes:
            raise UserError(f"preset {self.folder} was planned with other options: {_described(changes)}")
        return replace(run, **planned, packing=True)

    def check_fits(self, samples: Samples) -> None:
        """Check that tokenizer, tile options and data are those of the preset.

        Raises:
            UserError: they differ; names what.
        """
        facts = data_facts(samples)
        changes = _changes(self.content["encode"], facts["encode"])
        if changes:
            raise UserError(f"preset {self.folder} was planned for another encoding: {_described(changes)}")
        if not samples.sources or facts["data"] == self.content["data"]:
            return
        planned, found = ({entry["name"]: entry for entry in each} for each in (self.content["data"], facts["data"]))
        there = {False: "not there", True: "there"}
        for name in {**planned, **found}:
            if name in planned and name in found:
                of = f" of dataset {name!r}"
                changes += [(key + of, old, new) for key, old, new in _changes(planned[name], found[name])]
            else:
                changes.append((f"dataset {name!r}", there[name in planned], there[name in found]))
        changes = changes or [("order of the datasets", list(planned), list(found))]
        raise UserError(f"preset {self.folder} does not fit the data any more: {_described(changes)}")


def _damage_of(content: Mapping[str, Any]) -> str | None:
    """What is wrong with a preset's JSON object, in a few words."""
    kinds = {"files": dict, "settings": dict, "encode": dict, "data": list, "packs": list, "positions": list}
    for name, kind in (kinds | {"tokens_cut_off": list}).items():
        if not isinstance(content.get(name), kind):
            return f"{name!r} is missing, or of another type"
    if not {PACKS, REFUSED} <= content["files"].keys() or any(
        os.path.basename(name) != name for name in content["files"]
    ):
        return "its files are others"
    for name, facts in content["files"].items():
        if not isinstance(facts, dict) or not isinstance(facts.get("bytes"), int):
            return f"file {name!r} has no size"
        if name in (PACKS, REFUSED) and not isinstance(facts.get("sha256"), str):
            return f"file {name!r} has no sha256"
    needed = {"settings": ("packing_policy", "max_packed_tokens", "num_images_expected", "seed")}
    for name, keys in (needed | {"encode": ("force_image_size", "markup_tokens")}).items():
        if not content[name].keys() >= set(keys):
            return f"{name!r} lacks an option"
    counts = [content[name] for name in ("packs", "positions", "tokens_cut_off")]
    if not content["packs"] or len({len(each) for each in counts}) > 1:
        return "its numbers of epochs differ"
    if not all(isinstance(n, int) and n >= 0 for each in counts for n in each):
        return "a count is none"
    if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in content["data"]):
        return "a dataset has no name"
    return None


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    names = {**old, **new}
    return [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def _described(changes: Sequence[tuple[str, Any, Any]]) -> str:
    shown = "; ".join(f"{name} was {old!r} and is {new!r} now" for name, old, new in changes[:4])
    more = f"; and {len(changes) - 4} more" if len(changes) > 4 else ""
    return f"{shown}{more}. Set it back, or plan again into another folder"


class _PackOrder:
    """A seeded order of packs that reads the file a row group at a time: shuffled groups, shuffled in themselves."""

    def __init__(self, num_packs: int, seed: int) -> None:
        self._num_packs, self._seed = num_packs, seed
        self._groups = BlockWalk([*range(0, num_packs, PACKS_PER_GROUP), num_packs], seed)
        self._within: tuple[int, Permutation] | None = None

    def __call__(self, place: int) -> int:
        group, at = divmod(self._groups[place], PACKS_PER_GROUP)
        first = group * PACKS_PER_GROUP
        if self._within is None or self._within[0] != group:
            size = min(PACKS_PER_GROUP, self._num_packs - first)
            self._within = group, Permutation(size, derive_seed(self._seed, group))
        return first + self._within[1][at]


class PresetPacks:
    """The packs of one epoch as they were written. A `PackSequence`.

    A planned epoch counts samples where the packer read them, so that its ledger is that of the stream at every pack.
    A repeated one has another order of packs: it counts a sample with its first fragment, refused ones at the start.

    Args:
        preset: the packs.
        epoch: any from 0.
        on_error: `stop` ends the run at a sample that was refused.
    """

    def __init__(self, preset: Preset, epoch: int, on_error: str = "skip") -> None:
        self.ledger = Ledger()
        self._preset, self._epoch, self._on_error = preset, epoch, on_error
        self._repeats = epoch >= preset.epochs
        self._order = preset.order(epoch)
        self._next = 0  # number of the next pack; one more than there are once the end was found
        self._taken: list[Refused] = []

    @cached_property
    def _refused(self) -> dict[int, list[dict[str, Any]]]:
        """By the number of the pack that they come before."""
        refused: dict[int, list[dict[str, Any]]] = {}
        for row in self._preset.refused(self._epoch):
            refused.setdefault(0 if self._repeats else row["pack"], []).append(row)
        return refused

    def next_pack(self) -> PlannedPack | None:
        number, count = self._next, self._preset.num_packs(self._epoch)
        if number > count:
            return None
        self._next += 1
        for row in self._refused.get(number, ()):
            self._refuse(row)
        if number == count:
            return None
        pack = self._preset.pack(self._epoch, self._order(number))
        if not self._is_sound(pack.fragments):
            raise UserError(f"preset {self._preset.folder}: pack {number:,} is damaged: plan it again")
        if self._repeats:
            self._read_again(number, pack.fragments)
        else:
            self.ledger.read_many(*pack.read)
        return PlannedPack(number, pack.cost, tuple(pack.fragments))

    def _is_sound(self, fragments: Sequence[Fragment]) -> bool:
        """Whether all fragments are some of the data's, and fit into a pack."""
        settings, num_positions = self._preset.settings, self._preset.num_positions(self._epoch)
        return (
            all(
                min(f) >= 0
                and f.position < num_positions
                and f.index < f.count
                and f.token_start < f.token_stop
                and f.tile_start <= f.tile_stop
                for f in fragments
            )
            and sum(f.num_tokens for f in fragments) <= settings["max_packed_tokens"]
            and sum(f.num_tiles for f in fragments) <= settings["num_images_expected"]
        )

    def _read_again(self, number: int, fragments: Sequence[Fragment]) -> None:
        if number == 0:
            cut_off = self._preset.content["tokens_cut_off"][self._epoch % self._preset.epochs]
            self.ledger.read_many(0, cut_off, cut_off, {})
        for fragment in fragments:
            first = fragment.position not in self.ledger.parts
            parts = {fragment.position: fragment.count} if first and fragment.count > 1 else {}
            self.ledger.read_many(int(first), fragment.token_stop - fragment.token_start, 0, parts)

    def _refuse(self, row: Mapping[str, Any]) -> None:
        error = SampleError(row["reason"], row["detail"], row["source"])
        if self._on_error == "stop":
            raise UserError(f"{row['sample_id']}: {error}")
        self.ledger.refuse(error.reason)
        # Whoever reads the samples knows their places by this machine's paths.
        self._taken.append(Refused(row["position"], error.reason, error.detail, None))

    def take_refused(self) -> list[Refused]:
        taken, self._taken = self._taken, []
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any], *, pooled: Sequence[Sequence[Fragment]] = ()) -> None:
        assert 0 <= state["next"] <= self._preset.num_packs(self._epoch) + 1, "a pack that the preset does not have"
        self._next = state["next"]
