"""Planning a preset: from a meta file's data to a folder of packs.

    rows -> scan.py: lengths in chunk files -> lanes, each planned into a file of its own -> one preset

Both stages are spread over processes and go on where they were stopped: what is finished is a file in `work/`, which
is removed at the end. A lane is planned with the very packer of streaming (or by first fit over the whole lane, see
packing/offline.py), so a preset of the streaming packer holds the packs that streaming would make.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .config import PackingConfig, auto_lanes, check_budget
from .errors import SampleError, UserError, costs_one_sample
from .packing.bounds import LowerBounds
from .packing.cost import CostModel
from .packing.offline import OFFLINE_POLICIES
from .packing.packer import LanePacker
from .preset import (
    FRAGMENT_FIELDS,
    PACK_COLUMNS,
    PACKS,
    PACKS_PER_GROUP,
    PRESET,
    REFUSED,
    REFUSED_COLUMNS,
    VERSION,
    PlannedFragment,
    Preset,
    data_facts,
    file_facts,
    plan_settings,
    write_json,
)
from .prior import lanes_prior, plans_share_a_prior
from .records import Fragment, Record
from .scan import Scanner, ScanTable, arrow_schema, parallel, parquet, prepare_folder, scan, write_table
from .sources import DatasetSpec, Source
from .sources.mixture import MixturePart, mixture_counts
from .sources.order import Permutation, derive_seed

ALL_BAD_ROWS = 32
Follow = Callable[[str, int, Iterable[int]], None]
"""Drives a stage: (what is done, its total, steps done since the last time, to be used up)."""


def plan_preset(
    out: Path,
    specs: Sequence[DatasetSpec],
    sources: Sequence[Source],
    encoder: Any,
    config: PackingConfig,
    *,
    policy: str | None = None,
    epochs: int = 1,
    num_workers: int = 0,
    follow: Follow | None = None,
) -> Preset:
    """Plan all packs of these epochs into the folder `out`, or go on with a plan that was stopped.

    Args:
        specs, sources, encoder, config: as `PackedDataset` takes them.
        policy: one of OFFLINE_POLICIES instead of the run's streaming packer.
        num_workers: processes; 0 plans in this one.
        follow: shows the progress.

    Raises:
        UserError: the folder holds another preset, no sample can be used, or one must stop the run.
    """
    if epochs < 1:
        raise UserError(f"--epochs {epochs}: give at least 1")
    if policy is not None and policy not in OFFLINE_POLICIES:
        raise UserError(f"packing_policy {policy!r} is unknown: use one of {', '.join(OFFLINE_POLICIES)}")
    check_budget(config, encoder)
    follow = follow or _use_up
    parts = config.parts(specs, sources)
    positions = sum(mixture_counts(parts, use_data_resampling=config.use_data_resampling))
    if not positions:
        raise UserError("the data holds no samples")
    if config.num_lanes is None:
        config = replace(config, num_lanes=auto_lanes(positions))
    facts = data_facts(specs, sources, encoder)
    settings = plan_settings(config, policy)
    if (out / PRESET).exists():
        preset = Preset(out)
        found = (preset.settings, preset.content["meta_sha256"], preset.content["encode"], preset.epochs)
        if found != (settings, facts["meta_sha256"], facts["encode"], epochs):
            raise UserError(f"--out {out} holds a preset of other data or options: give another folder, or remove it")
        return preset
    work = out / "work"
    out.mkdir(parents=True, exist_ok=True)
    scanner = Scanner(sources, specs, encoder)
    measured = scanner.settings([entry["content"] for entry in facts["data"]])
    rows = sum(map(len, sources))
    follow("measuring", rows, scan(scanner, measured, work / "scan", num_workers=num_workers))
    assert config.num_lanes is not None
    prior = policy is None and plans_share_a_prior(config, specs, sources, parts)
    planner = Planner(ScanTable(work / "scan", len(sources)), parts, sources, config, policy, prior)
    every = {**settings, **facts, "epochs": epochs, "on_error": config.on_error, "refused": list(REFUSED_COLUMNS)}
    follow("planning", positions * epochs, plan(planner, every, work / "plan", epochs=epochs, num_workers=num_workers))
    write_preset(out, work / "plan", config=config, policy=policy, epochs=epochs, facts=facts)
    shutil.rmtree(work, ignore_errors=True)
    return Preset(out)


def _use_up(_what: str, _total: int, steps: Iterable[int]) -> None:
    for _ in steps:
        pass


class Lengths(Protocol):
    """What planning reads the samples' sizes from; see scan.ScanTable."""

    def lengths(self, which: int, row: int) -> tuple[int, int, int]: ...

    def record(self, which: int, row: int, sample_id: str) -> Record: ...


