"""How many steps an epoch has and what its packs hold: counted by the very plan where that is quick, else estimated.

    estimate_epochs: the plan of each epoch, followed to its end            -> exact
                     or of positions evenly apart, packed as one epoch is   -> scaled up to the epoch

`follow_plan` is common to all that report packs: training's first line, `stats` and `simulate`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import PackingConfig
from ..errors import RemoteDataError
from ..options import count
from ..order.mixture import Mixture
from ..packing.budget import Budget
from ..packing.cost import CostModel
from ..packing.tally import PackTally
from ..plan.groups import Step, StepPlan, deal
from ..plan.online import Lengths, OnlinePacks
from ..plan.sequence import PlannedPack
from ..sources.addresses import local_only

if TYPE_CHECKING:
    from ..stream.dataset import PackedDataset

EXACT_SECONDS = 10.0  # what counting all epochs may take
PLANNED_A_SECOND = 25_000  # samples; benchmarks/plan.py
SURVEYED_A_SECOND = 2_500
SAMPLES = 2_000  # an estimate rests on: a second where they are not known
KNOWN_SAMPLES = 100_000  # and where their lengths are known
REMOTE_SAMPLES = 200  # where images are fetched from a server: each takes a request
REMOTE_SECONDS = 30.0  # then it has to do with those that came
GOLDEN = 0.6180339887498949  # of the epoch: steps of this length spread evenly, however many are taken

LOW_FILL = 0.8  # of the tokens of a row; of the tiles from here on: they are what ends a pack
FEW_SAMPLES = 1.5  # a pack: most packs hold one
MANY_CUT = 0.1  # of the samples
IDLE = 0.1  # of the places for packs in an epoch's steps
CLOSE_FILL, CLOSE_SAMPLES = 0.05, 0.15  # how far packs may be from the estimate: of the budget, of the samples


@dataclass(frozen=True, kw_only=True)
class PackingEstimate:
    """What the packs of an epoch hold, and the steps that they make.

    Attributes:
        packs: their number.
        samples, tokens, tiles: what they hold in all; parts of a split sample count once.
        aligned_tokens: tokens with what aligning adds to each segment.
        segments, split: segments in all, and samples that were split.
        trees, branches, saved_tokens: see `PackTally`.
        bounds: packs that no packer can do without, by the name of the bound.
        steps, steps_not_full, steps_empty: of packs_per_step packs; those with fewer, those without any.
        rank_efficiency: mean over max of the ranks' costs of a step, averaged over the full steps; None without any.
        epoch_efficiency: the same of the ranks' costs over all steps, the last one among them: the share of the time in
            which ranks do not wait for the dearest; None where the end of the epoch is not known.
        refused: samples in no pack, by reason.
        fills: packs by the fuller of their two fills, FILL_BINS + 1 bins.
        budget: (tokens, tiles) of a pack.
        packs_per_step, num_ranks: ranks x accumulation x packs a batch; the ranks among them.
        policy: how packs are chosen.
        exact: whether they were counted.
        num_planned: samples that were planned for it.
        plan_seconds: of one core, that planning them took.
        waits: fragments by the samples that were read between them and their pack; empty for a written preset.
    """

    packs: float
    samples: float
    tokens: float
    tiles: float
    budget: tuple[int, int]
    aligned_tokens: float = 0.0
    segments: float = 0.0
    split: float = 0.0
    trees: float = 0.0
    branches: float = 0.0
    saved_tokens: float = 0.0
    bounds: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0
    steps_not_full: int = 0
    steps_empty: int = 0
    rank_efficiency: float | None = None
    epoch_efficiency: float | None = None
    refused: Counter[str] = field(default_factory=Counter)
    fills: tuple[int, ...] = ()
    packs_per_step: int = 1
    num_ranks: int = 1
    policy: str = "subset_sum"
    exact: bool = False
    num_planned: int = 0
    plan_seconds: float = 0.0
    waits: Counter[int] = field(default_factory=Counter)

    @property
    def bound(self) -> float:
        """The highest bound; at least 1 where there is anything to pack."""
        return max([*self.bounds.values(), min(1.0, self.packs)])

    @property
    def samples_per_pack(self) -> float:
        return self.samples / max(1.0, self.packs)

    @property
    def token_fill(self) -> float:
        return self.tokens / max(1.0, self.packs * self.budget[0])

    @property
    def tile_fill(self) -> float:
        return self.tiles / max(1.0, self.packs * self.budget[1])

    @property
    def packs_over_bound(self) -> float:
        return self.packs / self.bound if self.bound else 1.0

    @property
    def steps_over_bound(self) -> float:
        """Steps over those that the bound's packs would take."""
        least = math.ceil(self.bound / self.packs_per_step)
        return self.steps / least if least else 1.0

    @property
    def idle(self) -> float:
        """Share of the places for packs in the epoch's steps that stay empty."""
        return 1.0 - self.packs / (self.steps * self.packs_per_step) if self.steps else 0.0

    def line(self) -> str:
        """One line for people."""
        how = "counted" if self.exact else f"estimated from {count(self.num_planned, 'samples')}"
        about = "" if self.exact else "about "
        even = "" if self.rank_efficiency is None or self.num_ranks == 1 else f", ranks {self.rank_efficiency:.1%} even"
        return (
            f"packing: rows of {count(self.budget[0], 'tokens')} and {count(self.budget[1], 'tiles')}; "
            f"an epoch has {about}{count(self.steps, 'steps')} of {count(self.packs_per_step, 'packs')} ({how}), "
            f"{self.steps_over_bound:.3f} times the least possible; "
            f"{count(round(self.packs), 'packs')}, {self.samples_per_pack:.1f} samples a pack, "
            f"token fill {self.token_fill:.1%}, tile fill {self.tile_fill:.1%}{even}"
            + (f"; {self.tree_line()}" if self.trees else "")
        )

    def tree_line(self) -> str:
        """What prefix trees save, for people."""
        share = self.saved_tokens / max(1.0, self.tokens + self.saved_tokens)
        return (
            f"{self.trees:,.0f} prefix trees with {self.branches:,.0f} branches save {self.saved_tokens:,.0f} tokens, "
            f"{share:.0%} of what their answers would take alone"
        )

    def trouble(self) -> str | None:
        """Why packing does little, or ranks wait, and what to change; None where all is well."""
        few, low = self.samples_per_pack < FEW_SAMPLES, self.token_fill < LOW_FILL
        mean_tokens, mean_tiles = self.tokens / max(1.0, self.samples), self.tiles / max(1.0, self.samples)
        tokens, tiles = self.budget
        what = f"packing does little: {self.samples_per_pack:.1f} samples a pack, token fill {self.token_fill:.0%}"
        cut = self.split / max(1.0, self.samples)
        if cut > MANY_CUT:
            raised = f"--max_packed_tokens to {4 * math.ceil(mean_tokens / 1024) * 1024:,}"
            if mean_tiles * tokens > mean_tokens * tiles:
                raised = f"--num_images_expected to {math.ceil(4 * mean_tiles):,}"
            return (
                f"{cut:.0%} of the samples exceed a row of {count(tokens, 'tokens')} and {count(tiles, 'tiles')} and "
                f"are cut, and parts may have nothing to train: raise {raised} or more"
            )
        tiles_first = self.tile_fill >= LOW_FILL and self.tile_fill > self.token_fill
        if (few or low) and (tiles_first or mean_tiles > tiles / 2):
            wanted = max(math.ceil(tokens * self.tiles / max(1.0, self.tokens)), math.ceil(2 * mean_tiles))
            return (
                f"{what}, because tiles fill rows first ({mean_tiles:.1f} in a sample of {mean_tokens:,.0f} tokens): "
                f"raise --num_images_expected from {tiles} to about {wanted}, or lower --max_dynamic_patch "
                "(of native resolution: --max_pixels)"
            )
        if self.idle > IDLE and self.packs_per_step > 1:
            most = max(1, int(IDLE * self.packs))
            ranks = f" on {self.num_ranks} ranks" if self.num_ranks > 1 else ""
            packs, steps = round(self.packs), self.steps
            return (
                f"the data is small for {count(self.packs_per_step, 'packs')} a step{ranks}: "
                f"{count(packs, 'packs')} {'makes' if packs == 1 else 'make'} {count(steps, 'steps')}, "
                f"in which {self.idle:.0%} of the places stay empty: lower ranks x "
                f"--gradient_accumulation_steps x --per_device_train_batch_size to {most:,} or less, or lower "
                "--max_packed_tokens"
            )
        # Of little data the last row is a large share: where rows are as few as can be, no packer fills them better.
        least = math.ceil(max(self.tokens / tokens, self.tiles / max(1, tiles)))
        if ((few or low) and self.packs <= 2) or (low and self.packs <= least):
            rows = count(round(self.packs), "rows")
            return f"{what}, because all of the data fits into {rows}: train on more samples"
        if (few or low) and mean_tokens > tokens / 2:
            return (
                f"{what}, because samples have {mean_tokens:,.0f} of a row's {tokens:,} tokens: raise "
                f"--max_packed_tokens to {4 * math.ceil(mean_tokens / 1024) * 1024:,} or more"
            )
        if (few or low) and self.policy == "next_fit":
            return f"{what}, because next_fit ends a row at the first sample that does not fit: use subset_sum"
        if few or low:
            return (
                f"{what}, because few samples fit what is left of a row: raise --max_packed_tokens or --max_buffer_size"
            )
        return None

    def differs(self, other: PackingEstimate) -> bool:
        """Whether the packs that came differ from those that were estimated."""
        return (
            abs(self.token_fill - other.token_fill) > CLOSE_FILL
            or abs(self.tile_fill - other.tile_fill) > CLOSE_FILL
            or abs(self.samples_per_pack - other.samples_per_pack) > CLOSE_SAMPLES * self.samples_per_pack
        )


