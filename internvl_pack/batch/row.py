"""A row before it is a tensor: the segments of one pack with their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..records import Branch


@dataclass(frozen=True, slots=True)
class Segment:
    """A fragment with its data.

    Attributes:
        sample_id: provenance; `fragment` is (index, count) within the sample.
        input_ids, labels: int32 (n,); labels not shifted, IGNORE_INDEX where not trained.
        tiles: uint8 (t, 3, S, S), in placeholder order.
        tiles_per_image: tiles of each image of the fragment, of a video of each run of its tokens; sums to t.
        num_loss_tokens: supervised targets of the whole sample, which `sample` and `square` weighting use.
        image_grids: of each image its grid of tokens, in families of native resolution, see collate.py; its tiles are
            then its tokens in reading order.
        second_tiles: like tiles, where these are of a video's frames, two a token: those of the second ones.
        branches: of a prefix tree: the last tokens are these branches, one after the other, before them the prefix,
            which has all of the tiles. Empty for an ordinary sample.
    """

    sample_id: str
    fragment: tuple[int, int]
    input_ids: np.ndarray
    labels: np.ndarray
    tiles: np.ndarray
    tiles_per_image: tuple[int, ...]
    num_loss_tokens: int
    branches: tuple[Branch, ...] = ()
    image_grids: tuple[tuple[int, ...], ...] = ()
    second_tiles: np.ndarray | None = None

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the branches."""
        return len(self.input_ids) - sum(branch.num_tokens for branch in self.branches)

    def branch_parts(self) -> list[tuple[Branch, slice]]:
        """The branches, and which tokens are theirs."""
        stops = np.cumsum([self.num_prefix_tokens, *(branch.num_tokens for branch in self.branches)]).tolist()
        return [(branch, slice(*ends)) for branch, ends in zip(self.branches, pairwise(stops), strict=True)]

    def unshared(self) -> list[Segment]:
        """A tree's branches as ordinary segments, each after a prefix of its own; of another sample, itself."""
        if not self.branches:
            return [self]
        prefix = slice(0, self.num_prefix_tokens)
        return [
            Segment(
                branch.sample_id or self.sample_id,
                (0, 1) if branch.sample_id else self.fragment,
                np.concatenate([self.input_ids[prefix], self.input_ids[part]]),
                np.concatenate([self.labels[prefix], self.labels[part]]),
                self.tiles,
                self.tiles_per_image,
                branch.num_loss_tokens,
                image_grids=self.image_grids,
                second_tiles=self.second_tiles,
            )
            for branch, part in self.branch_parts()
        ]


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
