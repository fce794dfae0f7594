"""Which budgets to use: an epoch is simulated for each of a grid, and the one that wastes least of it is named.

What a budget is worth is the share of the epoch's time that trains real tokens:

    useful = rank efficiency x fill x full steps / (full steps + 1/2) x samples that are trained on

fill is that of the budget that binds: a static shape, or memory that stays unused, is paid for too. The last step is
half full on average. Larger rows are a little fuller, but make fewer steps, of which the last is a larger part, and
memory limits them: the suggestion is the smallest row whose worth is within CLOSE of the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..config import PackingConfig
from ..errors import UserError
from ..options import count
from ..packing.cost import CostModel
from .figures import PackingEstimate
from .simulate import LengthTable, report, simulate

CLOSE = 0.01
FEW_STEPS = 10  # of an epoch: of fewer the last one, which is not full, decides
TOKEN_BUDGETS = (4096, 8192, 16384, 32768)
TILE_SHARES = (1.0, 1.2, 1.5)  # of the tiles that come with so many tokens on average


@dataclass(frozen=True, slots=True)
class Trial:
    """One budget of the grid and what it is worth."""

    max_tokens: int
    max_tiles: int
    epoch: PackingEstimate

    @property
    def report(self) -> dict[str, int | float]:
        return report(self.epoch)

    @property
    def fill(self) -> float:
        """Of the budget that binds."""
        return max(self.report["token_fill"], self.report["tile_fill"])

    @property
    def worth(self) -> float:
        epoch = self.epoch
        steps = epoch.packs / epoch.packs_per_step
        kept = 1 - epoch.refused.total() / epoch.num_planned
        return self.report["rank_efficiency"] * self.fill * steps / (steps + 0.5) * kept


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The trials in the order of the grid, the chosen one, and why; or why none can be recommended."""

    trials: tuple[Trial, ...]
    chosen: Trial
    reason: str

    @property
    def of_few_steps(self) -> bool:
        """Whether the data is too small to judge by."""
        return self.chosen.report["steps"] < FEW_STEPS


def suggest(
    lengths: LengthTable,
    config: PackingConfig,
    cost: CostModel,
    *,
    num_ranks: int = 64,
    packs_per_step: int | None = None,
    largest_image: int | None = None,
    token_budgets: Sequence[int] = TOKEN_BUDGETS,
) -> Suggestion:
    """Simulate the grid over these lengths and choose.

    Args:
        config: all options but the budgets.
        largest_image: tiles of one image at most, where it is known.

    Raises:
        UserError: no lengths, or none that can be packed.
    """
    tokens, tiles = lengths.sizes()
    num_tokens, num_tiles = int(tokens.sum()), int(tiles.sum())
    if not num_tokens:
        raise UserError("there are no lengths to choose budgets for: the stream is empty")
    largest = largest_image or _largest_image(lengths)
    trials, refusal = [], None
    for max_tokens in token_budgets:
        for max_tiles in _tile_budgets(max_tokens, largest, num_tokens, num_tiles):
            tried = replace(config, max_packed_tokens=max_tokens, num_images_expected=max_tiles)
            try:
                found = simulate(lengths, tried, cost, num_ranks=num_ranks, packs_per_step=packs_per_step)
            except UserError as error:  # a sample that stops a run of this budget
                refusal = error
                continue
            if found.packs:
                trials.append(Trial(max_tokens, max_tiles, found))
    if not trials:
        raise refusal or UserError("no sample fits into any budget of the grid: set oversize to split")
    best = max(trial.worth for trial in trials)
    chosen = min(
        (trial for trial in trials if trial.worth >= best - CLOSE),
        key=lambda trial: (trial.max_tokens, -trial.worth, trial.max_tiles),
    )
    return Suggestion(tuple(trials), chosen, _reason(chosen, best, num_tokens, num_tiles))


def _largest_image(lengths: LengthTable) -> int:
    """Tiles of the largest image; each tile counts as an image of its own where their number is not known."""
    tiles = np.maximum(lengths.tiles, 0)
    images = tiles if lengths.images is None else np.where(lengths.images > 0, lengths.images, tiles)
    return int((-(-tiles // np.maximum(images, 1))).max(initial=0))


def _tile_budgets(max_tokens: int, largest_image: int, num_tokens: int, num_tiles: int) -> list[int]:
    """Multiples of 4 from the tiles that come with `max_tokens` on average; enough for the largest image."""
    if not num_tiles:
        return [0]
    mean = max_tokens * num_tiles / num_tokens
    return sorted({max(-(-round(mean * share) // 4) * 4, -(-largest_image // 4) * 4) for share in TILE_SHARES})


def _reason(chosen: Trial, best: float, num_tokens: int, num_tiles: int) -> str:
    report = chosen.report
    if report["steps"] < FEW_STEPS:
        return (
            f"the data is too small to judge budgets by: an epoch has {count(report['steps'], 'steps')} of "
            f"{count(chosen.epoch.packs_per_step, 'packs')} on {count(chosen.epoch.num_ranks, 'ranks')}, of which the "
            "last is seldom full; give the run's --ranks and --global_batch, and --samples 20000 to draw as many from "
            "these lengths"
        )
    binds = "tokens" if report["token_fill"] >= report["tile_fill"] else "tiles"
    ratio = f"{num_tokens / num_tiles:,.0f} tokens a tile" if num_tiles else "text only"
    return (
        f"the stream has {ratio}; at {chosen.max_tokens:,} tokens and {count(chosen.max_tiles, 'tiles')} {binds} "
        f"bind and are {chosen.fill:.1%} full, an epoch has {count(report['steps'], 'steps')} and ranks are "
        f"{report['rank_efficiency']:.1%} even: {chosen.worth:.1%} of it is of use, and no larger row gains more than "
        f"{max(0.0, best - chosen.worth):.1%}"
    )