@dataclass(frozen=True)
class RunEstimate:
    """The epochs of a run.

    Attributes:
        epochs: the first ones; those after them are taken to be as long as the last of these.
        exact: whether all epochs that were asked for were counted.
        remote: whether it is an estimate from so few samples because images are fetched by address.
    """

    epochs: tuple[PackingEstimate, ...]
    exact: bool
    remote: bool = False

    @property
    def first(self) -> PackingEstimate:
        """The first epoch."""
        return self.epochs[0]

    @property
    def how(self) -> str:
        """How the length was found, for people."""
        if self.exact:
            return "counted"
        if self.first.exact:
            return f"counted for {count(len(self.epochs), 'epochs')}, estimated beyond"
        why = ", since images are fetched by address" if self.remote else ""
        return f"estimated from {count(self.first.num_planned, 'samples')}{why}"

    def steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch."""
        return self.epochs[min(epoch, len(self.epochs) - 1)].steps

    def total_steps(self, num_epochs: float) -> int:
        """Optimizer steps of so many epochs; a part of one is rounded up to a step."""
        whole = int(num_epochs)
        return sum(map(self.steps, range(whole))) + math.ceil(round((num_epochs - whole) * self.steps(whole), 6))

    def packs(self, num_steps: int) -> float:
        """Packs of the run's first so many steps. An epoch's last step has those that are left."""
        packs, last = 0.0, self.epochs[-1]
        for epoch in self.epochs[:-1]:
            packs += min(epoch.packs, num_steps * epoch.packs_per_step)
            num_steps = max(0, num_steps - epoch.steps)
        whole, rest = divmod(num_steps, max(1, last.steps))
        return packs + whole * last.packs + min(last.packs, rest * last.packs_per_step)


def follow_plan(plan: StepPlan, budget: Budget, cost: CostModel, *, num_ranks: int, policy: str) -> PackingEstimate:
    """What an epoch's plan makes, step by step to its end.

    Args:
        cost: of packs, by which ranks are compared.

    Raises:
        UserError: a sample that must stop the run.
    """
    tally = PackTally(budget)
    not_full = empty = 0
    mean_costs = max_costs = evenness = 0.0
    seconds = -time.thread_time()
    while (step := plan.next_step()) is not None:
        seconds += time.thread_time()
        not_full += len(step.packs) < plan.packs_per_step
        empty += not step.packs
        costs = _costs(step, budget, cost, num_ranks) if num_ranks > 1 else [1]
        mean, dearest = sum(costs) / len(costs), max(costs)
        mean_costs += mean
        max_costs += dearest
        if len(step.packs) == plan.packs_per_step:
            evenness += mean / dearest
        for pack in step.packs:
            tally.add(pack.fragments)
        seconds -= time.thread_time()
    seconds += time.thread_time()
    ledger = plan.ledger
    return PackingEstimate(
        packs=tally.packs,
        samples=ledger.samples_packed,
        tokens=tally.tokens,
        tiles=tally.tiles,
        aligned_tokens=tally.aligned_tokens,
        segments=tally.segments,
        split=ledger.counts["samples_split"],
        trees=tally.trees,
        branches=tally.branches,
        saved_tokens=tally.saved_tokens,
        bounds=tally.bounds.all(),
        steps=plan.num_steps,
        steps_not_full=not_full,
        steps_empty=empty,
        rank_efficiency=evenness / (plan.num_steps - not_full) if plan.num_steps > not_full else None,
        epoch_efficiency=mean_costs / max_costs if max_costs else None,
        refused=ledger.dropped + ledger.quarantined,
        fills=tuple(tally.fills),
        budget=(budget.max_tokens, budget.max_tiles),
        packs_per_step=plan.packs_per_step,
        num_ranks=num_ranks,
        policy=policy,
        exact=True,
        num_planned=ledger.samples_in,
        plan_seconds=seconds,
    )


def _costs(step: Step, budget: Budget, cost: CostModel, num_ranks: int) -> list[int]:
    """Of each rank, summed over its micro-batches."""
    return [
        sum(
            cost.of_pack(
                (budget.aligned(f.num_tokens), f.num_tiles, f.num_unseen_pairs, f.num_tile_pairs)
                for f in pack.fragments
            )
            for packs in share
            for pack in packs
        )
        for share in deal(step, num_ranks)
    ]


class WatchedPacks(OnlinePacks):
    """Online packs of which is counted how long fragments wait, and how full packs are while others wait.

    Attributes:
        waits: fragments by the samples that were read between them and their pack.
        steady: packs, aligned tokens and tiles of those built while the order went on.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.waits: Counter[int] = Counter()
        self.steady = (0, 0, 0)

    def next_pack(self) -> PlannedPack | None:
        pack = super().next_pack()
        if pack is None:
            return None
        last = self.cursor - 1
        self.waits.update(last - fragment.position for fragment in pack.fragments)
        if self.more_to_read:
            packs, tokens, tiles = self.steady
            self.steady = (
                packs + 1,
                tokens + sum(self.budget.aligned(f.num_tokens) for f in pack.fragments),
                tiles + sum(f.num_tiles for f in pack.fragments),
            )
        return pack