@dataclass
class Planner:
    """Plans lanes into files. Picklable, for workers.

    Attributes:
        table: sizes of the samples.
        parts: the datasets' shares, as `PackedDataset.parts`.
        ids: the sources, or anything with `sample_id(row)` and `origin(row)`, one a dataset.
        config: the run's options, num_lanes resolved.
        policy: one of OFFLINE_POLICIES, or None for the run's streaming packer.
        has_prior: whether lanes of the run begin with figures in common, see prior.py.
    """

    table: Lengths
    parts: Sequence[MixturePart]
    ids: Sequence[Any]
    config: PackingConfig
    policy: str | None = None
    has_prior: bool = False

    @cached_property
    def prior(self) -> dict[str, int] | None:
        """What lanes begin with."""
        if not self.has_prior:
            return None
        reader = _LaneReader(self, 0, 0)
        return lanes_prior(
            self.config,
            CostModel.from_name(self.config.cost_model),
            len(reader.mixture),
            reader.fragments_at,
        )

    def plan_lane(self, epoch: int, lane: int, folder: Path) -> tuple[int, int]:
        """Write the lane's packs and refusals. Returns (samples read, packs).

        Raises:
            UserError: a sample that must stop the run: `on_error` stop, or `oversize` error.
        """
        reader = _LaneReader(self, epoch, lane)
        write = _PackWriter(lane_path(folder, epoch, lane), self.config.pad_to_multiple_of)
        turn = 0
        for turn, pack in enumerate(self._packs(reader), 1):
            write.add(epoch, lane, turn - 1, reader.num_lanes, pack)
        write_table(refused_path(folder, epoch, lane), reader.refused, REFUSED_COLUMNS)
        write.close()
        return reader.cursor, turn

    def _packs(self, reader: _LaneReader) -> Iterator[list[PlannedFragment]]:
        budget = self.config.budget()
        if self.policy is None:
            packer: LanePacker[PlannedFragment] = LanePacker(
                budget,
                policy=self.config.packing_policy,
                buffer_size=self.config.max_buffer_size,
                reservoir=self.config.balance_reservoir,
                cost=CostModel.from_name(self.config.cost_model),
                prior=self.prior,
            )
            more = True
            while True:
                while more and not packer.full:
                    fragments = reader.next_sample()
                    more = fragments is not None
                    for fragment in fragments or ():
                        packer.add(fragment)
                if not packer.waiting:
                    return
                yield packer.pop()
        everything: list[PlannedFragment] = []
        while (more_fragments := reader.next_sample()) is not None:
            everything += more_fragments
        packs = OFFLINE_POLICIES[self.policy](everything, budget)
        order = Permutation(len(packs), derive_seed(self.config.seed, "packs", reader.epoch, reader.lane))
        for turn in range(len(packs)):
            yield packs[order[turn]]


class _LaneReader:
    """The fragments of one lane's samples in the epoch's order."""

    def __init__(self, planner: Planner, epoch: int, lane: int) -> None:
        config = planner.config
        assert config.num_lanes, "resolved"
        self.planner, self.epoch, self.lane, self.num_lanes = planner, epoch, lane, config.num_lanes
        self.mixture = config.mixture(planner.parts, epoch)
        self.budget = config.budget()
        self.room = min(self.budget.max_segment_tokens, config.max_seq_length or self.budget.max_segment_tokens)
        self.cursor = 0
        self.refused: dict[str, list[Any]] = {name: [] for name in REFUSED_COLUMNS}
        self._good: Counter[int] = Counter()
        self._bad: Counter[int] = Counter()

    def next_sample(self) -> list[PlannedFragment] | None:
        """The next sample's fragments, none where it is refused; None at the end of the lane."""
        position = self.lane + self.cursor * self.num_lanes
        if position >= len(self.mixture):
            return None
        self.cursor += 1
        which, row = self.mixture.locate(position)
        try:
            fragments = self.fragments_at(position)
        except SampleError as error:
            self._refuse(position, which, row, error)
            return []
        self._good[which] += 1
        return fragments

    def fragments_at(self, position: int) -> list[PlannedFragment]:
        """The fragments of the sample at a position. Raises SampleError."""
        which, row = self.mixture.locate(position)
        sample_id = self.planner.ids[which].sample_id(row)
        with costs_one_sample(f"sample {sample_id}"):
            return self._fragments(position, which, row, sample_id)

    def _fragments(self, position: int, which: int, row: int, sample_id: str) -> list[PlannedFragment]:
        tokens, tiles, loss = self.planner.table.lengths(which, row)
        if 0 < tokens <= self.room and tiles <= self.budget.max_tiles:
            return [PlannedFragment(position, sample_id, 0, 1, 0, tokens, 0, tiles, 0, 0, tokens, tiles, loss)]
        fragments = self.planner.config.cut(self.planner.table.record(which, row, sample_id), position, self.budget)
        planned = partial(PlannedFragment, sample_tokens=tokens, sample_tiles=tiles, sample_loss_tokens=loss)
        return [planned(**{name: getattr(f, name) for name in Fragment.__dataclass_fields__}) for f in fragments]

    def _refuse(self, position: int, which: int, row: int, error: SampleError) -> None:
        sample_id = self.planner.ids[which].sample_id(row)
        values = (self.epoch, self.lane, position, sample_id, error.source, error.reason, error.detail)
        for name, value in zip(REFUSED_COLUMNS, values, strict=True):
            self.refused[name].append(value)
        self._bad[which] += 1
        error.source = error.source or self.planner.ids[which].origin(row)
        if self.planner.config.on_error == "stop" or error.reason == "oversized_error":
            raise UserError(f"{sample_id}: {error}")
        if self._bad[which] >= ALL_BAD_ROWS and not self._good[which]:
            name = self.planner.parts[which].name
            raise UserError(
                f"dataset {name!r}: none of its first {self._bad[which]} samples can be used; {sample_id}: {error}"
            )


