"""Which tokens and tiles of a row a rank computes: all of them, where none shares it.

Ulysses: the row in equal pieces, one after the other. Each rank's attention sees the whole row for some of the heads,
so the pieces need not heed the segments.

Ring: each segment in 2 N equal parts, of which rank r has parts r and 2 N - 1 - r, so that under a causal mask all
ranks have the same work. Locally all first parts of the segments come first, then all second parts, so that either
half of a rank's tokens is one piece of memory. Two segments on 2 ranks:

    row      a0 a1 a2 a3 b0 b1 b2 b3
    rank 0   a0 b0 | a3 b3
    rank 1   a1 b1 | a2 b2

What does not divide evenly is filled up here: a pad repeats a token, comes after all that could see it and has no
target. Rows whose budget and segments are multiples (checks.py) have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch.collate import row_boundaries
from ..batch.loss_weights import IGNORE_INDEX, shift_targets
from .collectives import gather
from .group import SequenceGroup


@dataclass(frozen=True, kw_only=True)
class RowSlice:
    """A rank's tokens of a row of N.

    Attributes:
        places: int64 (n,), where in the row each of them is; None for the row as it is, or for a padded batch.
        is_pad: bool (n,), or None where none is.
        cu_seqlens, max_seqlen: boundaries for attention, on the device; None for a padded batch. Ulysses: of the whole
            row, its pads a segment of their own. Ring: of either half of this rank's tokens, the same on every rank.
    """

    places: Tensor | None
    is_pad: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int | None

    @classmethod
    def whole(cls, cu_seqlens: Tensor | None, max_seqlen: int | None) -> RowSlice:
        """All tokens of a row, or of a padded batch, which has no boundaries."""
        return cls(places=None, is_pad=None, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)

    def take(self, row: Tensor, fill: float | None = None) -> Tensor:
        """This rank's values of (N,) or (1, N); pads get `fill`, or the value they repeat."""
        if self.places is None:
            return row
        values = row.index_select(-1, self.places)
        return values if fill is None or self.is_pad is None else values.masked_fill(self.is_pad, fill)

    def in_row(self, positions: Tensor) -> Tensor:
        """Where in the row these of this rank's tokens are."""
        return positions if self.places is None else self.places[positions]

    def local(self, positions: Tensor, num_tokens: int) -> Tensor:
        """Where these tokens of the row are among this rank's, n for those of other ranks."""
        return positions if self.places is None else self.inverse(num_tokens)[positions]

    def inverse(self, num_tokens: int) -> Tensor:
        """int64 (N,): of each token of the row its place among these, n for those of other ranks."""
        assert self.places is not None, "of a part of the row"
        n = len(self.places)
        places = self.places if self.is_pad is None else self.places.masked_fill(self.is_pad, num_tokens)
        local = torch.full((num_tokens + 1,), n, dtype=torch.int64, device=places.device)
        local[places] = torch.arange(n, device=places.device)
        return local[:num_tokens]


def row_slice(
    cu_seqlens: Tensor, max_seqlen: int, rank: int, size: int, mode: str, device: torch.device | str
) -> RowSlice:
    """The tokens that rank `rank` of `size` computes.

    Args:
        cu_seqlens: int32 (S+1,), where the segments lie in the row. On the host: a CUDA tensor is waited for.
    """
    bounds = cu_seqlens.cpu()
    if mode == "ring":
        return _ring_slice(bounds, rank, size, device)
    num_tokens = int(bounds[-1])
    count = -(-num_tokens // size)
    places = torch.arange(rank * count, (rank + 1) * count, device=device)
    is_pad = None
    if pads := count * size - num_tokens:
        is_pad = places >= num_tokens
        places = places.clamp_(max=num_tokens - 1)
        bounds = torch.cat([bounds, bounds.new_tensor([count * size])])
        max_seqlen = max(max_seqlen, pads)
    return RowSlice(
        places=places, is_pad=is_pad, cu_seqlens=bounds.to(device, non_blocking=True), max_seqlen=max_seqlen
    )


def _ring_slice(bounds: Tensor, rank: int, size: int, device: torch.device | str) -> RowSlice:
    parts = 2 * size
    lengths = bounds.diff()
    part_lengths = -(-lengths // parts)
    part_bounds = torch.cat([bounds[:1], part_lengths.cumsum(0, dtype=torch.int32)])
    has_pads = bool((lengths % parts).any())
    half = int(part_bounds[-1])
    starts, part_starts = (b.to(device, non_blocking=True).long() for b in (bounds, part_bounds))
    within = torch.arange(half, device=device)
    segment = torch.searchsorted(part_starts, within, right=True) - 1
    within = within - part_starts[segment]
    length, part_length = starts.diff()[segment], part_starts.diff()[segment]
    offsets = [part * part_length + within for part in (rank, parts - 1 - rank)]
    places = torch.cat([starts[segment] + torch.minimum(offset, length - 1) for offset in offsets])
    return RowSlice(
        places=places,
        is_pad=torch.cat([offset >= length for offset in offsets]) if has_pads else None,
        cu_seqlens=part_bounds.to(device, non_blocking=True),
        max_seqlen=int(part_lengths.max()),
    )


def gather_row(values: Tensor, cu_seqlens: Tensor | None, group: SequenceGroup | None) -> Tensor:
    """The row's (1, N, ...) on every rank from each rank's (1, n, ...); for checks, with its gradient."""
    if group is None:
        return values
    assert cu_seqlens is not None, "only packed rows are cut"
    bounds = cu_seqlens.cpu()
    everyone = gather(values[0], group.process_group)
    slices = [
        row_slice(bounds, int(bounds.diff().max()), rank, group.size, group.mode, values.device)
        for rank in range(group.size)
    ]
    locals_ = [s.inverse(int(bounds[-1])) for s in slices]
    n = values.shape[1]
    index = torch.stack([torch.where(at < n, at + rank * n, -1) for rank, at in enumerate(locals_)]).amax(0)
    return everyone.index_select(0, index).unsqueeze(0)


def tiles_a_rank(num_tiles: int, size: int) -> int:
    """Tiles of a row that each rank encodes, one share after the other; the last ranks may have fewer or none."""
    return -(-num_tiles // size)


def own_tiles(tiles: Tensor, group: SequenceGroup | None) -> Tensor:
    """This rank's share of a row's tiles (T, ...); the last ranks' may be empty."""
    if group is None:
        return tiles
    share = tiles_a_rank(len(tiles), group.size)
    return tiles[group.rank * share : (group.rank + 1) * share]


def gather_tiles(values: Tensor, num_tiles: int, group: SequenceGroup | None) -> Tensor:
    """Of all tiles of the row, (T, ...) on every rank, from each rank's values of its share, with their gradient.

    Args:
        values: (t, ...); a rank without a tile has one of zeros.
    """
    if group is None:
        return values
    missing = values.new_zeros((tiles_a_rank(num_tiles, group.size) - len(values), *values.shape[1:]))
    return gather(torch.cat([values, missing]), group.process_group)[:num_tiles]


def count_slice_targets(batch: dict[str, Any], group: SequenceGroup) -> int:
    """Labelled targets in this rank's slice of a batch on the host: `num_slice_loss_tokens` of the forward."""
    bounds = row_boundaries(batch)
    targets, _ = shift_targets(batch["labels"], None, bounds)
    part = row_slice(bounds, batch["max_seqlen"], group.rank, group.size, group.mode, "cpu")
    return int((part.take(targets, IGNORE_INDEX) != IGNORE_INDEX).sum())
