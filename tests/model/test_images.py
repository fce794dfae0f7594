"""Tiles as InternVL normalises them."""

from __future__ import annotations

import pytest
import torch
from helpers.model_samples import relative_error

from internvl_pack.model.images import IMAGE_MEAN, IMAGE_STD, normalize_tiles


def test_tiles_are_normalised_as_internvl_does():
    tiles = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    expected = (tiles.double() / 255 - torch.tensor(IMAGE_MEAN).view(3, 1, 1)) / torch.tensor(IMAGE_STD).view(3, 1, 1)
    assert relative_error(normalize_tiles(tiles, torch.float32).double(), expected) < 1e-6
    together = normalize_tiles(tiles.to(memory_format=torch.channels_last), torch.float32)  # as loaders lay them
    assert together.is_contiguous() and torch.equal(together, normalize_tiles(tiles, torch.float32))
    assert normalize_tiles(tiles, torch.bfloat16).dtype == torch.bfloat16
    done = torch.randn(1, 3, 4, 4)
    assert torch.equal(normalize_tiles(done, torch.float32), done)
    with pytest.raises(ValueError, match="must be uint8 tiles"):
        normalize_tiles(tiles.int(), torch.float32)
    with pytest.raises(ValueError, match=r"must be \(tiles, 3, S, S\)"):
        normalize_tiles(tiles[0], torch.float32)
