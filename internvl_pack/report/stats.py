"""What a meta file's data is made of, and what packing would make of it.

    rows -> Source.read -> Encoder.encode (text, image headers) -> lengths on disk -> figures
                                                                        |
    Planner (the packer that trains) over the epoch's order <-----------+        -> packs, fill, steps

Rows are measured in chunks, in this process or in worker processes (scan.py). Lengths lie in mapped files; what is
kept in memory are counts by value, which do not grow with the data.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..config import PackingConfig
from ..errors import SampleError, UserError
from ..planning import Planner, _LaneReader
from ..prior import plans_share_a_prior
from ..records import Record
from ..scan import REFUSED, parallel
from ..sources import DatasetSpec, Source
from ..sources.mixture import MixturePart, mixture_counts

CHUNK_ROWS = 512
NUM_EXAMPLES = 3
PLANNED_SAMPLES = 100_000
"""Samples of an epoch that are planned in full by each policy. Larger epochs are extrapolated from as many."""
POLICIES = ("subset_sum", "greedy", "next_fit", "single")
QUANTILES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "max": 1.0}
PADDED_BATCHES = (2, 4, 8, 16)
FILL_BINS = 100
SCATTER_ROWS = 4000

Follow = Callable[[str, int, Iterable[Any]], Iterable[Any]]
"""Shows the progress of a stage: (what is done, its total, (steps, result) pairs) -> the results."""


@dataclass
class Distribution:
    """Counts by value: exact quantiles in memory that grows with the number of different values only."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, values: np.ndarray) -> None:
        for value, count in zip(*(part.tolist() for part in np.unique(values, return_counts=True)), strict=True):
            self.counts[value] += count

    def merged(self, other: Distribution) -> Distribution:
        return Distribution(self.counts + other.counts)

    @property
    def total(self) -> int:
        return sum(value * count for value, count in self.counts.items())

    def quantile(self, share: float) -> int:
        """The smallest value that at least `share` of the counted values do not exceed; 0 where there is none."""
        need, seen = share * self.counts.total(), 0
        for value in sorted(self.counts):
            seen += self.counts[value]
            if seen >= need:
                return value
        return 0

    def summary(self) -> dict[str, float]:
        """Total, mean and QUANTILES by name."""
        number = self.counts.total()
        return {"total": self.total, "mean": self.total / number if number else 0.0} | {
            name: self.quantile(share) for name, share in QUANTILES.items()
        }


@dataclass
class DatasetStats:
    """One dataset's rows, each once. `positions` are its samples an epoch, by repeat_time or weight."""

    name: str
    rows: int = 0
    positions: int = 0
    tokens: Distribution = field(default_factory=Distribution)
    tiles: Distribution = field(default_factory=Distribution)
    loss_tokens: int = 0
    images: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> int:
        return self.tokens.counts.total()

    @property
    def supervised_share(self) -> float:
        return self.loss_tokens / self.tokens.total if self.good else 0.0

    def add(self, lengths: np.ndarray) -> None:
        """Lengths of some rows, (rows, 4) int32: tokens, tiles, supervised tokens, images."""
        good = lengths[lengths[:, 0] != REFUSED]
        self.rows += len(lengths)
        self.tokens.add(good[:, 0])
        self.tiles.add(good[:, 1])
        self.loss_tokens += int(good[:, 2].sum(dtype=np.int64))
        self.images += int(good[:, 3].sum(dtype=np.int64))


