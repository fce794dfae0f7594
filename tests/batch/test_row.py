"""The tiles of a row: those that lie in one array already reach the batch as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from internvl_pack import packed_collate_fn
from internvl_pack.batch.row import PackRow, Segment


def segments(*tiles: np.ndarray) -> list[Segment]:
    ids = np.arange(3, dtype=np.int32)
    return [Segment(f"a/{n}", (0, 1), ids, ids, each, (len(each),), 2) for n, each in enumerate(tiles)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2)], ids=["colours apart", "colours together"])
def test_tiles_of_one_pack_are_joined_without_a_copy(order):
    shape = (6, 3, 2, 2) if order == (0, 1, 2, 3) else (6, 2, 2, 3)
    pack = np.arange(72, dtype=np.uint8).reshape(shape).transpose(order)
    parts = segments(pack[1:3], pack[3:3], pack[3:6])
    together = packed_collate_fn([PackRow(parts, pack[1:])], image_size=2)["pixel_values"].numpy()
    assert np.array_equal(together, pack[1:]) and np.shares_memory(together, pack) and together.strides == pack.strides
    for rows in ([PackRow(parts)], [PackRow(parts[:1], pack[1:3]), PackRow(parts[1:], pack[3:])]):
        joined = packed_collate_fn(rows, image_size=2)
        assert np.array_equal(joined["pixel_values"].numpy(), pack[1:])
        assert not np.shares_memory(joined["pixel_values"].numpy(), pack)
        assert torch.equal(joined["segment_tile_offsets"], torch.tensor([0, 2, 2, 5], dtype=torch.int32))
