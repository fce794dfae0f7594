"""How many steps an epoch has and what its packs hold: counted by planning it where that is quick, else estimated.

    estimate_epochs: each epoch, planned to its end          -> exact
                     or evenly spaced positions, planned     -> scaled up to the epoch

`follow_plan` is common to all that report packs: training's first line, `stats` and `simulate`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import PackingConfig
from ..errors import RemoteDataError
from ..order.mixture import Mixture
from ..packing.budget import Budget
from ..packing.cost import CostModel
from ..packing.tally import PackTally
from ..plan.groups import Step, StepPlan, deal
from ..plan.online import Lengths, OnlinePacks
from ..plan.sequence import PlannedPack
from ..sources.addresses import local_only
from .figures import PackingEstimate, RunEstimate

if TYPE_CHECKING:
    from ..stream.dataset import PackedDataset

EXACT_SECONDS = 10.0  # what counting all epochs may take
PLANNED_A_SECOND = 25_000  # samples; benchmarks/plan.py
SURVEYED_A_SECOND = 2_500
SAMPLES = 2_000  # an estimate rests on: a second where they are not known
KNOWN_SAMPLES = 100_000  # and where their lengths are known
REMOTE_SAMPLES = 200  # where images are fetched from a server: each takes a request
REMOTE_SECONDS = 30.0  # then it has to do with those that came
# Of a `PackingEstimate`: what grows with the samples.
SCALED = ("samples", "tokens", "tiles", "aligned_tokens", "segments", "split", "trees", "branches", "saved_tokens")
GOLDEN = 0.6180339887498949  # of the epoch: steps of this length spread evenly, however many are taken


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
    """Online packs that count how long fragments wait, and how full packs are while the order goes on.

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
    """Up to `most` evenly spaced positions of an epoch as an order of their own; if that is all, the epoch's order."""

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
        self.epoch = -len(positions)  # no run has it: the survey keeps parts by epoch

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
        **{name: getattr(seen, name) * scale for name in SCALED},
        packs=num_packs,
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