@dataclass
class Prediction:
    """An epoch packed by one policy.

    Attributes:
        packs, turns: of the epoch; turns count those of lanes that end early, which ranks wait for.
        tokens, tiles: in those packs; `aligned` tokens include padding to a multiple.
        fills: packs by the fuller of their two fills, FILL_BINS + 1 bins.
        exact: whether the whole epoch was planned; else figures are extrapolated from `planned` of its samples.
    """

    policy: str
    packs: int = 0
    turns: int = 0
    tokens: int = 0
    aligned: int = 0
    tiles: int = 0
    segments: int = 0
    samples: int = 0
    split: int = 0
    planned: int = 0
    exact: bool = True
    fills: list[int] = field(default_factory=lambda: [0] * (FILL_BINS + 1))
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass
class Stats:
    """Everything that `internvl-pack stats` shows."""

    config: PackingConfig
    num_lanes: int
    packs_per_step: int
    datasets: list[DatasetStats]
    examples: dict[str, list[str]]
    predictions: dict[str, Prediction]
    scatter: list[np.ndarray]  # a dataset: (rows, 2) tokens and tiles of some of its rows

    @property
    def chosen(self) -> Prediction:
        return self.predictions[self.config.packing_policy]

    @property
    def all(self) -> DatasetStats:
        """All datasets' rows, each once."""
        out = DatasetStats("all")
        for d in self.datasets:
            out.rows += d.rows
            out.positions += d.positions
            out.tokens, out.tiles = out.tokens.merged(d.tokens), out.tiles.merged(d.tiles)
            out.loss_tokens += d.loss_tokens
            out.images += d.images
            out.reasons += d.reasons
        return out

    def epoch_tokens(self, dataset: DatasetStats) -> float:
        """Tokens that a dataset gives an epoch, on average over epochs."""
        return dataset.tokens.total * dataset.positions / dataset.rows if dataset.rows else 0.0

    def steps(self, prediction: Prediction) -> int:
        """Optimizer steps of an epoch."""
        return math.ceil(prediction.turns / self.packs_per_step)

    def lower_bound(self, prediction: Prediction) -> int:
        """Packs by the sums alone: no packer can do with fewer."""
        budget = self.config.budget()
        by_tiles = math.ceil(prediction.tiles / budget.max_tiles)
        return max(math.ceil(prediction.aligned / budget.max_tokens), by_tiles, int(prediction.segments > 0))

    def fill(self, prediction: Prediction) -> tuple[float, float]:
        """(tokens, tiles) over what the packs could hold."""
        budget, packs = self.config.budget(), max(1, prediction.packs)
        return prediction.tokens / (packs * budget.max_tokens), prediction.tiles / (packs * budget.max_tiles)

    def padding(self) -> dict[str, float]:
        """The share of computed tokens that is padding: batches padded to their longest, by size, and packed rows."""
        room = min(self.config.budget().max_segment_tokens, self.config.max_seq_length or 1 << 62)
        counts: dict[int, float] = defaultdict(float)
        for d in self.datasets:  # as often as an epoch has them
            weight = d.positions / d.rows if d.rows else 0.0
            for value, count in d.tokens.counts.items():
                counts[min(value, room)] += count * weight
        out = {f"batch_{size}": padded_share(counts, size) for size in PADDED_BATCHES}
        p = self.chosen
        out["packed"] = 1 - p.tokens / p.aligned if p.aligned else 0.0
        out["packed_strict"] = 1 - self.fill(p)[0] if p.packs else 0.0
        return out

    def as_json(self) -> dict[str, Any]:
        every, budget = self.all, self.config.budget()
        tokens, tiles = every.tokens.summary(), every.tiles.summary()
        names = ("mean", *QUANTILES)
        epoch = sum(map(self.epoch_tokens, self.datasets))
        return {
            "samples": every.rows + sum(every.reasons.values()) - (every.rows - every.good),  # with damage of no row
            "good": every.good,
            "bad": sum(every.reasons.values()),
            "reasons": dict(every.reasons.most_common()),
            "examples": self.examples,
            "tokens": tokens,
            "tiles": tiles,
            "images": every.images,
            "supervised_share": every.supervised_share,
            "share_of_budget": {
                "tokens": {name: tokens[name] / budget.max_tokens for name in names},
                "tiles": {name: tiles[name] / budget.max_tiles for name in names},
            },
            "datasets": [
                {
                    "name": d.name,
                    "rows": d.rows,
                    "good": d.good,
                    "reasons": dict(d.reasons.most_common()),
                    "samples_an_epoch": d.positions,
                    "share_of_tokens": self.epoch_tokens(d) / epoch if epoch else 0.0,
                    "tokens": d.tokens.summary(),
                    "tiles": d.tiles.summary(),
                    "images": d.images,
                    "supervised_share": d.supervised_share,
                }
                for d in self.datasets
            ],
            "budget": {
                "max_packed_tokens": budget.max_tokens,
                "num_images_expected": budget.max_tiles,
                "num_lanes": self.num_lanes,
                "packs_a_step": self.packs_per_step,
                "packing_policy": self.config.packing_policy,
            },
            "packing": {name: self._packing_json(p) for name, p in self.predictions.items()},
            "steps_an_epoch": self.steps(self.chosen),
            "padding": self.padding(),
        }

    def _packing_json(self, p: Prediction) -> dict[str, Any]:
        tokens, tiles = self.fill(p)
        bound = self.lower_bound(p)
        return {
            "packs": p.packs,
            "lower_bound": bound,
            "packs_over_bound": p.packs / bound if bound else 1.0,
            "token_fill": tokens,
            "tile_fill": tiles,
            "segments_a_pack": p.segments / p.packs if p.packs else 0.0,
            "samples": p.samples,
            "split": p.split,
            "refused": dict(p.reasons.most_common()),
            "steps": self.steps(p),
            "exact": p.exact,
            "planned_samples": p.planned,
        }


