"""What packing will do, in one line before the first step, and a warning where it will do little.

Where the epoch was counted, that told. Else a thousand of its samples, evenly apart, are packed as a lane packs them
(text and image headers are read, no pixels). Their means, with the tail of each lane, give the packs of the epoch,
what they hold and how full they are. The first real packs are held against it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import TrainerCallback

from internvl_pack.dataset import PackedDataset
from internvl_pack.errors import SampleError, without_traces
from internvl_pack.packing.packer import LanePacker
from internvl_pack.plan import EpochPlan
from internvl_pack.records import Fragment
from internvl_pack.stream import plan_sample

logger = logging.getLogger(__name__)

SAMPLES = 1000  # read for the forecast: about a second
SECONDS = 10.0  # then it has to do with those that were read: data may be far away
GOLDEN = 0.6180339887498949  # multiples of it spread evenly, however many are taken
FIRST_PACKS = 256  # real packs that are held against it
LOW_FILL = 0.8  # of the tokens of a row
FEW_SAMPLES = 1.5  # a pack: most packs hold one
FULL = 0.9  # of the tiles: they are what ends a pack
CLOSE_FILL, CLOSE_SAMPLES = 0.05, 0.15  # how far packs may be from the forecast: of the budget, of the samples


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What the packs of an epoch hold.

    Attributes:
        packs: their number.
        samples, tokens, tiles: what they hold in all; parts of a split sample count once.
        budget: (tokens, tiles) of a pack.
        lanes: streams that are packed side by side, each with a last pack that is not full.
        exact: whether the packs were counted.
        policy: how they are chosen.
    """

    packs: float
    samples: float
    tokens: float
    tiles: float
    budget: tuple[int, int]
    lanes: int
    exact: bool = False
    policy: str = "subset_sum"

    @property
    def samples_per_pack(self) -> float:
        return self.samples / max(1.0, self.packs)

    @property
    def token_fill(self) -> float:
        return self.tokens / max(1.0, self.packs * self.budget[0])

    @property
    def tile_fill(self) -> float:
        return self.tiles / max(1.0, self.packs * self.budget[1])

    def line(self, steps: float, packs_per_step: int) -> str:
        """One line for people."""
        count = f"{self.packs:,.0f} packs and {steps:,.0f} steps an epoch"
        return (
            f"packing: rows of {self.budget[0]:,} tokens and {self.budget[1]} tiles, {self.lanes} lanes; "
            f"{'counted' if self.exact else 'estimated'}: {count} of {packs_per_step} packs, "
            f"{self.samples_per_pack:.1f} samples a pack, token fill {self.token_fill:.1%}, "
            f"tile fill {self.tile_fill:.1%}"
        )

    def trouble(self) -> str | None:
        """Why packing does little, and what to change; None where it does its work."""
        few, low = self.samples_per_pack < FEW_SAMPLES, self.token_fill < LOW_FILL
        if not (few or low):
            return None
        mean_tokens, mean_tiles = self.tokens / max(1.0, self.samples), self.tiles / max(1.0, self.samples)
        tokens, tiles = self.budget
        what = f"packing does little: {self.samples_per_pack:.1f} samples a pack, token fill {self.token_fill:.0%}"
        if self.tile_fill >= FULL or mean_tiles > tiles / 2:
            wanted = max(math.ceil(tokens * self.tiles / max(1.0, self.tokens)), math.ceil(2 * mean_tiles))
            return (
                f"{what}, because tiles fill rows first ({mean_tiles:.1f} in a sample of {mean_tokens:,.0f} tokens): "
                f"raise --num_images_expected from {tiles} to about {wanted}, or lower --max_dynamic_patch"
            )
        tails = self.lanes / 2
        if tails > 0.2 * self.packs:
            return (
                f"{what}, because each of {self.lanes} lanes ends the epoch with a pack that is not full: lower "
                f"--num_lanes (ranks x workers must divide it), or train on more than {self.samples:,.0f} samples"
            )
        if mean_tokens > tokens / 2:
            return (
                f"{what}, because samples have {mean_tokens:,.0f} of a row's {tokens:,} tokens: raise "
                f"--max_packed_tokens to {4 * math.ceil(mean_tokens / 1024) * 1024:,} or more"
            )
        if self.policy == "next_fit":
            return f"{what}, because next_fit ends a row at the first sample that does not fit: use subset_sum"
        return f"{what}, because few samples fit what is left of a row: raise --max_packed_tokens or --max_buffer_size"

    def differs(self, other: Packing) -> bool:
        """Whether what came is not what was told."""
        return (
            abs(self.token_fill - other.token_fill) > CLOSE_FILL
            or abs(self.tile_fill - other.tile_fill) > CLOSE_FILL
            or abs(self.samples_per_pack - other.samples_per_pack) > CLOSE_SAMPLES * self.samples_per_pack
        )