def lane_path(folder: Path, epoch: int, lane: int) -> Path:
    return folder / f"packs-{epoch:04d}-{lane:06d}.parquet"


def refused_path(folder: Path, epoch: int, lane: int) -> Path:
    return folder / f"refused-{epoch:04d}-{lane:06d}.parquet"


class _PackWriter:
    """A parquet file of packs that takes its name when it is complete."""

    def __init__(self, path: Path, multiple: int) -> None:
        self._path, self._multiple = path, multiple
        self._beside = path.with_name(f"{path.name}.{os.getpid()}.part")
        self._schema = arrow_schema(PACK_COLUMNS)
        self._writer = parquet().ParquetWriter(self._beside, self._schema, compression="zstd")
        self._columns: dict[str, list[Any]] = {name: [] for name in PACK_COLUMNS}

    def add(self, epoch: int, lane: int, turn: int, num_lanes: int, pack: Sequence[PlannedFragment]) -> None:
        lengths = [f.num_tokens for f in pack]
        padded = [-(-n // self._multiple) * self._multiple for n in lengths]
        tiles = [f.num_tiles for f in pack]
        values: list[Any] = [turn * num_lanes + lane, epoch, lane, turn, sum(lengths), sum(padded), sum(tiles)]
        values += [_boundaries(lengths), _boundaries(padded)]
        values += [[f.sample_id for f in pack], [f.position for f in pack], lengths, tiles]
        values += [[getattr(f, name) for f in pack] for name in FRAGMENT_FIELDS]
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        if len(self._columns["pack"]) == PACKS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._columns["pack"]:
            self._writer.write_table(pa.table(self._columns, schema=self._schema))
        self._columns = {name: [] for name in PACK_COLUMNS}

    def close(self) -> None:
        self._flush()
        self._writer.close()
        os.replace(self._beside, self._path)


def _boundaries(lengths: Sequence[int]) -> list[int]:
    out = [0]
    for n in lengths:
        out.append(out[-1] + n)
    return out


def plan(planner: Planner, settings: Mapping[str, Any], work: Path, *, epochs: int, num_workers: int) -> Iterator[int]:
    """Plan all lanes of all epochs that `work` does not hold yet.

    Args:
        settings: what the packs depend on, as JSON values.

    Yields:
        positions planned since the last time.

    Raises:
        UserError: nothing can be trained on, or a process was killed.
    """
    prepare_folder(work, "plan.json", dict(settings))
    num_lanes = planner.config.num_lanes
    assert num_lanes, "lanes are resolved before planning"
    lanes = [(epoch, lane) for epoch in range(epochs) for lane in range(num_lanes)]
    missing = [(epoch, lane, work) for epoch, lane in lanes if not lane_path(work, epoch, lane).exists()]
    positions = len(planner.config.mixture(planner.parts, 0))
    found = len(lanes) - len(missing)
    if found:
        yield min(found * (positions // num_lanes), epochs * positions)
    for samples, _ in parallel(planner, "plan_lane", missing, num_workers):
        yield samples


# -- writing -------------------------------------------------------------------------------------------


def write_preset(
    out: Path, work: Path, *, config: PackingConfig, policy: str | None, epochs: int, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Join the lanes' files into a preset. `facts` are `data_facts`. Returns what preset.json holds.

    Raises:
        UserError: there is nothing to train on.
    """
    num_lanes = config.num_lanes
    assert num_lanes
    figures = _Figures(config)
    counts: list[list[int]] = []
    packs_part, refused_part = (out / f"{name}.part" for name in (PACKS, REFUSED))
    pq = parquet()
    with (
        pq.ParquetWriter(packs_part, arrow_schema(PACK_COLUMNS), compression="zstd") as packs,
        pq.ParquetWriter(refused_part, arrow_schema(REFUSED_COLUMNS), compression="zstd") as refused,
    ):
        for epoch in range(epochs):
            counts.append([])
            for lane in range(num_lanes):
                file = pq.ParquetFile(lane_path(work, epoch, lane))
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group)
                    packs.write_table(table)
                    figures.add(table)
                counts[-1].append(file.metadata.num_rows)
                table = pq.read_table(refused_path(work, epoch, lane))
                refused.write_table(table)
                figures.refuse(table)
    if not any(map(sum, counts)):
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(figures.refused.items()))
        raise UserError(f"no sample of the data can be trained on ({reasons}): see {work}")
    os.replace(packs_part, out / PACKS)
    os.replace(refused_part, out / REFUSED)
    content = {
        "version": VERSION,
        "settings": plan_settings(config, policy),
        **facts,
        "epochs": epochs,
        "packs_per_lane": counts,
        "statistics": figures.as_json(),
        "files": {name: file_facts(out / name) for name in (PACKS, REFUSED)},
    }
    write_json(out / PRESET, content)
    return content


class _Figures:
    """Statistics of a preset, gathered pack by pack."""

    def __init__(self, config: PackingConfig) -> None:
        self._config = config
        self._bounds = LowerBounds(config.budget())
        self._sums: Counter[str] = Counter()
        self._segments_a_pack: Counter[int] = Counter()
        self._lengths: Counter[int] = Counter()  # segments by the power of two that they reach
        self._longest = 0
        self.refused: Counter[str] = Counter()

    def add(self, table: Any) -> None:
        for name in ("num_tokens", "num_padded_tokens", "num_tiles"):
            self._sums[name] += int(table[name].to_numpy().sum())
        self._sums["packs"] += table.num_rows
        lengths = table["lengths"].combine_chunks().flatten().to_numpy()
        self._sums["segments"] += len(lengths)
        self._sums["first_fragments"] += int((table["index"].combine_chunks().flatten().to_numpy() == 0).sum())
        self._longest = max(self._longest, int(lengths.max()))
        self._lengths.update((np.frexp(lengths)[1] - 1).tolist())
        tiles = table["tiles"].combine_chunks().flatten()
        for num_tokens, num_tiles in zip(lengths.tolist(), tiles.to_pylist(), strict=True):
            self._bounds.add(num_tokens, num_tiles)
        self._segments_a_pack.update(table["lengths"].combine_chunks().value_lengths().to_pylist())

    def refuse(self, table: Any) -> None:
        self.refused.update(table["reason"].to_pylist())

    def as_json(self) -> dict[str, Any]:
        s, config = self._sums, self._config
        packs = s["packs"]
        bound = self._bounds.best()
        capacity = packs * config.max_packed_tokens
        return {
            "samples": s["first_fragments"],
            "refused": dict(sorted(self.refused.items())),
            "packs": packs,
            "packs_bound": bound,
            "packs_bounds": self._bounds.all(),
            "packs_over_bound": round(packs / bound, 6),
            "tokens": s["num_tokens"],
            "tiles": s["num_tiles"],
            "token_fill": round(s["num_tokens"] / capacity, 6),
            "token_fill_with_alignment": round(s["num_padded_tokens"] / capacity, 6),
            "alignment_padding": s["num_padded_tokens"] - s["num_tokens"],
            "tile_fill": round(s["num_tiles"] / (packs * max(1, config.num_images_expected)), 6),
            "segments": s["segments"],
            "segments_per_pack": round(s["segments"] / packs, 4),
            "segments_per_pack_max": max(self._segments_a_pack),
            "segment_tokens_max": self._longest,
            "segment_tokens_by_power_of_two": {
                f"{2**k}-{2 ** (k + 1) - 1}": n for k, n in sorted(self._lengths.items())
            },
        }
