"""A row before it is a tensor: the segments of one pack with their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Segment:
    """A fragment with its data.

    Attributes:
        sample_id: provenance; `fragment` is (index, count) within the sample.
        input_ids, labels: int32 (n,); labels not shifted, IGNORE_INDEX where not trained.
        tiles: uint8 (t, 3, S, S), in placeholder order.
        tiles_per_image: tiles of each image of the fragment; sums to t.
        num_loss_tokens: supervised targets of the whole sample, which `sample` and `square` weighting use.
    """

    sample_id: str
    fragment: tuple[int, int]
    input_ids: np.ndarray
    labels: np.ndarray
    tiles: np.ndarray
    tiles_per_image: tuple[int, ...]
    num_loss_tokens: int


@dataclass(frozen=True, slots=True)
class PackRow:
    """A pack, or nothing where a rank has none in a step (`segments` empty).

    Attributes:
        segments: in the order of the row.
        tiles: uint8 (T, 3, S, S), those of all segments one after the other where they lie so in one array already,
            which saves a copy; None where each segment has its own.
    """

    segments: Sequence[Segment]
    tiles: np.ndarray | None = None

    def all_tiles(self) -> Sequence[np.ndarray]:
        """Arrays that hold the row's tiles in placeholder order."""
        return [s.tiles for s in self.segments] if self.tiles is None else [self.tiles]