class Spread(Mixture):
    """Up to `most` positions of an epoch, evenly apart, as an order of their own; all of them in the epoch's order."""

    def __init__(self, mixture: Mixture, most: int) -> None:
        self.parts, self.of_epoch = mixture.parts, mixture.epoch
        self._mixture = mixture
        self.num_positions = len(mixture)
        stride = 1
        if most < self.num_positions:
            least = max(1, int(GOLDEN * self.num_positions))
            stride = next(s for s in range(least, 0, -1) if math.gcd(s, self.num_positions) == 1)
        taken = min(most, self.num_positions)
        self._take(np.arange(taken, dtype=np.int64) * stride % max(1, self.num_positions))

    @property
    def is_whole(self) -> bool:
        return len(self) == self.num_positions

    def _take(self, positions: np.ndarray) -> None:
        self._taken = positions
        self.epoch = -len(positions)  # that no run has: parts of the survey bear its number

    def __len__(self) -> int:
        return len(self._taken)

    def locate(self, position: int) -> tuple[int, int]:
        return self._mixture.locate(int(self._taken[position]))

    def locate_range(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        if self.is_whole:
            return self._mixture.locate_range(start, stop)
        located = np.array([self.locate(position) for position in range(start, stop)], np.int64).reshape(-1, 2)
        return located[:, 0], located[:, 1]

    def first(self, num_positions: int) -> None:
        """Keep the first ones only."""
        self._take(self._taken[:num_positions])


def estimate_epochs(dataset: PackedDataset, packs_per_step: int, num_epochs: float) -> RunEstimate:
    """The steps of a run's epochs.

    An epoch is counted by planning it as training will, for as many epochs as can be planned within EXACT_SECONDS,
    which follows from the rows still to be measured and the samples to be planned. Where that is not even one epoch,
    the first is estimated from SAMPLES of its positions (KNOWN_SAMPLES where lengths are known). No image is fetched
    from a server, except where lengths depend on remote images: then REMOTE_SAMPLES samples, in REMOTE_SECONDS. The
    survey keeps what is measured here, and training does not measure it again.

    Args:
        packs_per_step: ranks x accumulation x packs a batch.
        num_epochs: that are asked for.

    Raises:
        UserError: a sample that must stop the run.
    """
    wanted = max(1, math.ceil(num_epochs))
    if dataset.survey is None and dataset.num_positions * wanted > EXACT_SECONDS * PLANNED_A_SECOND:
        return RunEstimate(tuple(_written(dataset, packs_per_step, epoch) for epoch in range(wanted)), exact=True)
    countable = min(wanted, _countable_epochs(dataset, wanted))
    try:
        with local_only():
            if countable:
                epochs = tuple(_counted(dataset, packs_per_step, epoch) for epoch in range(countable))
                return RunEstimate(epochs, exact=countable == wanted)
            return RunEstimate((_estimated(dataset, packs_per_step),), exact=False)
    except RemoteDataError:
        return RunEstimate((_estimated(dataset, packs_per_step, remote=True),), exact=False, remote=True)


def _countable_epochs(dataset: PackedDataset, wanted: int) -> int:
    """Epochs that can be planned within EXACT_SECONDS."""
    positions, survey = dataset.num_positions, dataset.survey
    if survey is None:
        return wanted
    if positions > EXACT_SECONDS * PLANNED_A_SECOND:
        return 0
    missing = survey.samples.num_rows - survey.num_known
    seconds = EXACT_SECONDS - min(missing, positions * wanted) / SURVEYED_A_SECOND
    return max(0, int(seconds * PLANNED_A_SECOND / positions))


def _counted(dataset: PackedDataset, packs_per_step: int, epoch: int) -> PackingEstimate:
    return follow_plan(
        dataset.step_plan(epoch, packs_per_step),
        dataset.config.budget(),
        dataset.cost_model,
        num_ranks=dataset.world_size,
        policy=dataset.config.packing_policy,
    )


def _written(dataset: PackedDataset, packs_per_step: int, epoch: int) -> PackingEstimate:
    """An epoch of a preset that is too large to be followed: by the number of its packs."""
    preset, config = dataset.preset, dataset.config
    packs, statistics = preset.num_packs(epoch), preset.content["statistics"]
    share = packs / max(1, statistics["packs"])
    held = {name: statistics[name] * share for name in ("samples", "tokens", "tiles")}
    held |= {name: statistics.get(name, 0) * share for name in ("trees", "branches", "saved_tokens")}
    return PackingEstimate(
        packs=packs,
        **held,
        budget=(config.max_packed_tokens, config.num_images_expected),
        bounds={"planned": packs / statistics["packs_over_bound"]},
        steps=math.ceil(packs / packs_per_step),
        steps_not_full=int(packs % packs_per_step > 0),
        packs_per_step=packs_per_step,
        num_ranks=dataset.world_size,
        policy=config.packing_policy,
        exact=True,
    )


def _estimated(dataset: PackedDataset, packs_per_step: int, *, remote: bool = False) -> PackingEstimate:
    """An epoch by the packs of some of its positions."""
    mixture = dataset.mixture(0)
    spread = Spread(mixture, REMOTE_SAMPLES if remote else SAMPLES)
    if remote:
        spread.first(_measured_in_time(dataset, spread))
    else:
        known = Spread(mixture, KNOWN_SAMPLES)
        if _all_known(dataset, known):
            spread = known
    assert dataset.survey is not None, "a preset is counted"
    return estimate_spread(
        dataset.survey,
        spread,
        dataset.config,
        dataset.cost_model,
        packs_per_step=packs_per_step,
        num_ranks=dataset.world_size,
    )


def estimate_spread(
    survey: Lengths,
    spread: Spread,
    config: PackingConfig,
    cost: CostModel,
    *,
    packs_per_step: int,
    num_ranks: int,
    stops: bool = True,
) -> PackingEstimate:
    """An epoch by the packs of the positions in `spread`, scaled up where these are not all of it.

    Args:
        survey, stops: see `SampleReader`.
        packs_per_step: ranks x accumulation x packs a batch.

    Raises:
        UserError: a sample that must stop the run.
    """
    packs = WatchedPacks(survey, spread, config, cost, stops=stops)
    balanced = config.packing and config.shuffle
    plan = StepPlan(packs, packs_per_step, seed=config.seed, epoch=spread.of_epoch, balanced=balanced)
    policy = config.packing_policy if config.packing else "single"
    seen = follow_plan(plan, config.budget(), cost, num_ranks=num_ranks, policy=policy)
    seen = replace(seen, waits=packs.waits)
    if spread.is_whole:
        return seen
    scale = spread.num_positions / len(spread)
    num_packs = _scaled_packs(seen, packs, scale)
    return replace(
        seen,
        packs=num_packs,
        samples=seen.samples * scale,
        tokens=seen.tokens * scale,
        tiles=seen.tiles * scale,
        aligned_tokens=seen.aligned_tokens * scale,
        segments=seen.segments * scale,
        split=seen.split * scale,
        trees=seen.trees * scale,
        branches=seen.branches * scale,
        saved_tokens=seen.saved_tokens * scale,
        refused=Counter({reason: round(count * scale) for reason, count in seen.refused.items()}),
        bounds={"estimated": min(num_packs, seen.bound * scale)},
        steps=math.ceil(num_packs / packs_per_step),
        steps_not_full=int(math.ceil(num_packs) % packs_per_step > 0),
        epoch_efficiency=None,
        exact=False,
    )


def _scaled_packs(seen: PackingEstimate, packs: WatchedPacks, scale: float) -> float:
    """Packs of the epoch: its tokens or tiles, whichever fill packs more, over what a pack holds while others wait.

    The end of a short stream has packs that are not full, which must not be scaled up.
    """
    full, tokens, tiles = packs.steady
    if not full or not (tokens or tiles):
        return seen.packs * scale
    max_tokens, max_tiles = seen.budget
    if tokens * max_tiles >= tiles * max_tokens:
        return seen.aligned_tokens * scale * full / tokens
    return seen.tiles * scale * full / tiles


def _all_known(dataset: PackedDataset, spread: Spread) -> bool:
    """Whether no row of these positions would have to be measured."""
    assert dataset.survey is not None
    datasets, rows = spread.locate_range(0, len(spread))
    return not any(len(dataset.survey.missing(d, rows[datasets == d])) for d in np.unique(datasets).tolist())


def _measured_in_time(dataset: PackedDataset, spread: Spread) -> int:
    """How many of the positions could be measured in REMOTE_SECONDS, at least one."""
    assert dataset.survey is not None
    deadline = time.monotonic() + REMOTE_SECONDS
    for position in range(len(spread)):
        number, row = spread.locate(position)
        dataset.survey.measure_rows(number, np.array([row]))
        if time.monotonic() > deadline:
            return position + 1
    return len(spread)
