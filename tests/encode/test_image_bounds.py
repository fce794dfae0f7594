"""Image files that weigh little and would cost much: decoded in seconds and 500 MB, or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.bounded_decoding import CASES, KINDS
from helpers.encode_samples import BytesRef, file_of, smooth_pixels
from PIL import Image

from internvl_pack.encode.decoders import MAX_SCANS
from internvl_pack.encode.images import decode_tiles, image_size_of
from internvl_pack.encode.tiles import TileGrid, plan_grid
from internvl_pack.errors import SampleError

pytestmark = pytest.mark.slow

MAX_MB = 500
MAX_SECONDS = 15  # 5 on an idle core; tests share theirs


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    script = Path(__file__).resolve().parents[1] / "helpers" / "bounded_decoding.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    return {case["name"]: case for case in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_a_costly_file_is_decoded_within_bounds_or_refused(found, name):
    assert found[name]["reason"] == CASES[name][1]
    assert found[name]["mb"] < MAX_MB and found[name]["s"] < MAX_SECONDS, found[name]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_changed_in_a_file_it_costs_no_more_than_it_may(found, kind):
    assert "died" not in found[kind], f"a {kind} file ended the process that decoded it"
    assert found[kind]["mb"] < MAX_MB and found[kind]["s"] < MAX_SECONDS, found[kind]


def tiles_of(data: bytes, grid: TileGrid | None = None) -> np.ndarray:
    ref = BytesRef("x", data)
    return decode_tiles(ref, grid or plan_grid(*image_size_of(ref), image_size=56), 56)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("padding", [1, 4, 100])
def test_padding_before_a_marker_does_not_touch_the_pixels(progressive, padding):
    whole = file_of(smooth_pixels(96, 64), "JPEG", progressive=progressive)
    padded = whole[:-2] + bytes(padding) + whole[-2:]
    if progressive:  # and in front of a scan's tables
        place = whole.rfind(b"\xff\xc4")
        padded = whole[:place] + bytes(padding) + whole[place:-2] + bytes(padding) + whole[-2:]
    assert np.array_equal(tiles_of(padded), tiles_of(whole))


def test_coded_pixels_that_are_left_over_are_damage():
    whole = file_of(smooth_pixels(96, 64), "JPEG")
    with pytest.raises(SampleError, match="image_corrupt"):
        tiles_of(whole[:-2] + b"\x35\x17\x91\x44" * 10 + whole[-2:])


def test_what_follows_a_picture_is_not_counted_as_its_scans():
    whole = file_of(smooth_pixels(96, 64), "JPEG")
    film = b"\xff\xda" * (2 * MAX_SCANS)
    assert np.array_equal(tiles_of(whole + film + b"\xff\xd9"), tiles_of(whole))


def test_a_gif_is_judged_to_the_end_of_its_first_frame():
    frames = [smooth_pixels(96, 64), 255 - smooth_pixels(96, 64), smooth_pixels(96, 64)[::-1]]
    images = [Image.fromarray(frame) for frame in frames]
    whole = file_of(images[0], "GIF", save_all=True, append_images=images[1:], duration=100)
    alone = tiles_of(whole)
    second = whole.index(b"!\xf9", whole.index(b"!\xf9") + 1)
    for stop in (second, second + 30, len(whole) - 40):
        assert np.array_equal(tiles_of(whole[:stop]), alone)
    with pytest.raises(SampleError, match="image_truncated"):
        tiles_of(whole[: second - 40])


def test_a_long_thin_picture_is_resized_as_a_short_one_is():
    """Shrinking its long side first changes a level here and there."""
    row = np.repeat(np.linspace(0, 255, 400_000).astype(np.uint8)[:, None, None], 3, axis=2)
    tiles = tiles_of(file_of(np.ascontiguousarray(row), "PNG"), TileGrid(1, 4))
    column = np.linspace(0, 255, 4 * 56)
    assert np.abs(tiles[:, 0].reshape(4 * 56, 56) - column[:, None]).max() <= 2