def padded_share(counts: Mapping[int, float], batch_size: int) -> float:
    """Expected share of padding in batches of `batch_size` samples drawn at random and padded to their longest.

    With F the distribution of lengths, the longest of b samples has the mean sum over l of l (F(l)^b - F(l-)^b).
    """
    total = sum(counts.values())
    if not total:
        return 0.0
    below = longest = mean = 0.0
    for length in sorted(counts):
        share = counts[length] / total
        longest += length * ((below + share) ** batch_size - below**batch_size)
        mean += length * share
        below += share
    return max(0.0, 1 - mean / longest) if longest else 0.0


# -- measuring -----------------------------------------------------------------------------------------


class Measurer:
    """Measures rows. Picklable, for workers."""

    def __init__(self, sources: Sequence[Source], specs: Sequence[DatasetSpec], encoder: Any) -> None:
        self.sources, self.specs, self.encoder = list(sources), list(specs), encoder

    def measure(self, which: int, start: int, stop: int) -> tuple[int, int, np.ndarray, list[tuple[str, str]]]:
        """Rows [start, stop): (which, start, (rows, 4) int32 lengths, (reason, detail) of the bad ones)."""
        lengths = np.zeros((stop - start, 4), dtype=np.int32)
        bad = []
        for row in range(start, stop):
            try:
                encoded = self.encoder.load(self.sources[which], row, self.specs[which])
            except SampleError as error:
                lengths[row - start, 0] = REFUSED
                bad.append((error.reason, error.told))
                continue
            record = encoded.record
            lengths[row - start] = (record.num_tokens, record.num_tiles, record.num_loss_tokens, len(encoded.images))
        return which, start, lengths, bad


class Table:
    """The measured lengths, mapped; see planning.Lengths. Picklable."""

    def __init__(self, folder: Path, measurer: Measurer) -> None:
        self.folder, self.measurer = folder, measurer
        self._open()

    def _open(self) -> None:
        mode = "r+" if all(path.exists() for path in self._paths()) else "w+"
        self.lengths_of = []
        for path, source in zip(self._paths(), self.measurer.sources, strict=True):
            if not len(source):  # nothing can be mapped
                self.lengths_of.append(np.zeros((0, 4), dtype=np.int32))
            elif mode == "r+":
                self.lengths_of.append(np.load(path, mmap_mode="r+"))
            else:
                shape = (len(source), 4)
                self.lengths_of.append(np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=shape))
        self._record = lru_cache(maxsize=64)(self._encode)

    def _paths(self) -> list[Path]:
        return [self.folder / f"lengths-{which:03d}.npy" for which, s in enumerate(self.measurer.sources)]

    def __getstate__(self) -> tuple[Path, Measurer]:
        return self.folder, self.measurer

    def __setstate__(self, state: tuple[Path, Measurer]) -> None:
        self.folder, self.measurer = state
        self._open()

    def lengths(self, which: int, row: int) -> tuple[int, int, int]:
        tokens, tiles, loss, _ = self.lengths_of[which][row].tolist()
        if tokens == REFUSED:
            raise SampleError(_UNREADABLE, "")
        return tokens, tiles, loss

    def record(self, which: int, row: int, sample_id: str) -> Record:
        """With its spans, for splitting: the few samples that exceed a budget are encoded again."""
        return self._record(which, row)

    def _encode(self, which: int, row: int) -> Record:
        m = self.measurer
        return m.encoder.load(m.sources[which], row, m.specs[which]).record


