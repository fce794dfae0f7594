"""Which tokens and tiles of a row a rank computes."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.sequence_groups import cumulative, group_of

from internvl_pack.parallel import checks
from internvl_pack.parallel.slices import RowSlice, count_slice_targets, own_tiles, row_slice, tiles_a_rank

ROWS = ([1], [2], [5, 1, 1, 8], [16, 16], [1, 1, 1], [3, 64, 2, 7, 40], [7])


@pytest.mark.parametrize("mode", checks.MODES)
@pytest.mark.parametrize("size", (2, 3, 4, 8))
def test_every_token_is_in_one_slice_and_slices_are_equally_long(mode, size):
    for lengths in ROWS:
        bounds = cumulative(lengths)
        slices = [row_slice(bounds, max(lengths), rank, size, mode, "cpu") for rank in range(size)]
        assert len({len(s.places) for s in slices}) == 1
        real = [s.places if s.is_pad is None else s.places[~s.is_pad] for s in slices]
        assert sorted(torch.cat(real).tolist()) == list(range(sum(lengths)))
        for s, own in zip(slices, real, strict=True):
            back = s.inverse(sum(lengths))
            assert s.places[back[own]].tolist() == own.tolist()
            assert int((back < len(s.places)).sum()) == len(own)
            covered = len(s.places) * (size if mode == "ulysses" else 1) // (2 if mode == "ring" else 1)
            assert s.cu_seqlens[-1] == covered and s.max_seqlen == int(s.cu_seqlens.diff().max())


def test_zigzag_as_drawn():
    bounds = cumulative([4, 4])
    assert [row_slice(bounds, 4, rank, 2, "ring", "cpu").places.tolist() for rank in (0, 1)] == [
        [0, 4, 3, 7],
        [1, 5, 2, 6],
    ]


def test_aligned_rows_have_no_pads():
    assert row_slice(cumulative([8, 16]), 16, 0, 4, "ring", "cpu").is_pad is None
    assert row_slice(cumulative([3, 9]), 9, 0, 4, "ulysses", "cpu").is_pad is None
    assert row_slice(cumulative([8, 15]), 15, 0, 4, "ring", "cpu").is_pad is not None


@pytest.mark.parametrize("size", (2, 3, 4, 8))
def test_zigzag_gives_each_rank_the_same_attention(size):
    lengths = [2 * size * n for n in (1, 5, 3)]
    position = torch.cat([torch.arange(n) for n in lengths])
    seen = []
    for rank in range(size):
        places = row_slice(cumulative(lengths), max(lengths), rank, size, "ring", "cpu").places
        seen.append(int((position[places] + 1).sum()))  # keys of each query
    assert len(set(seen)) == 1


def test_targets_of_the_slices_are_counted_on_the_host():
    labels = torch.tensor([[-100, 5, 6, -100, -100, 7, 8, 9, -100]])
    batch = {"labels": labels, "cu_seqlens": cumulative([4, 5]), "max_seqlen": 5}
    for mode, size in itertools.product(checks.MODES, (2, 4)):
        groups = [group_of(size, mode, rank) for rank in range(size)]
        assert sum(count_slice_targets(batch, group) for group in groups) == 5


def test_tiles_are_shared_out_whole():
    for tiles, size in itertools.product(range(1, 20), (2, 4, 8)):
        share = tiles_a_rank(tiles, size)
        assert share == max(len(range(tiles)[rank * share : (rank + 1) * share]) for rank in range(size))
        assert share * size >= tiles


def test_a_row_that_none_shares_is_as_it_was():
    bounds, row = cumulative([3, 4]), torch.arange(7)[None]
    whole = RowSlice.whole(bounds, 4)
    assert whole.take(row) is row and whole.take(row, -100) is row
    positions = torch.tensor([1, 5])
    assert whole.in_row(positions) is positions and whole.local(positions, 7) is positions
    assert (whole.cu_seqlens is bounds) and whole.max_seqlen == 4


@pytest.mark.parametrize("mode", checks.MODES)
def test_positions_in_a_slice_and_in_the_row_are_each_others_inverse(mode):
    bounds, positions = cumulative([16, 8]), torch.tensor([0, 3, 9, 17, 23])
    found = []
    for rank in range(2):
        part = row_slice(bounds, 16, rank, 2, mode, "cpu")
        local = part.local(positions, 24)
        own = local < len(part.places)
        assert torch.equal(part.in_row(local[own]), positions[own])
        found += positions[own].tolist()
    assert sorted(found) == positions.tolist()


def test_each_tile_is_one_ranks():
    for num_tiles, size in itertools.product(range(1, 10), (1, 2, 4)):
        tiles = torch.arange(num_tiles)
        shares = [own_tiles(tiles, group_of(size, rank=rank)) for rank in range(size)]
        assert torch.equal(torch.cat(shares), tiles)
    assert own_tiles(tiles, None) is tiles
