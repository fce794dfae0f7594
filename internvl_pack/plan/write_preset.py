"""Planning a preset: the survey is completed, then the run's sequence of packs is written down.

A plan that was stopped goes on from the survey on disk; planning itself takes some 25 us a sample and begins anew.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..config import PackingConfig, check_budget
from ..errors import UserError
from ..order.mixture import Mixture
from ..order.permutation import Permutation, derive_seed
from ..packing.balance import Balance
from ..packing.budget import Budget
from ..packing.cost import CostModel
from ..packing.offline import OFFLINE_POLICIES
from ..packing.tally import PackTally
from ..records import Fragment
from ..samples import Samples
from ..survey.survey import Survey
from ..survey.table import root_of
from ..survey.workers import measure_all
from .online import OnlinePacks, SampleReader
from .pack_file import RowWriter, write_json
from .preset import (
    PACK_COLUMNS,
    PACKS,
    PACKS_PER_GROUP,
    PICTURE_COLUMNS,
    PRESET,
    REFUSED,
    REFUSED_COLUMNS,
    TREE_COLUMNS,
    VERSION,
    Preset,
    data_facts,
    file_facts,
    plan_settings,
)
from .sequence import PlannedPack, Refused

# Progress callback: (name of the stage, its total, an iterator of step counts that the callback must exhaust).
Progress = Callable[[str, int, Iterable[int]], None]


def plan_preset(
    out: str | os.PathLike[str],
    samples: Samples,
    config: PackingConfig,
    *,
    policy: str | None = None,
    epochs: int = 1,
    num_workers: int = 0,
    progress: Progress | None = None,
) -> Preset:
    """Plan all packs of these epochs into the folder `out`.

    Args:
        samples, config: as `PackedDataset` takes them.
        policy: one of OFFLINE_POLICIES, over whole epochs, instead of the packer of the stream.
        num_workers: processes that measure samples; 0 works in this one.
        progress: callback of each stage; by default nothing is shown.

    Raises:
        UserError: the folder holds another preset, no sample can be used, or one must stop the run.
    """
    if epochs < 1:
        raise UserError(f"--epochs {epochs}: give at least 1")
    assert policy is None or policy in OFFLINE_POLICIES, "the command knows the policies"
    check_budget(config, samples.encoder)
    samples = samples.joined(config, root_of(config.survey_dir))
    out, progress = Path(out), progress or _use_up
    about = {"version": VERSION, "settings": plan_settings(config, policy), **data_facts(samples)}
    about["positions"] = [len(samples.mixture(config, epoch)) for epoch in range(epochs)]
    samples.check_some(about["positions"][0])
    if (out / PRESET).exists():
        preset = Preset(out)
        if any(preset.content[name] != value for name, value in about.items()):
            raise UserError(f"--out {out} holds a preset of other data or options: give another folder, or remove it")
        return preset
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "work", ignore_errors=True)  # of another preset's data
    (out / f"{PACKS}.part").touch()  # a folder in which a plan has begun
    survey = Survey(samples, config.room, root_of(config.survey_dir))
    survey.forget_refusals()
    progress("measuring", samples.num_rows, measure_all(survey, num_workers))
    writer = _Writer(out, survey, config, policy)
    progress("planning", sum(about["positions"]), writer.write(epochs))
    for name in (PACKS, REFUSED):
        os.replace(out / f"{name}.part", out / name)
    about |= {"packs": writer.packs, "tokens_cut_off": writer.cut_off, "statistics": writer.figures.as_json()}
    write_json(out / PRESET, about | {"files": {name: file_facts(out / name) for name in (PACKS, REFUSED)}})
    return Preset(out)


def _use_up(_what: str, _total: int, steps: Iterable[int]) -> None:
    for _ in steps:
        pass


class OfflinePacks(SampleReader):
    """Packs of one epoch by first fit over all of it, in a seeded order. As `OnlinePacks`, without a state."""

    def __init__(self, policy: str, survey: Survey, mixture: Mixture, config: PackingConfig, cost: CostModel) -> None:
        super().__init__(survey, mixture, config)
        self._packs = self._planned(policy, config.budget(), cost)

    def next_pack(self) -> PlannedPack | None:
        return next(self._packs, None)

    def _planned(self, policy: str, budget: Budget, cost: CostModel) -> Iterator[PlannedPack]:
        everything = [fragment for fragments in self.samples() for fragment in fragments]
        packs = OFFLINE_POLICIES[policy](everything, budget)
        balance = Balance(budget, cost)
        order = Permutation(len(packs), derive_seed(self._config.seed, "packs", self._mixture.epoch))
        for number in range(len(packs)):
            fragments = packs[order[number]]
            tokens, tiles, squares, _ = map(sum, zip(*map(balance.sizes, fragments), strict=True))
            yield PlannedPack(number, balance.cost(tokens, tiles, squares), tuple(fragments))


class _Writer:
    """Writes the packs and refusals of all epochs.

    Attributes:
        packs, cut_off: packs and truncated tokens of each epoch.
        figures: of all of them.
    """

    def __init__(self, out: Path, survey: Survey, config: PackingConfig, policy: str | None) -> None:
        self._survey, self._samples, self._config, self._policy = survey, survey.samples, config, policy
        self._cost = CostModel.from_name(config.cost_model)
        self._budget = config.budget()
        self._columns = PACK_COLUMNS | (TREE_COLUMNS if survey.has_trees() else {})
        self._columns |= PICTURE_COLUMNS if survey.counts_pictures else {}
        self._paths = [out / f"{name}.part" for name in (PACKS, REFUSED)]
        self.packs: list[int] = []
        self.cut_off: list[int] = []
        self.figures = _Figures(config)

    def write(self, epochs: int) -> Iterator[int]:
        """Write all epochs; yields positions planned since the last yield."""
        with (
            RowWriter(self._paths[0], self._columns, PACKS_PER_GROUP) as packs,
            RowWriter(self._paths[1], REFUSED_COLUMNS, 1 << 16) as refused,
        ):
            for epoch in range(epochs):
                yield from self._write_epoch(epoch, packs, refused)
                packs.end_group()
        if not self.figures.packs:
            reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(self.figures.refused.items()))
            raise UserError(f"no sample of the data can be trained on ({reasons}): {self.figures.example}")

    def _write_epoch(self, epoch: int, packs: RowWriter, refused: RowWriter) -> Iterator[int]:
        mixture = self._samples.mixture(self._config, epoch)
        if self._policy is None:
            sequence: OnlinePacks | OfflinePacks = OnlinePacks(self._survey, mixture, self._config, self._cost)
        else:
            sequence = OfflinePacks(self._policy, self._survey, mixture, self._config, self._cost)
        ledger, number, cursor, before = sequence.ledger, 0, 0, Counter[str]()
        while True:
            pack = sequence.next_pack()
            leaving = sequence.take_refused()
            for each in leaving:
                refused.add(self._refusal(mixture, epoch, number, each))
            if pack is None:
                break
            new_parts: dict[int, int] = {}
            for position, count in reversed(ledger.parts.items()):  # in the order in which they were read
                if position < cursor:
                    break
                new_parts[position] = count
            read = ledger.counts - before
            row = self._row(mixture, pack) | {"epoch": epoch, "samples_read": read["samples_in"] - len(leaving)}
            row |= {"tokens_read": read["tokens_in"], "tokens_cut_off": read["tokens_cut_off"]}
            row["split_positions"], row["split_counts"] = list(new_parts)[::-1], list(new_parts.values())[::-1]
            packs.add(row)
            self.figures.add(pack)
            for fragment in pack.fragments:
                ledger.pack(fragment)
            before = ledger.counts.copy()
            yield sequence.cursor - cursor
            number, cursor = number + 1, sequence.cursor
        yield sequence.cursor - cursor
        self.packs.append(number)
        self.cut_off.append(ledger.counts["tokens_cut_off"])
        ledger.check()

    def _row(self, mixture: Mixture, pack: PlannedPack) -> dict[str, Any]:
        fragments = pack.fragments
        lengths = [f.num_tokens for f in fragments]
        padded = [self._budget.aligned(n) for n in lengths]
        tiles = [f.num_tiles for f in fragments]
        row = {
            "pack": pack.number,
            "cost": pack.cost,
            "num_tokens": sum(lengths),
            "num_padded_tokens": sum(padded),
            "num_tiles": sum(tiles),
            "cu_seqlens": [0, *accumulate(lengths)],
            "cu_seqlens_padded": [0, *accumulate(padded)],
            "sample_ids": [self._samples.sample_id(*mixture.locate(f.position)) for f in fragments],
            "lengths": lengths,
            "tiles": tiles,
        }
        return row | dict(zip(Fragment._fields, zip(*fragments, strict=True), strict=True))

    def _refusal(self, mixture: Mixture, epoch: int, number: int, refused: Refused) -> dict[str, Any]:
        moved = self._samples.without_folder
        row = {"epoch": epoch, "pack": number, "sample_id": self._samples.sample_id(*mixture.locate(refused.position))}
        row |= refused._asdict() | {"detail": moved(refused.detail), "source": refused.source and moved(refused.source)}
        self.figures.refuse(row)
        return row


class _Figures:
    """Statistics of a preset, gathered pack by pack."""

    def __init__(self, config: PackingConfig) -> None:
        self._config = config
        self._tally = PackTally(config.budget())
        self._lengths: Counter[int] = Counter()  # segments by the power of two that they reach
        self.refused: Counter[str] = Counter()
        self.example = ""

    @property
    def packs(self) -> int:
        return self._tally.packs

    def add(self, pack: PlannedPack) -> None:
        self._tally.add(pack.fragments)
        self._lengths.update(fragment.num_tokens.bit_length() - 1 for fragment in pack.fragments)

    def refuse(self, refused: Mapping[str, Any]) -> None:
        self.refused[refused["reason"]] += 1
        self.example = self.example or f"{refused['sample_id']}: {refused['detail']}"

    def as_json(self) -> dict[str, Any]:
        tally, config, packs, bound = self._tally, self._config, self.packs, self._tally.bounds.best()
        capacity = packs * config.max_packed_tokens
        return {
            "samples": tally.samples,
            "refused": dict(sorted(self.refused.items())),
            "packs": packs,
            "packs_bound": bound,
            "packs_over_bound": round(packs / bound, 6),
            "tokens": tally.tokens,
            "tiles": tally.tiles,
            "token_fill": round(tally.tokens / capacity, 6),
            "token_fill_with_alignment": round(tally.aligned_tokens / capacity, 6),
            "alignment_padding": tally.aligned_tokens - tally.tokens,
            "tile_fill": round(tally.tiles / (packs * config.num_images_expected), 6),
            "segments": tally.segments,
            **({name: getattr(tally, name) for name in ("trees", "branches", "saved_tokens")} if tally.trees else {}),
            "segment_tokens_by_power_of_two": {f"{1 << k}-{(2 << k) - 1}": n for k, n in sorted(self._lengths.items())},
        }