def forecast(
    dataset: PackedDataset, plan: EpochPlan | None, statistics: Mapping[str, Any] | None = None
) -> Packing | None:
    """The packs of the first epoch; None where no sample could be read in time.

    Args:
        plan: the epochs' lengths, where they are known; taken from there where they were counted.
        statistics: of a preset, which knows.
    """
    config = dataset.config
    packing = partial(
        Packing,
        budget=(config.max_packed_tokens, config.num_images_expected),
        lanes=dataset.num_lanes,
        policy=config.packing_policy,
    )
    if statistics is not None:
        assert plan is not None
        share = plan.packs[0] / statistics["packs"]  # of all the epochs that were planned
        figures = {name: statistics[name] * share for name in ("packs", "samples", "tokens", "tiles")}
        return packing(**figures, exact=True)
    if plan is not None and plan.contents is not None:
        return packing(packs=plan.packs[0], **plan.contents._asdict(), exact=True)
    seen = _pack_some(dataset)
    if not seen["samples"]:
        return None
    good = seen["samples"] / max(1, seen["read"]) * dataset.num_positions
    scale = good / max(1, seen["samples"])
    if seen["full_packs"]:
        packs = good * seen["full_packs"] / seen["samples_in_full"] + dataset.num_lanes / 2
    else:
        packs = max(seen["packs"] * scale, float(dataset.num_lanes))
    return packing(packs=packs, samples=good, tokens=seen["tokens"] * scale, tiles=seen["tiles"] * scale)


def _pack_some(dataset: PackedDataset) -> dict[str, float]:
    """Sums over some samples of the first epoch, packed as one lane does; packs are full while others wait."""
    config = dataset.config
    mixture, budget = dataset.mixture(0), config.budget()
    packer: LanePacker[Fragment] = LanePacker(
        budget,
        policy=config.packing_policy,
        buffer_size=config.max_buffer_size,
        cost=dataset.cost_model,
        prior=dataset.prior(),
    )
    sums = dict.fromkeys(("read", "samples", "tokens", "tiles", "packs", "full_packs", "samples_in_full"), 0.0)

    def pop(full: bool) -> None:
        fragments = packer.pop()
        sums["packs"] += 1
        sums["full_packs"] += full
        sums["samples_in_full"] += full * sum(1.0 / f.count for f in fragments)

    number, deadline = len(mixture), time.monotonic() + SECONDS
    positions = range(number) if number <= SAMPLES else [int(i * GOLDEN % 1.0 * number) for i in range(SAMPLES)]
    for position in dict.fromkeys(positions):
        if time.monotonic() > deadline and sums["read"]:
            break
        sums["read"] += 1
        try:
            with without_traces():
                _, fragments = plan_sample(dataset, mixture, position, budget)
        except SampleError:
            continue
        sums["samples"] += 1
        sums["tokens"] += sum(f.num_tokens for f in fragments)
        sums["tiles"] += sum(f.num_tiles for f in fragments)
        for fragment in fragments:
            packer.add(fragment)
        while packer.full:
            pop(full=True)
    while packer.waiting:
        pop(full=False)
    return sums


def foresee(loader: Any, plan: EpochPlan | None) -> Packing | None:
    """The forecast for a loader's packs; None where it does not pack ahead."""
    dataset = loader.packed_dataset
    if not dataset.config.packing:
        return None
    preset = getattr(dataset, "preset", None)
    return forecast(dataset, plan, None if preset is None else preset.content["statistics"])


class FirstPacks(TrainerCallback):
    """Holds the first real packs against the forecast, once, and says where they differ."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.done = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        told, total = self.trainer.forecast, self.trainer.metrics.here
        if self.done or told is None or total.get("num_packs", 0.0) < min(FIRST_PACKS, told.packs):
            return
        self.done = True
        came = Packing(
            packs=total["num_packs"],
            samples=total["num_samples"],
            tokens=total["num_real_tokens"],
            tiles=total["num_tiles"],
            budget=told.budget,
            lanes=0,  # the tails of lanes are yet to come
            policy=told.policy,
        )
        if not told.differs(came) or not state.is_world_process_zero:
            return
        logger.warning(
            "packing: the first %d packs hold %.1f samples each (%.1f were told), token fill %.1f%% (%.1f%%), "
            "tile fill %.1f%% (%.1f%%)",
            *(came.packs, came.samples_per_pack, told.samples_per_pack),
            *(100 * came.token_fill, 100 * told.token_fill, 100 * came.tile_fill, 100 * told.tile_fill),
        )
        if (trouble := came.trouble()) is not None and told.trouble() is None:
            logger.warning(trouble)
