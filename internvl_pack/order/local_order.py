"""An order for slow disks and remote shards: rows that lie together are read at about the same time.

A mixture that is shuffled as a whole reads everywhere at once. Here shards come in a seeded order, the rows of
each from first to last, the datasets side by side in proportion, and positions are shuffled within windows
(like the bounded shuffle buffer of a streaming reader). It is still a function of the position alone: there is no
buffer to save or to refill on a resume.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from .permutation import Permutation, derive_seed

CHUNK_ROWS = 1024  # of a dataset in one file, which stand for its shards
_KEPT = 2  # windows and passes whose tables are kept: readers stand in one, or at the border of two


class BlockWalk:
    """An endless walk over the rows of a dataset, each once a pass, shard after shard.

    Args:
        block_starts: first rows of the shards, ending with the number of rows. One block alone is cut into chunks of
            CHUNK_ROWS, so that a part of a pass is not the head of the file.
        seed: the order of the shards depends on it and on the pass.
    """

    def __init__(self, block_starts: Sequence[int], seed: int) -> None:
        starts = np.asarray(block_starts, np.int64)
        if len(starts) == 2:
            starts = np.append(np.arange(0, starts[1], CHUNK_ROWS), starts[1])
        self._starts = starts
        self._sizes = np.diff(starts)
        self.num_rows = int(starts[-1])
        self._seed = seed
        self._passes: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def __getitem__(self, walked: int) -> int:
        number, offset = divmod(walked, self.num_rows)
        order, ends = self._pass(number)
        place = int(np.searchsorted(ends, offset, "right"))
        block = int(order[place])
        return int(self._starts[block]) + offset - int(ends[place]) + int(self._sizes[block])

    def _pass(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(blocks in the order of this pass, positions at which each ends)."""
        if number not in self._passes:
            blocks = len(self._sizes)
            order = Permutation(blocks, derive_seed(self._seed, number)).take(np.arange(blocks))
            self._passes[number] = order, np.cumsum(self._sizes[order])
            while len(self._passes) > _KEPT:
                self._passes.popitem(last=False)
        return self._passes[number]


class Interleaved:
    """Datasets side by side in proportion, shuffled within windows.

    Item j of a dataset with c items stands at the place (2j + 1) / 2c of the epoch; places are compared as
    float64, which all machines compute alike, and equal ones by the dataset's number.

    Args:
        counts: items of each dataset.
        window: positions that are shuffled together.
        seed: of the shuffling.
    """

    def __init__(self, counts: Sequence[int], window: int, seed: int) -> None:
        self._counts = np.asarray(counts, np.int64)
        self._total = int(self._counts.sum())
        self._window = window
        self._seed = seed
        self._tables: OrderedDict[int, tuple[Permutation, np.ndarray, np.ndarray]] = OrderedDict()

    def __getitem__(self, position: int) -> tuple[int, int]:
        """(dataset, item) at a position."""
        number, offset = divmod(position, self._window)
        shuffled, datasets, items = self._table(number)
        place = shuffled[offset]
        return int(datasets[place]), int(items[place])

    def _table(self, number: int) -> tuple[Permutation, np.ndarray, np.ndarray]:
        """(permutation, datasets, items) of a window, the latter two in the order of their places."""
        if number not in self._tables:
            start = number * self._window
            stop = min(start + self._window, self._total)
            datasets, items = self._between(start, stop)
            self._tables[number] = Permutation(stop - start, derive_seed(self._seed, number)), datasets, items
            while len(self._tables) > _KEPT:
                self._tables.popitem(last=False)
        return self._tables[number]

    def _between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(datasets, items) of the positions from `start` to `stop`, in the order of their places."""
        counts, total = self._counts, self._total
        # Up to any place a dataset has had its share of the positions, but for half an item; over all datasets
        # that moves the place of a position by half their number at most.
        slack = len(counts) / 2 + 1
        low = np.floor(counts * ((start - slack) / total) - 1).astype(np.int64).clip(0)
        high = np.ceil(counts * ((stop + slack) / total) + 1).astype(np.int64)
        high = np.minimum(high, counts)
        low = np.minimum(low, high)
        sizes = high - low
        datasets = np.repeat(np.arange(len(counts)), sizes)
        items = np.arange(len(datasets)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + np.repeat(low, sizes)
        places = (2 * items + 1) / (2 * counts[datasets])
        order = np.lexsort((datasets, places))[start - int(low.sum()) :][: stop - start]
        return datasets[order], items[order]
