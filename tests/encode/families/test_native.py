"""Qwen2.5-VL's and Qwen3-VL's rules against transformers' image processor, and what their options are."""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers.encode_samples import BytesRef, file_of, smooth_pixels
from helpers.native_samples import HALVES, STATISTICS, native_tokenizer, side_of
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as glm_resize
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from internvl_pack.checkpoints.encoding import encode_config
from internvl_pack.encode.config import EncodeConfig
from internvl_pack.encode.families import make_family
from internvl_pack.encode.families.native import NativePictures, grid_positions
from internvl_pack.encode.images import decode_tiles
from internvl_pack.encode.sample import Encoder
from internvl_pack.encode.tiles import TileGrid
from internvl_pack.errors import SampleError, UserError
from internvl_pack.samples import Samples
from internvl_pack.sources import DatasetSpec, FolderResolver, RawSample

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")


def checkpoint(family):
    return {"model_type": family, "vision_config": {"patch_size": side_of(family) // 2, "spatial_merge_size": 2}}


@pytest.fixture(scope="module")
def tokenizer():
    return native_tokenizer()


def pictures(family, **options) -> NativePictures:
    return make_family(encode_config(options, checkpoint(family)), native_tokenizer(family))


def resized(family, height, width, low, high):
    """As transformers does it; GLM's counts a picture as two frames."""
    if family == "glm4v":
        return glm_resize(2, height, width, 2, 28, 2 * low, 2 * high)
    return smart_resize(height, width, side_of(family), low, high)


def sizes():
    rng = random.Random(0)
    fixed = [(28, 28), (30, 3000), (2000, 40), (1, 1), (1, 200), (7, 9), (640, 480), (1920, 1080), (4000, 3000)]
    fixed += [(14, 2800), (15, 3001), (42, 70), (350, 350), (1, 300)]
    return fixed + [(rng.randint(1, 3000), rng.randint(1, 3000)) for _ in range(200 - len(fixed))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"min_pixels": 50_000, "max_pixels": 200_000}])
def test_grids_are_those_of_transformers_on_200_sizes(family, options):
    found, side = pictures(family, **options), side_of(family)
    low, high = options.get("min_pixels", found.MIN_PIXELS), options.get("max_pixels", found.MAX_PIXELS)
    refused = 0
    for width, height in sizes():
        try:
            expected = resized(family, height, width, low, high)
        except ValueError:
            refused += 1
            with pytest.raises(SampleError, match="image_shape"):
                found.plan((width, height), 1, 12)
            continue
        grid = found.plan((width, height), 1, 12)
        assert (grid.rows * side, grid.columns * side) == expected, (width, height)
    assert refused


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_are_the_patches_of_the_processor(family, tmp_path):
    """Within 4 levels of 255: its resize is Pillow's."""
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize(
        (301, 150), Image.Resampling.BICUBIC
    )
    picture.save(tmp_path / "a.png")
    config = encode_config({"max_pixels": 40_000, "min_pixels": 20_000}, checkpoint(family))
    mean, std = STATISTICS.get(family, HALVES)
    frames = 2 if family == "glm4v" else 1
    processor = (Glm4vImageProcessorPil if family == "glm4v" else Qwen2VLImageProcessorPil)(
        patch_size=side_of(family) // 2,
        image_mean=mean,
        image_std=std,
        size={"shortest_edge": frames * config.min_pixels, "longest_edge": frames * config.max_pixels},
    )
    made = processor([picture], return_tensors="np")
    grid = make_family(config, native_tokenizer(family)).plan(picture.size, 1, 12)
    ref = FolderResolver(tmp_path)("a.png")
    tiles = decode_tiles(ref, grid, config.image_size)
    assert made["image_grid_thw"].tolist() == [[1, 2 * grid.rows, 2 * grid.columns]]
    patch = side_of(family) // 2
    theirs = made["pixel_values"].reshape(-1, 2, 2, 3, 2, patch, patch)[
        :, :, :, :, 0
    ]  # merge blocks; of two frames one
    theirs = theirs.transpose(0, 3, 1, 4, 2, 5).reshape(tiles.shape)
    theirs = (theirs * np.array(std).reshape(3, 1, 1) + np.array(mean).reshape(3, 1, 1)) * 255
    assert np.abs(theirs - tiles).max() < 4