_UNREADABLE = "unreadable"  # counted by its true reason where rows are measured


# -- packing -------------------------------------------------------------------------------------------


class _Reader(_LaneReader):
    """A lane's samples, as many as are planned; refusals are counted and stop nothing."""

    def __init__(self, planner: Planner, lane: int, limit: int | None) -> None:
        super().__init__(planner, 0, lane)
        self.limit = limit
        self.reasons: Counter[str] = Counter()
        self.good = self.split = 0

    def next_sample(self) -> list[Any] | None:
        if self.limit is not None and self.cursor >= self.limit:
            return None
        fragments = super().next_sample()
        self.good += bool(fragments)
        self.split += len(fragments or ()) > 1
        return fragments

    def _refuse(self, position: int, which: int, row: int, error: SampleError) -> None:
        if error.reason != _UNREADABLE:
            self.reasons[error.reason] += 1


@dataclass
class Packer:
    """Packs lanes of epoch 0. Picklable, for workers."""

    table: Table
    parts: Sequence[MixturePart]
    config: PackingConfig
    _planners: dict[str, Planner] = field(default_factory=dict)

    def pack(self, policy: str, lane: int, limit: int | None) -> tuple[int, Prediction]:
        """(lane, the lane's packs by this policy)."""
        budget, out = self.config.budget(), Prediction(policy)
        planner = self._planner(policy)
        reader = _Reader(planner, lane, limit)
        for pack in planner._packs(reader):
            tokens = sum(f.num_tokens for f in pack)
            aligned = sum(budget.aligned(f.num_tokens) for f in pack)
            tiles = sum(f.num_tiles for f in pack)
            out.packs += 1
            out.tokens += tokens
            out.aligned += aligned
            out.tiles += tiles
            out.segments += len(pack)
            out.fills[int(FILL_BINS * max(aligned / budget.max_tokens, tiles / budget.max_tiles))] += 1
        out.samples, out.split, out.reasons, out.planned = reader.good, reader.split, reader.reasons, reader.cursor
        return lane, out

    def _planner(self, policy: str) -> Planner:
        """Plans by this policy; one for all lanes, which begin alike."""
        if policy in self._planners:
            return self._planners[policy]
        single = policy == "single"
        config = replace(
            self.config,
            packing_policy=policy,
            max_buffer_size=1 if single else self.config.max_buffer_size,
            balance_reservoir=0 if single else self.config.balance_reservoir,
        )
        measurer = self.table.measurer
        prior = plans_share_a_prior(config, measurer.specs, measurer.sources, self.parts)
        self._planners[policy] = Planner(self.table, self.parts, measurer.sources, config, has_prior=prior)
        return self._planners[policy]


def _joined(policy: str, lanes: Mapping[int, Prediction], num_lanes: int, num_positions: int) -> Prediction:
    """One prediction of the lanes that were planned, extrapolated where some are missing."""
    out = Prediction(policy)
    for p in lanes.values():
        for name in ("packs", "tokens", "aligned", "tiles", "segments", "samples", "split", "planned"):
            setattr(out, name, getattr(out, name) + getattr(p, name))
        out.fills = [a + b for a, b in zip(out.fills, p.fills, strict=True)]
        out.reasons += p.reasons
    longest = max(p.packs for p in lanes.values())
    last = max(lane for lane, p in lanes.items() if p.packs == longest)
    out.turns = (longest - 1) * num_lanes + last + 1 if longest else 0
    out.exact = out.planned == num_positions
    if not out.exact:
        scale = num_positions / out.planned
        for name in ("packs", "tokens", "aligned", "tiles", "segments", "samples", "split"):
            setattr(out, name, round(getattr(out, name) * scale))
        out.reasons = Counter({reason: round(count * scale) for reason, count in out.reasons.items()})
        out.turns = out.packs
    return out


# -- all of it -----------------------------------------------------------------------------------------


def _results(_what: str, _total: int, steps: Iterable[Any]) -> Iterator[Any]:
    for _, result in steps:
        yield result


