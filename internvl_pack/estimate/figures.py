"""What the packs of an epoch hold, and the steps of a run: figures, and what they say to people. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..options import count

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
        roomy = 4 * math.ceil(mean_tokens / 1024) * 1024  # for some samples a row
        what = f"packing does little: {self.samples_per_pack:.1f} samples a pack, token fill {self.token_fill:.0%}"
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
        cut = self.split / max(1.0, self.samples)
        if cut > MANY_CUT:
            raised = f"--max_packed_tokens to {max(roomy, 2 * tokens):,}"
            if mean_tiles * tokens > mean_tokens * tiles:
                raised = f"--num_images_expected to {max(math.ceil(4 * mean_tiles), 2 * tiles):,}"
            return (
                f"{cut:.0%} of the samples exceed a row of {count(tokens, 'tokens')} and {count(tiles, 'tiles')} and "
                f"are cut, and parts may have nothing to train: raise {raised} or more"
            )
        # Of little data the last row is a large share: where rows are as few as can be, no packer fills them better.
        least = math.ceil(max(self.tokens / tokens, self.tiles / max(1, tiles)))
        if ((few or low) and self.packs <= 2) or (low and self.packs <= least):
            rows = count(round(self.packs), "rows")
            return f"{what}, because all of the data fits into {rows}: train on more samples"
        if (few or low) and mean_tokens > tokens / 2:
            return (
                f"{what}, because samples have {mean_tokens:,.0f} of a row's {tokens:,} tokens: raise "
                f"--max_packed_tokens to {roomy:,} or more"
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
