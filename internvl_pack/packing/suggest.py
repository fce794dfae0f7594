"""Which budgets to use: a grid of them is simulated, and the one that wastes least of the step's time is named.

What a budget is worth is the share of the time that trains real tokens:

    useful = rank efficiency (with a reservoir) x cost of the samples' tokens and tiles / cost of the packs' full shape

where a pack's full shape counts what it leaves empty of the budget that binds: a static shape, or memory that stays
unused, is paid for too. Larger rows are a little fuller and much more even between ranks, but memory limits them: the
suggestion is the smallest row whose worth is within CLOSE of the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from internvl_pack.errors import UserError
from internvl_pack.packing.budget import Budget
from internvl_pack.packing.cost import CostModel
from internvl_pack.packing.simulate import Length, Simulation, simulate

CLOSE = 0.01
TOKEN_BUDGETS = (4096, 8192, 16384, 32768)
TILE_SHARES = (1.0, 1.2, 1.5)  # of the tiles that come with so many tokens on average


@dataclass(frozen=True, slots=True)
class Trial:
    """One budget of the grid and what it is worth."""

    budget: Budget
    simulation: Simulation
    worth: float

    @property
    def binding_fill(self) -> float:
        return max(self.simulation.token_fill, self.simulation.tile_fill)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The trials in the order of the grid, the chosen one, and why."""

    trials: tuple[Trial, ...]
    chosen: Trial
    reason: str


def suggest(
    rows: Sequence[Length],
    *,
    cost: CostModel,
    token_budgets: Sequence[int] = TOKEN_BUDGETS,
    policy: str = "subset_sum",
    buffer_size: int = 64,
    num_ranks: int = 64,
    reservoir: int = 16,
    oversize: str = "split",
    seed: int = 0,
) -> Suggestion:
    """Simulate the grid over these rows (a sample of the stream) and choose.

    Raises:
        UserError: no rows, or none that can be packed.
    """
    num_tokens, num_tiles = sum(row.num_tokens for row in rows), sum(row.num_tiles for row in rows)
    if not num_tokens:
        raise UserError("there are no lengths to choose budgets for: the stream is empty")
    trials = []
    for max_tokens in token_budgets:
        for max_tiles in _tile_budgets(max_tokens, rows, num_tokens, num_tiles):
            budget = Budget(max_tokens, max_tiles)
            result = simulate(
                rows,
                budget,
                policy=policy,
                buffer_size=buffer_size,
                num_ranks=num_ranks,
                reservoir=reservoir,
                cost=cost,
                oversize=oversize,
                seed=seed,
            )
            if result.packs:
                fill = max(result.token_fill, result.tile_fill)
                trials.append(Trial(budget, result, result.rank_efficiency_reservoir * fill * _kept(result)))
    if not trials:
        raise UserError("no sample fits into any budget of the grid: set oversize to split")
    best = max(trial.worth for trial in trials)
    chosen = min(
        (trial for trial in trials if trial.worth >= best - CLOSE),
        key=lambda trial: (trial.budget.max_tokens, -trial.worth, trial.budget.max_tiles),
    )
    return Suggestion(tuple(trials), chosen, _reason(chosen, best, num_tokens, num_tiles))


def _kept(result: Simulation) -> float:
    """The share of the samples that is trained on."""
    return 1 - sum(result.dropped.values()) / result.samples


def _tile_budgets(max_tokens: int, rows: Sequence[Length], num_tokens: int, num_tiles: int) -> list[int]:
    """Multiples of 4 from the tiles that come with `max_tokens` on average; enough for the largest image."""
    if not num_tiles:
        return [0]
    mean = max_tokens * num_tiles / num_tokens
    # a whole row's tiles where the number of its images is not known: then each counts as an image of its own
    largest = max(-(-row.num_tiles // (row.num_images or row.num_tiles)) for row in rows if row.num_tiles)
    return sorted({max(-(-round(mean * share) // 4) * 4, -(-largest // 4) * 4) for share in TILE_SHARES})


def _reason(chosen: Trial, best: float, num_tokens: int, num_tiles: int) -> str:
    result, budget = chosen.simulation, chosen.budget
    binds = "tokens" if result.token_fill >= result.tile_fill else "tiles"
    ratio = f"{num_tokens / num_tiles:,.0f} tokens a tile" if num_tiles else "text only"
    return (
        f"the stream has {ratio}; at {budget.max_tokens:,} tokens and {budget.max_tiles} tiles {binds} bind and are "
        f"{chosen.binding_fill:.1%} full, ranks are {result.rank_efficiency_reservoir:.1%} even with a reservoir: "
        f"{chosen.worth:.1%} of a step is of use, and no larger row gains more than {max(0.0, best - chosen.worth):.1%}"
    )