def gather(
    specs: Sequence[DatasetSpec],
    sources: Sequence[Source],
    encoder: Any,
    config: PackingConfig,
    *,
    folder: Path,
    num_lanes: int,
    packs_per_step: int = 1,
    num_workers: int = 0,
    planned_samples: int = PLANNED_SAMPLES,
    follow: Follow = _results,
) -> Stats:
    """Measure all rows, then pack an epoch by each policy.

    Args:
        specs, sources, encoder, config: as `PackedDataset` takes them.
        folder: an empty one for the lengths, 16 bytes a row, which may be removed afterwards.
        num_lanes: of the run.
        packs_per_step: ranks x packs a batch x accumulation.
        num_workers: processes; 0 works in this one.
        planned_samples: see PLANNED_SAMPLES.

    Raises:
        UserError: no samples, the data cannot be gone on with, or a worker was killed.
    """
    measurer = Measurer(sources, specs, encoder)
    parts = config.parts(specs, sources)
    counts = mixture_counts(parts, use_data_resampling=config.use_data_resampling)
    if not sum(counts):
        damage = next((str(d) for s in sources for d in s.damage), "all of its files are empty")
        raise UserError(f"the data holds no samples: {damage}")
    datasets = [DatasetStats(spec.name, positions=count) for spec, count in zip(specs, counts, strict=True)]
    table, examples = Table(folder, measurer), _Examples()
    for dataset, source in zip(datasets, sources, strict=True):
        for error in source.damage:
            dataset.reasons[error.reason] += 1
            examples.add(error.reason, (-1, 0, 0), error.told)
    chunks = [
        (which, start, min(start + CHUNK_ROWS, len(source)))
        for which, source in enumerate(sources)
        for start in range(0, len(source), CHUNK_ROWS)
    ]
    measured = ((len(r[2]), r) for r in parallel(measurer, "measure", chunks, num_workers))
    for which, start, lengths, bad in follow("measuring", sum(map(len, sources)), measured):
        table.lengths_of[which][start : start + len(lengths)] = lengths
        datasets[which].add(lengths)
        datasets[which].reasons.update(reason for reason, _ in bad)
        for number, (reason, detail) in enumerate(bad):
            examples.add(reason, (which, start, number), detail)
    for lengths in table.lengths_of:
        if isinstance(lengths, np.memmap):
            lengths.flush()

    config = replace(config, num_lanes=num_lanes)
    positions = sum(counts)
    lanes = range(max(1, min(num_lanes, planned_samples * num_lanes // positions)))
    limit = planned_samples if len(lanes) == 1 else None
    policies = tuple(dict.fromkeys((config.packing_policy, *POLICIES)))
    packer = Packer(table, parts, config)
    tasks = [(policy, lane, limit) for policy in policies for lane in lanes]
    packed = ((r[1].planned, r) for r in parallel(packer, "pack", tasks, num_workers if positions > 5000 else 0))
    found: dict[str, dict[int, Prediction]] = {policy: {} for policy in policies}
    planned = len(policies) * min(positions, len(lanes) * -(-positions // num_lanes), limit or positions)
    for lane, prediction in follow("packing", planned, packed):
        found[prediction.policy][lane] = prediction
    return Stats(
        config=config,
        num_lanes=num_lanes,
        packs_per_step=packs_per_step,
        datasets=datasets,
        examples=examples.lists(),
        predictions={policy: _joined(policy, by_lane, num_lanes, positions) for policy, by_lane in found.items()},
        scatter=_scatter(table),
    )


class _Examples:
    """The details of the first rows of each reason, whichever worker was first."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[tuple[int, int, int], str]]] = {}

    def add(self, reason: str, place: tuple[int, int, int], detail: str) -> None:
        found = self._found.setdefault(reason, [])
        found.append((place, detail))
        if len(found) > NUM_EXAMPLES:
            found.sort()
            found.pop()

    def lists(self) -> dict[str, list[str]]:
        return {reason: [detail for _, detail in sorted(found)] for reason, found in sorted(self._found.items())}


def _scatter(table: Table) -> list[np.ndarray]:
    """Tokens and tiles of up to SCATTER_ROWS good rows, evenly spaced, in proportion to the datasets."""
    total = sum(map(len, table.lengths_of)) or 1
    step = max(1, total // SCATTER_ROWS)
    picked = [np.array(lengths[::step, :2]) for lengths in table.lengths_of]
    return [rows[rows[:, 0] != REFUSED] for rows in picked]
