"""What a meta file's data is made of, and what packing would make of it.

    rows -> survey (lengths), encoder (supervised tokens, images) -> figures
    survey -> the plan of an epoch by each policy (estimate.py)   -> packs, fill, steps

Rows are measured in chunks, in this process or in worker processes. Lengths lie in the survey's mapped files; what is
kept in memory are counts by value, which do not grow with the data.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..config import PackingConfig
from ..order.mixture import Mixture
from ..packing.cost import CostModel
from ..packing.tally import quantile
from ..samples import Samples
from ..survey.survey import Survey
from ..survey.table import REFUSED, Lengths, Measured
from ..survey.workers import in_order
from .epochs import Spread, estimate_spread
from .figures import PackingEstimate

CHUNK_ROWS = 512
NUM_EXAMPLES = 3
# Samples of an epoch that are planned in full by each policy. Larger epochs are extrapolated from as many.
PLANNED_SAMPLES = 100_000
POLICIES = ("subset_sum", "greedy", "next_fit", "single")
QUANTILES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "max": 1.0}
PADDED_BATCHES = (2, 4, 8, 16)
SCATTER_ROWS = 4000

# Shows the progress of a stage: (what is done, its total, (steps, result) pairs) -> the results.
Follow = Callable[[str, int, Iterable[Any]], Iterable[Any]]


def counts_of(values: np.ndarray) -> Counter[int]:
    """How often each value comes: exact quantiles in memory that grows with the number of different values only."""
    return Counter(dict(zip(*(part.tolist() for part in np.unique(values, return_counts=True)), strict=True)))


def total_of(counts: Mapping[int, int]) -> int:
    """The sum of the values."""
    return sum(value * count for value, count in counts.items())


def summary_of(counts: Counter[int]) -> dict[str, float]:
    """Of the values: total, mean and QUANTILES by name."""
    total = total_of(counts)
    quantiles = {name: quantile(counts, share) for name, share in QUANTILES.items()}
    return {"total": total, "mean": total / counts.total() if counts else 0.0} | quantiles


@dataclass
class DatasetStats:
    """One dataset's rows, each once: the good ones by their tokens and by their tiles, the others by reason.

    `positions` are its samples an epoch, by repeat_time or weight.
    """

    name: str
    rows: int = 0
    positions: int = 0
    tokens: Counter[int] = field(default_factory=Counter)
    tiles: Counter[int] = field(default_factory=Counter)
    loss_tokens: int = 0
    images: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> int:
        return self.tokens.total()

    @property
    def supervised_share(self) -> float:
        return self.loss_tokens / total_of(self.tokens) if self.good else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "good": self.good,
            "reasons": dict(self.reasons.most_common()),
            "tokens": summary_of(self.tokens),
            "tiles": summary_of(self.tiles),
            "images": self.images,
            "supervised_share": self.supervised_share,
        }

    def add(self, lengths: Lengths, loss_tokens: int, images: int) -> None:
        """Some rows: lengths, and the sums of their supervised tokens and images."""
        good = lengths.verdicts != REFUSED
        self.rows += len(good)
        self.tokens.update(counts_of(lengths.tokens[good]))
        self.tiles.update(counts_of(lengths.tiles[good]))
        self.loss_tokens += loss_tokens
        self.images += images


@dataclass
class Stats:
    """Everything that `internvl-pack stats` shows."""

    config: PackingConfig
    packs_per_step: int
    datasets: list[DatasetStats]
    examples: dict[str, list[str]]
    predictions: dict[str, PackingEstimate]
    scatter: list[np.ndarray]  # a dataset: (rows, 2) tokens and tiles of some of its rows

    @property
    def chosen(self) -> PackingEstimate:
        return self.predictions[self.config.packing_policy]

    @property
    def all(self) -> DatasetStats:
        """All datasets' rows, each once."""
        out = DatasetStats("all")
        for d in self.datasets:
            for name in ("rows", "positions", "tokens", "tiles", "loss_tokens", "images", "reasons"):
                setattr(out, name, getattr(out, name) + getattr(d, name))
        return out

    def epoch_tokens(self, dataset: DatasetStats) -> float:
        """Tokens that a dataset gives an epoch, on average over epochs."""
        return total_of(dataset.tokens) * dataset.positions / dataset.rows if dataset.rows else 0.0

    def padding(self) -> dict[str, float]:
        """The share of computed tokens that is padding: batches padded to their longest, by size, and packed rows."""
        room = min(self.config.budget().max_segment_tokens, self.config.max_seq_length or 1 << 62)
        counts: dict[int, float] = defaultdict(float)
        for d in self.datasets:  # as often as an epoch has them
            weight = d.positions / d.rows if d.rows else 0.0
            for value, count in d.tokens.items():
                counts[min(value, room)] += count * weight
        out = {f"batch_{size}": padded_share(counts, size) for size in PADDED_BATCHES}
        p = self.chosen
        out["packed"] = 1 - p.tokens / p.aligned_tokens if p.aligned_tokens else 0.0
        out["packed_strict"] = 1 - p.token_fill if p.packs else 0.0
        return out

    def as_json(self) -> dict[str, Any]:
        every, budget = self.all, self.config.budget()
        bad, found, names = sum(every.reasons.values()), every.as_json(), ("mean", *QUANTILES)
        epoch = sum(map(self.epoch_tokens, self.datasets))
        return {
            "samples": every.good + bad,  # with damage of no row
            "bad": bad,
            **found,
            "examples": self.examples,
            "share_of_budget": {
                "tokens": {name: found["tokens"][name] / budget.max_tokens for name in names},
                "tiles": {name: found["tiles"][name] / budget.max_tiles for name in names},
            },
            "datasets": [
                {
                    "name": d.name,
                    "rows": d.rows,
                    "samples_an_epoch": d.positions,
                    "share_of_tokens": self.epoch_tokens(d) / epoch if epoch else 0.0,
                    **d.as_json(),
                }
                for d in self.datasets
            ],
            "budget": {
                "max_packed_tokens": budget.max_tokens,
                "num_images_expected": budget.max_tiles,
                "packs_a_step": self.packs_per_step,
                "packing_policy": self.config.packing_policy,
            },
            "packing": {name: self._packing_json(p) for name, p in self.predictions.items()},
            "steps_an_epoch": self.chosen.steps,
            "rank_efficiency": self.chosen.rank_efficiency,
            "tree_line": self.chosen.tree_line() if self.chosen.trees else None,
            "trouble": self.chosen.trouble(),
            "padding": self.padding(),
        }

    def _packing_json(self, p: PackingEstimate) -> dict[str, Any]:
        return {
            "packs": round(p.packs),
            "lower_bound": round(p.bound),
            "packs_over_bound": p.packs_over_bound,
            "token_fill": p.token_fill,
            "tile_fill": p.tile_fill,
            "segments_a_pack": p.segments / p.packs if p.packs else 0.0,
            "samples": round(p.samples),
            "split": round(p.split),
            "trees": round(p.trees),
            "branches": round(p.branches),
            "saved_tokens": round(p.saved_tokens),
            "refused": dict(p.refused.most_common()),
            "steps": p.steps,
            "steps_over_bound": p.steps_over_bound,
            "exact": p.exact,
            "planned_samples": p.num_planned,
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


def _measure(survey: Survey, which: int, start: int, stop: int) -> tuple[int, int, list[tuple[str, str]]]:
    """Rows [start, stop) into the survey: (supervised tokens, images, (reason, detail) of the bad ones)."""
    loss_tokens = images = 0
    found: list[Measured] = []
    for row in range(start, stop):
        measured, encoded = survey.measure(which, row)
        found.append(measured)
        if encoded is not None:
            loss_tokens += encoded.record.num_loss_tokens
            images += len(encoded.images)
    survey.tables[which].put(range(start, stop), found)
    errors = [one.note.error for one in found if one.note is not None and one.note.error is not None]
    return loss_tokens, images, [(reason, f"{at}: {detail}" if at else detail) for reason, detail, at in errors]


# -- all of it -----------------------------------------------------------------------------------------


def _results(_what: str, _total: int, steps: Iterable[Any]) -> Iterator[Any]:
    for _, result in steps:
        yield result


def gather(
    samples: Samples,
    config: PackingConfig,
    *,
    root: Path | None = None,
    packs_per_step: int = 1,
    num_ranks: int = 1,
    num_workers: int = 0,
    planned_samples: int = PLANNED_SAMPLES,
    follow: Follow = _results,
) -> Stats:
    """Measure all rows, then pack an epoch by each policy.

    Args:
        samples, config: as `PackedDataset` takes them.
        root: folder of the surveys; None keeps what is measured for this call only.
        packs_per_step: ranks x packs a batch x accumulation; num_ranks among them.
        num_workers: processes; 0 works in this one.
        planned_samples: see PLANNED_SAMPLES.

    Raises:
        UserError: reading cannot continue, or a worker was killed.
    """
    samples = samples.joined(config, root)
    mixture = samples.mixture(config, 0)
    samples.check_some(len(mixture))
    survey = Survey(samples, config.room, root)
    datasets, examples = _measured(survey, mixture, num_workers, follow)
    spread, cost = Spread(mixture, planned_samples), CostModel.from_name(config.cost_model)
    policies = tuple(dict.fromkeys((config.packing_policy, *POLICIES)))
    planned = partial(
        estimate_spread,
        survey,
        spread,
        cost=cost,
        packs_per_step=packs_per_step,
        num_ranks=num_ranks,
        stops=False,
    )

    def packed() -> Iterator[tuple[int, tuple[str, PackingEstimate]]]:
        for policy in policies:
            single = policy == "single"
            by_policy = replace(config, packing=not single, packing_policy=config.packing_policy if single else policy)
            yield len(spread), (policy, planned(by_policy))

    return Stats(
        config=config,
        packs_per_step=packs_per_step,
        datasets=datasets,
        examples=examples,
        predictions=dict(follow("packing", len(policies) * len(spread), packed())),
        scatter=_scatter(survey),
    )


def _measured(
    survey: Survey, mixture: Mixture, num_workers: int, follow: Follow
) -> tuple[list[DatasetStats], dict[str, list[str]]]:
    """(each dataset's rows, details of the first bad samples by reason), of all rows of the survey's data."""
    samples = survey.samples
    datasets = [
        DatasetStats(spec.name, positions=count) for spec, count in zip(samples.specs, mixture.counts, strict=True)
    ]
    examples: dict[str, list[str]] = {}

    def count_bad(dataset: DatasetStats, reason: str, detail: str) -> None:
        dataset.reasons[reason] += 1
        if len(kept := examples.setdefault(reason, [])) < NUM_EXAMPLES:
            kept.append(detail)

    for dataset, source in zip(datasets, samples.sources, strict=True):
        for error in source.damage:
            count_bad(dataset, error.reason, error.located_detail)
    measured = in_order(partial(_measure, survey), samples.chunks(CHUNK_ROWS), num_workers)
    steps = ((task[2] - task[1], (task, result)) for task, result in measured)
    for (which, start, stop), (loss_tokens, images, bad) in follow("measuring", samples.num_rows, steps):
        datasets[which].add(survey.tables[which].lengths(np.arange(start, stop)), loss_tokens, images)
        for reason, detail in bad:
            count_bad(datasets[which], reason, detail)
    return datasets, dict(sorted(examples.items()))


def _scatter(survey: Survey) -> list[np.ndarray]:
    """Tokens and tiles of up to SCATTER_ROWS good rows, evenly spaced, in proportion to the datasets."""
    step = max(1, survey.samples.num_rows // SCATTER_ROWS)
    out = []
    for table in survey.tables:
        picked = table.lengths(np.arange(0, table.key.num_rows, step))
        good = picked.verdicts != REFUSED
        out.append(np.stack([picked.tokens[good], picked.tiles[good]], axis=1))
    return out
