"""Which sample stands at each position of an epoch: exact proportions, O(1) memory and seek.

An epoch of a mixture has `len(mixture)` positions. Dataset d owns `counts[d]` of them, whatever the
seed: its length times `repeat_time`, or its share by weight of the same total. Position k goes
through one seeded permutation of all positions, then to the dataset that owns the result.

Within a dataset the epochs walk round one fixed, seeded cycle of its rows: epoch e takes the
`counts[d]` rows from e * counts[d] on. So `repeat_time` 1 is every row once; 0.5 is a seeded half,
and two epochs of it are every row once; 1.5 is every row once and a seeded half twice.

With a shuffle buffer the order is local instead (local_order.py): the same proportions, rows that lie together
read at about the same time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from ..errors import UserError
from .local_order import BlockWalk, Interleaved
from .permutation import Permutation, derive_seed


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One dataset's share. `repeat_time` multiplies its rows; `weight` replaces its share of the total.

    `block_starts` are the first rows of its shards, ending with `num_rows`; only a local order asks for them.
    """

    name: str
    num_rows: int
    repeat_time: float = 1.0
    weight: float | None = None
    block_starts: Sequence[int] | None = field(default=None, compare=False)


def mixture_counts(parts: Sequence[MixturePart], *, use_data_resampling: bool = False) -> tuple[int, ...]:
    """Positions an epoch of each dataset.

    By `repeat_time`: round(rows * repeat_time), at least 1. With weights, or with
    `use_data_resampling` (weight = square root of that length), the same total is shared out in
    proportion, rounded by largest remainder, so that the sum is kept.

    Raises:
        UserError: weights on some datasets only, or together with `use_data_resampling`.
    """
    natural = [max(1, round(p.num_rows * p.repeat_time)) if p.num_rows else 0 for p in parts]
    weighted = [p.name for p in parts if p.weight is not None]
    if weighted and len(weighted) < len(parts):
        missing = next(p.name for p in parts if p.weight is None)
        raise UserError(
            f"meta file: dataset {missing!r} has no 'weight' but {weighted[0]!r} has: give it to all or none"
        )
    if weighted and use_data_resampling:
        raise UserError("use_data_resampling: the meta file gives 'weight' already; remove one of the two")
    if not weighted and not use_data_resampling:
        return tuple(natural)
    weights = [
        math.sqrt(n) if use_data_resampling else float(p.weight or 0.0) for p, n in zip(parts, natural, strict=True)
    ]
    weights = [w if n else 0.0 for w, n in zip(weights, natural, strict=True)]  # an empty dataset gives nothing
    total, norm = sum(natural), sum(weights)
    if norm <= 0:
        return tuple(0 for _ in parts)
    exact = [total * w / norm for w in weights]
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(parts)), key=lambda d: (counts[d] - exact[d], d))
    for d in by_remainder[: total - sum(counts)]:
        counts[d] += 1
    return tuple(counts)


class Mixture:
    """The order of one epoch: `locate(k)` gives (dataset, row) of position k.

    Args:
        parts: the datasets; names must differ.
        seed, epoch: both change the order; nothing else does.
        shuffle: False walks the datasets in order, each row of `counts` in its own order (evaluation).
        replacement: every position draws a row independently, so that some come twice and some never.
        use_data_resampling: see `mixture_counts`.
        shuffle_buffer_size: positions that are shuffled together in a local order; None shuffles all of them.

    Raises:
        UserError: as `mixture_counts`.
    """

    def __init__(
        self,
        parts: Sequence[MixturePart],
        *,
        seed: int,
        epoch: int = 0,
        shuffle: bool = True,
        replacement: bool = False,
        use_data_resampling: bool = False,
        shuffle_buffer_size: int | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self.counts = mixture_counts(parts, use_data_resampling=use_data_resampling)
        self.epoch = epoch
        self.shuffle = shuffle
        self._ends = list(accumulate(self.counts))
        self._num_positions = self._ends[-1] if self._ends else 0
        self._draw_seed = derive_seed(seed, "draw", epoch) if replacement else None
        self._positions = Permutation(self._num_positions, derive_seed(seed, "epoch", epoch))
        self._local = None
        self._rows: list[Permutation | BlockWalk]
        if shuffle and shuffle_buffer_size is not None and not replacement:
            self._local = Interleaved(self.counts, shuffle_buffer_size, derive_seed(seed, "windows", epoch))
            self._rows = [
                BlockWalk(p.block_starts or (0, p.num_rows), derive_seed(seed, "blocks", p.name)) for p in self.parts
            ]
        else:
            self._rows = [Permutation(p.num_rows, derive_seed(seed, "rows", p.name)) for p in self.parts]

    def __len__(self) -> int:
        return self._num_positions

    def locate(self, position: int) -> tuple[int, int]:
        """(index of the dataset, index of the row) at `position` of the epoch."""
        if self._local is not None:
            dataset, offset = self._local[position]
            return dataset, self._rows[dataset][self.epoch * self.counts[dataset] + offset]
        if self._draw_seed is not None:
            slot = derive_seed(self._draw_seed, position) % self._num_positions
        else:
            slot = self._positions[position] if self.shuffle else position
        dataset = bisect_right(self._ends, slot)
        offset = slot - (self._ends[dataset] - self.counts[dataset])
        num_rows = self.parts[dataset].num_rows
        if not self.shuffle:
            return dataset, offset % num_rows
        walked = self.epoch * self.counts[dataset] + offset
        return dataset, self._rows[dataset][walked % num_rows]

    def locate_range(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """`locate` of the positions from `start` to `stop`: int64 (n,) datasets and rows."""
        if self._local is not None or self._draw_seed is not None:
            located = np.array([self.locate(position) for position in range(start, stop)], np.int64)
            return located.reshape(-1, 2)[:, 0], located.reshape(-1, 2)[:, 1]
        slots = np.arange(start, stop, dtype=np.int64)
        if self.shuffle:
            slots = self._positions.take(slots)
        datasets = np.searchsorted(np.asarray(self._ends, np.int64), slots, "right")
        rows = np.empty_like(slots)
        for dataset in np.unique(datasets).tolist():
            chosen = datasets == dataset
            count, num_rows = self.counts[dataset], self.parts[dataset].num_rows
            offsets = slots[chosen] - (self._ends[dataset] - count)
            if not self.shuffle:
                rows[chosen] = offsets % num_rows
            else:
                walk = self._rows[dataset]
                assert isinstance(walk, Permutation), "a local order is walked position by position"
                rows[chosen] = walk.take((self.epoch * count + offsets) % num_rows)
        return datasets, rows
