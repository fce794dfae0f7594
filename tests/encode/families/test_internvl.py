"""The registry of families, and what InternVL's says of itself."""

from __future__ import annotations

import numpy as np
import pytest

from internvl_pack.encode.config import EncodeConfig
from internvl_pack.encode.families import PictureFamily, make_family, register_family
from internvl_pack.encode.families.base import FAMILIES
from internvl_pack.encode.sample import Encoder
from internvl_pack.encode.tiles import TileGrid
from internvl_pack.errors import UserError


def test_an_image_is_its_tiles_tokens_between_two_borders(tokenizer):
    family = make_family(EncodeConfig(tokens_per_tile=4), tokenizer)
    start, context, end = tokenizer.convert_tokens_to_ids(["<img>", "<IMG_CONTEXT>", "</img>"])
    assert family.block(TileGrid(2, 1, thumbnail=True)).tolist() == [start, *[context] * 12, end]


def test_images_of_a_sample_share_the_tiles_that_a_dataset_allows(tokenizer):
    family = make_family(EncodeConfig(dynamic_image_size=True, use_thumbnail=True), tokenizer)
    assert family.plan((1344, 448), 1, 12).num_tiles == 4
    assert family.plan((1344, 448), 6, 12).num_tiles <= 3
    assert make_family(EncodeConfig(), tokenizer).plan((1344, 448), 1, 12).num_tiles == 1


def test_an_unknown_family_is_refused_with_the_known_ones(tokenizer):
    with pytest.raises(UserError, match=r"family is 'nothing': use one of .*internvl"):
        Encoder(tokenizer, EncodeConfig(family="nothing"))


def test_a_family_of_a_plugin_is_found_by_its_name(tokenizer):

    @register_family("mine")
    class Mine(PictureFamily):
        unused_options = frozenset({"image_size"})
        image_token_id = 5

        def block(self, grid):
            return np.full(grid.num_tiles, 5, dtype=np.int32)

    try:
        encoder = Encoder(tokenizer, EncodeConfig(family="mine"))
        assert encoder.image_context_id == 5
        assert "force_image_size" not in encoder.fingerprint() and encoder.fingerprint()["family"] == "mine"
    finally:
        del FAMILIES["mine"]


def test_the_fingerprint_of_internvl_names_no_family(tokenizer):
    assert "family" not in Encoder(tokenizer).fingerprint()
