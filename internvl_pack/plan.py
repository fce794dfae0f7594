"""How many packs an epoch has: counted where that is quick, else estimated from a sample of the data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from .dataset import PackedDataset
from .errors import FarAwayError, SampleError
from .sources.addresses import only_near
from .stream import Contents

EXACT_SAMPLES = 20_000  # samples planned in full, over all epochs: some ten seconds
ESTIMATE_SAMPLES = 2_000
FAR_SAMPLES = 200  # where images are fetched from a server: each takes a request
FAR_SECONDS = 30.0  # then it has to do with those that came


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """Length of the epochs of a run.

    Attributes:
        packs: packs of each epoch.
        turns: global packs of each epoch, empty turns of lanes that end early included.
        exact: whether they were counted (undecodable images aside) or estimated.
        contents: of the first epoch's packs, where counting them told.
        estimated_from: samples that an estimate rests on.
        far_away: whether it is an estimate from so few because images are fetched from a server.
    """

    packs: tuple[float, ...]
    turns: tuple[int, ...]
    exact: bool
    contents: Contents | None = None
    estimated_from: int = 0
    far_away: bool = False

    @property
    def how(self) -> str:
        """How the length was found, for people."""
        if self.exact:
            return "counted"
        why = ", since images are fetched by address" if self.far_away else ""
        return f"estimated from {self.estimated_from:,} samples{why}"

    def steps(self, packs_per_step: int) -> int:
        """Optimizer steps of all epochs, `packs_per_step` = ranks x packs a batch x accumulation."""
        return sum(math.ceil(turns / packs_per_step) for turns in self.turns)


def plan_epochs(
    dataset: PackedDataset,
    num_epochs: int,
    *,
    exact_samples: int = EXACT_SAMPLES,
    progress: Callable[[int], None] | None = None,
) -> EpochPlan:
    """Packs of the first `num_epochs` epochs over all lanes of the run.

    Every lane is planned as training will plan it when all epochs together hold at most
    `exact_samples`; otherwise ESTIMATE_SAMPLES positions of epoch 0 give the mean tokens and tiles. Where that would
    fetch images from a server, however few, it is FAR_SAMPLES of them, in FAR_SECONDS at most.

    Args:
        progress: called with the samples done since the last call.
    """
    if dataset.packs_are_counted:
        return _count(dataset, num_epochs, progress)
    try:
        with only_near():
            if dataset.num_positions * num_epochs <= exact_samples:
                return _count(dataset, num_epochs, progress)
            return _estimate(dataset, num_epochs, progress)
    except FarAwayError:
        return _estimate(dataset, num_epochs, progress, far_away=True)


def _count(dataset: PackedDataset, num_epochs: int, progress: Callable[[int], None] | None) -> EpochPlan:
    packs, turns = [], []
    contents: list[Contents] = []  # of each lane of the first epoch
    for epoch in range(num_epochs):
        mixture = dataset.mixture(epoch)
        counts = []
        for lane in range(dataset.num_lanes):
            stream = dataset.lane_stream(lane, epoch, mixture)
            counted = stream.count_packs()
            counts.append(counted.packs)
            if not epoch and counted.contents is not None:
                contents.append(counted.contents)
            if progress:
                progress(stream.cursor)
        packs.append(sum(counts))
        # The last pack of the fullest lane ends the epoch; lanes take turns until then.
        longest = max(counts)
        last_lane = max(lane for lane, count in enumerate(counts) if count == longest)
        turns.append((longest - 1) * dataset.num_lanes + last_lane + 1 if longest else 0)
    held = Contents(*map(sum, zip(*contents, strict=True))) if contents else None
    return EpochPlan(packs=tuple(packs), turns=tuple(turns), exact=True, contents=held)


def _estimate(
    dataset: PackedDataset, num_epochs: int, progress: Callable[[int], None] | None, *, far_away: bool = False
) -> EpochPlan:
    mixture = dataset.mixture(0)
    budget = dataset.config.budget()
    taken = min(FAR_SAMPLES if far_away else ESTIMATE_SAMPLES, len(mixture))
    positions = [i * len(mixture) // taken for i in range(taken)]
    tokens = tiles = good = read = 0
    deadline = time.monotonic() + FAR_SECONDS
    for position in positions:
        if far_away and read and time.monotonic() > deadline:
            break
        read += 1
        which, row = mixture.locate(position)
        if progress:
            progress(1)
        try:
            record = dataset.encoder.load(dataset.sources[which], row, dataset.specs[which]).record
        except SampleError:
            continue
        good += 1
        tokens += budget.aligned(record.num_tokens)
        tiles += record.num_tiles
    scale = len(mixture) / read
    if dataset.config.packing:
        full = max(tokens / budget.max_tokens, tiles / max(1, budget.max_tiles)) * scale
    else:
        full = good * scale
    # Each lane ends with a pack that is half full on average, and the fullest lane sets the length.
    per_lane = full / dataset.num_lanes + 0.5
    turns = math.ceil(per_lane) * dataset.num_lanes
    return EpochPlan(
        packs=(per_lane * dataset.num_lanes,) * num_epochs,
        turns=(turns,) * num_epochs,
        exact=False,
        estimated_from=read,
        far_away=far_away,
    )