def test_the_block_has_a_token_for_each_tile(tokenizer):
    family = pictures("qwen3_vl")
    start, image, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
    assert family.block(TileGrid(3, 2)).tolist() == [start, *[image] * 6, end]


def test_a_picture_in_parts_of_a_turn_has_no_line_break_as_in_the_tokenizers_template(tokenizer):
    text = {"type": "text", "text": "left or right?"}
    parts = [{"type": "image", "image": "a"}, text, {"type": "image", "image": "b"}, {"type": "text", "text": "\nor?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "left"}]
    resolver = {name: BytesRef(name, file_of(smooth_pixels(64, 64), "PNG")) for name in "ab"}.__getitem__
    encoder = Encoder(tokenizer, encode_config({"conv_style": "chat_template"}, checkpoint("qwen3_vl")))
    raw = RawSample("s/0", None, "s:line 1", {"messages": messages}, resolver)
    found = encoder.encode(raw, DatasetSpec(name="s"))
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    once = [n for n, before in zip(found.input_ids, [0, *found.input_ids], strict=False) if n != pad or before != pad]
    written = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(once) == written


def test_a_picture_counts_rows_and_columns_and_takes_its_longer_side():
    ids = np.array([1, 9, 9, 9, 9, 9, 9, 2, 3])
    assert grid_positions(ids, 9, [(2, 3)], start=10).tolist() == [
        [10, 11, 11, 11, 11, 11, 11, 14, 15],
        [10, 11, 11, 11, 12, 12, 12, 14, 15],
        [10, 11, 12, 13, 11, 12, 13, 14, 15],
    ]
    with pytest.raises(ValueError, match=r"6 image tokens for pictures of \[\(2, 2\)\]"):
        grid_positions(ids, 9, [(2, 2)])
    with pytest.raises(ValueError, match="do not lie together"):
        grid_positions(np.array([9, 1, 9]), 9, [(1, 2)])


def test_bounds_are_in_the_fingerprint_and_tile_options_are_not(tokenizer):
    encoder = Encoder(
        tokenizer, encode_config({"max_pixels": 70_000, "conv_style": "chat_template"}, checkpoint("qwen3_vl"))
    )
    fingerprint = encoder.fingerprint()
    assert {name: fingerprint[name] for name in ("family", "min_pixels", "max_pixels", "force_image_size")} == {
        "family": "qwen3_vl",
        "min_pixels": 65_536,
        "max_pixels": 70_000,
        "force_image_size": 32,
    }
    assert "max_dynamic_patch" not in fingerprint and encoder.grid_positions


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("force_image_size", 448),
        ("down_sample_ratio", 0.5),
        ("dynamic_image_size", True),
        ("use_thumbnail", True),
        ("max_dynamic_patch", 6),
    ],
)
def test_options_of_tiles_are_refused_by_name(option, value):
    with pytest.raises(UserError, match=f"--{option} {value} with 'qwen3_vl', whose pictures are not cut"):
        encode_config({option: value}, checkpoint("qwen3_vl"))


def test_bounds_of_pixels_are_refused_with_tiles():
    with pytest.raises(UserError, match="--max_pixels 5: it bounds pictures of models of native resolution"):
        encode_config({"max_pixels": 5}, {"model_type": "internvl"})
    with pytest.raises(UserError, match="min_pixels=9 exceeds max_pixels=5"):
        EncodeConfig(min_pixels=9, max_pixels=5)
    with pytest.raises(UserError, match="has tiles of one token"):
        make_family(EncodeConfig(family="qwen3_vl"), native_tokenizer())


def test_data_augment_is_refused_by_name(tokenizer):
    encoder = Encoder(tokenizer, encode_config({"conv_style": "chat_template"}, checkpoint("qwen3_vl")))
    with pytest.raises(UserError, match="data_augment of dataset 'mine'"):
        Samples((None,), (DatasetSpec(name="mine", data_augment=True),), encoder)
