"""Image files as people have them: sizes from headers, pixels as Pillow's, damage found, limits kept."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from helpers.encode_samples import BytesRef, file_of, smooth_pixels
from PIL import Image, ImageFile, ImageOps

from internvl_pack.encode import decoders
from internvl_pack.encode.decoders import decode_rgb
from internvl_pack.encode.headers import HEAD_BYTES, exif_orientation, read_header
from internvl_pack.encode.images import ImageRules, _factors, cut_tiles, decode_tiles, empty_tiles, image_size_of
from internvl_pack.encode.tiles import TileGrid, plan_grid
from internvl_pack.errors import SampleError

EDGE = 448


def rgb_of(data: bytes, **options) -> np.ndarray:
    """Pixels of a whole file, as stored."""
    return decode_rgb("x", data, read_header("x", data, lambda: data, 1 << 40), **options)[0]


def tiles_of(data: bytes, rules: ImageRules = ImageRules(), edge: int = EDGE) -> np.ndarray:  # noqa: B008
    """Planned from the header and decoded, as training does."""
    ref = BytesRef("x", data)
    size = image_size_of(ref, rules)
    return decode_tiles(ref, plan_grid(*size), edge, rules, size=size)


def reason_of(data: bytes, rules: ImageRules = ImageRules()) -> str | None:  # noqa: B008
    try:
        tiles_of(data, rules, edge=56)
    except SampleError as error:
        assert error.detail.startswith("x"), "names the file"
        return error.reason
    return None


def pillow_tiles(image: Image.Image, grid: TileGrid, edge: int) -> np.ndarray:
    """InternVL's way: one bicubic resize, crops, thumbnail."""
    whole = image.resize((grid.columns * edge, grid.rows * edge))
    boxes = [(c * edge, r * edge) for r in range(grid.rows) for c in range(grid.columns)]
    tiles = [whole.crop((x, y, x + edge, y + edge)) for x, y in boxes]
    tiles += [image.resize((edge, edge))] * grid.thumbnail
    return np.stack([np.asarray(tile).transpose(2, 0, 1) for tile in tiles])


# --- the hostile cases


@pytest.mark.parametrize(
    "name, tiles",
    [
        ("good_448x448.jpg", 1),
        ("good_633x633.png", 1),
        ("good_634x634.png", 5),
        ("good_900x300.jpg", 4),
        ("rgba_hidden_red.png", 1),
        ("la_gradient_alpha.png", 1),
        ("bilevel_1bit.png", 1),
        ("gray16_ramp.png", 9),
        ("float32_unit_range.tif", 1),
        ("cmyk_adobe.jpg", 1),
        ("exif_orientation6_900x300.jpg", 4),
        ("exif_garbage.jpg", 7),
        ("png_ztxt_3mib.png", 1),
        ("shape_2000x1.png", 13),
        ("shape_1x2000.png", 13),
        ("shape_1x1.png", 1),
        ("shape_3x1.png", 4),
        ("animated.gif", 13),
        ("animated.webp", 13),
        ("png_named.jpg", 1),
        ("IMG_0001.JPG", 1),
    ],
)
def test_usable_files_give_their_tiles(shared_dir, name, tiles):
    found = tiles_of((shared_dir / "cases" / "images" / name).read_bytes())
    assert found.shape == (tiles, 3, EDGE, EDGE) and found.dtype == np.uint8
    assert found.transpose(0, 2, 3, 1).flags.c_contiguous, "a pixel's colours together"


@pytest.mark.parametrize(
    "name, reason",
    [
        ("truncated_60pct.jpg", "image_truncated"),
        ("truncated_60pct.png", "image_truncated"),
        ("truncated_header_only.jpg", "image_truncated"),
        ("bomb_14000x14000_1bit.png", "image_too_large"),
        ("zero_bytes.jpg", "image_empty"),
        ("html_error_page.jpg", "image_not_an_image"),
    ],
)
def test_unusable_files_are_rejected_with_a_reason(shared_dir, name, reason):
    assert reason_of((shared_dir / "cases" / "images" / name).read_bytes()) == reason


@pytest.mark.parametrize("name", ["truncated_60pct.jpg", "truncated_60pct.png"])
def test_truncated_files_are_used_by_option(shared_dir, name):
    data = (shared_dir / "cases" / "images" / name).read_bytes()
    tiles = tiles_of(data, ImageRules(allow_truncated_images=True))
    assert tiles.shape[0] == 1
    assert tiles[0, :, :200].std() > 10, "what there is of the picture is there"


def test_the_first_frame_of_an_animation_counts(shared_dir):
    for name in ("animated.gif", "animated.webp"):
        pixels = rgb_of((shared_dir / "cases" / "images" / name).read_bytes())
        assert (abs(pixels.astype(int) - (255, 0, 0)) < 8).all(), f"{name} begins red"


# --- modes


def on_white(data: bytes) -> list:
    return rgb_of(data, background=(255, 255, 255)).tolist()


def test_transparency_shows_the_background_by_option():
    """Half transparent colours mix with it; what lies under a transparent pixel does not show."""
    pixels = np.zeros((1, 3, 4), np.uint8)
    pixels[0] = [(255, 0, 0, 0), (0, 0, 255, 255), (0, 0, 0, 128)]
    assert on_white(file_of(pixels)) == [[[255, 255, 255], [0, 0, 255], [127, 127, 127]]]
    assert rgb_of(file_of(pixels), background=(0, 200, 0)).tolist() == [[[0, 200, 0], [0, 0, 255], [0, 100, 0]]]
    grey = Image.fromarray(pixels, "RGBA").convert("LA")
    assert on_white(file_of(grey))[0][0] == [255, 255, 255]


def test_palettes_with_transparency_show_the_background_by_option():
    image = Image.new("P", (4, 4), 1)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((0, 0), 0)
    opaque, by_index, by_table = (on_white(file_of(image, transparency=t)) for t in (None, 0, bytes([0, 128])))
    assert opaque[0][0] == [255, 0, 0] and opaque[1][1] == [0, 255, 0]
    assert by_index[0][0] == [255, 255, 255] and by_index[1][1] == [0, 255, 0]
    assert by_table[0][0] == [255, 255, 255] and by_table[1][1] == [127, 255, 127]


def test_a_colour_key_shows_the_background_by_option():
    image = Image.new("RGB", (2, 1), (10, 20, 30))
    image.putpixel((1, 0), (1, 2, 3))
    assert on_white(file_of(image, transparency=(10, 20, 30))) == [[[255, 255, 255], [1, 2, 3]]]


def test_one_bit_is_black_and_white():
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)
    assert rgb_of(file_of(image)).tolist() == [[[0] * 3, [255] * 3]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize(
    "levels, expected",
    [
        ([0, 256, 32768, 65535], [0, 1, 128, 255]),  # 16 bits in use
        ([0, 16, 2048, 4095], [0, 1, 128, 255]),  # a 12-bit sensor
        ([0, 1, 128, 255], [0, 1, 128, 255]),  # 8 bits in a 16-bit file
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_16_bit_grey_is_scaled_by_the_depth_in_use(kind, levels, expected):
    found = rgb_of(file_of(np.array([levels], np.uint16), kind))
    assert found[0, :, 0].tolist() == expected and (found == found[:, :, :1]).all()


def test_a_full_16_bit_ramp_keeps_its_256_levels():
    ramp = np.linspace(0, 65535, 512).astype(np.uint16)[None]
    assert len(np.unique(rgb_of(file_of(ramp)))) == 256


@pytest.mark.parametrize(
    "values, expected", [([0, 0.5, 1], [0, 128, 255]), ([0, 100.4, 255], [0, 100, 255]), ([0, 0, 0], [0, 0, 0])]
)
def test_floats_are_scaled_by_a_stated_rule(values, expected):
    assert rgb_of(file_of(np.array([values], np.float32), "TIFF"))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("values", [[0, -1], [0, 256], [0, np.nan], [0, np.inf]])
def test_other_floats_are_rejected(values):
    assert reason_of(file_of(np.array([values], np.float32), "TIFF")) == "image_mode"


@pytest.mark.parametrize("values", [[0, -1], [0, 1 << 20]])
def test_32_bit_integers_beyond_16_bits_are_rejected(values):
    assert reason_of(file_of(np.array([values], np.int32), "TIFF")) == "image_mode"


def cmyk_jpeg() -> bytes:
    image = Image.new("CMYK", (32, 16), (255, 0, 0, 0))
    image.paste((0, 0, 0, 255), (16, 0, 32, 16))
    return file_of(image, "JPEG", quality=95)


def without_adobe_marker(data: bytes) -> bytes:
    at = data.index(b"\xff\xee")
    return data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]


@pytest.mark.parametrize("data", [cmyk_jpeg(), without_adobe_marker(cmyk_jpeg())], ids=["adobe", "no marker"])
def test_cmyk_is_ink_on_paper_with_and_without_the_adobe_marker(data):
    pixels = rgb_of(data).astype(int)
    assert (abs(pixels[:, :12] - (0, 255, 255)) < 12).all(), "cyan"
    assert (abs(pixels[:, 20:] - (0, 0, 0)) < 12).all(), "black"
    assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))), "as Pillow"


@pytest.mark.parametrize("mode", ["L", "RGB", "YCbCr"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}], ids=str)
def test_jpegs_are_bit_equal_to_pillows(mode, options):
    data = file_of(Image.fromarray(smooth_pixels(101, 67)).convert(mode), "JPEG", **options)
    assert np.array_equal(rgb_of(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "ICO"])
def test_other_formats_are_decoded_as_pillow_does(kind):
    data = file_of(Image.fromarray(smooth_pixels(64, 64)), kind)
    image = Image.open(io.BytesIO(data))
    assert image_size_of(BytesRef("x", data)) == image.size
    assert np.array_equal(rgb_of(data), np.asarray(image.convert("RGB")))


def test_an_mpo_gives_its_first_picture():
    first, second = (Image.new("RGB", (64, 48), colour) for colour in ("red", "blue"))
    data = file_of(first, "MPO", save_all=True, append_images=[second])
    assert (abs(rgb_of(data).astype(int) - (255, 0, 0)) < 8).all()


def test_an_animated_png_gives_its_first_picture():
    first, second = (Image.new("RGB", (64, 48), colour) for colour in ("red", "blue"))
    assert (rgb_of(file_of(first, save_all=True, append_images=[second])) == (255, 0, 0)).all()


# --- EXIF


def with_exif(orientation: int, kind: str = "JPEG", size: tuple[int, int] = (90, 30)) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(Image.fromarray(smooth_pixels(*size)), kind, exif=exif, quality=95)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_applied_and_planned_with(orientation, kind):
    data = with_exif(orientation, kind)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    size = image_size_of(BytesRef("x", data))
    assert size == upright.size == ((90, 30) if orientation < 5 else (30, 90))
    assert abs(tiles_of(data, edge=56).astype(int) - pillow_tiles(upright, plan_grid(*size), 56)).max() <= 2


def test_orientation_is_ignored_by_option():
    rules = ImageRules(apply_exif_orientation=False)
    data = with_exif(6)
    assert image_size_of(BytesRef("x", data), rules) == (90, 30)
    stored = Image.open(io.BytesIO(data)).convert("RGB")
    assert abs(tiles_of(data, rules, 56).astype(int) - pillow_tiles(stored, plan_grid(90, 30), 56)).max() <= 2


def exif_block(order: str, kind: int, value: int, offset: int = 8, tag: int = 0x0112) -> bytes:
    body = struct.pack(f"{order}HLIHHII", 42, offset, 0, 0, 0, 0, 0)[:6]
    entry = struct.pack(f"{order}HHHI", 1, tag, kind, 1) + struct.pack(f"{order}{'H' if kind == 3 else 'I'}", value)
    return (b"II" if order == "<" else b"MM") + body + entry.ljust(14, b"\0") + b"\0" * 4


@pytest.mark.parametrize(
    "block, expected",
    [
        (exif_block("<", 3, 6), 6),
        (exif_block(">", 3, 6), 6),
        (exif_block(">", 4, 8), 8),
        (exif_block("<", 3, 0), 1),
        (exif_block("<", 3, 9), 1),
        (exif_block("<", 2, 6), 1),  # a text
        (exif_block("<", 3, 6, tag=0x0113), 1),
        (exif_block("<", 3, 6, offset=1 << 31), 1),
        (exif_block("<", 3, 6, offset=0), 1),
        (exif_block("<", 3, 6)[:18], 1),
        (b"", 1),
        (b"garbage garbage garbage", 1),
    ],
)
def test_broken_exif_means_unrotated(block, expected):
    assert exif_orientation(block) == expected


# --- headers


def jpeg_segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", 2 + len(body)) + body


def test_a_header_beyond_the_first_bytes_is_found():
    """A colour profile of several segments before the size."""
    plain = with_exif(6)
    data = plain[:2] + jpeg_segment(0xE2, bytes(60_000)) * 3 + plain[2:]
    assert data.index(b"\xff\xc0") > HEAD_BYTES
    assert image_size_of(BytesRef("x", data)) == (30, 90)
    assert np.array_equal(rgb_of(data), rgb_of(plain))


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


@pytest.mark.parametrize(
    "chunk",
    [
        png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(30 << 20))),
        png_chunk(b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(bytes(30 << 20))),
        png_chunk(b"iCCP", b"profile\0\0" + zlib.compress(bytes(30 << 20))),
        png_chunk(b"tEXt", b"Comment\0" + bytes(3 << 20)),
        png_chunk(b"iCCP", b"profile\0\0not compressed"),
    ],
    ids=["zTXt", "iTXt", "iCCP", "tEXt", "broken iCCP"],
)
def test_png_comments_and_profiles_of_any_size_do_not_matter(chunk):
    plain = file_of(smooth_pixels(40, 30))
    data = plain[:33] + chunk + plain[33:]
    assert image_size_of(BytesRef("x", data)) == (40, 30)
    assert np.array_equal(rgb_of(data), rgb_of(plain))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_size_from_the_first_bytes_is_pillows(kind):
    for width, height in [(1, 1), (1, 300), (513, 2), (64, 48)]:
        data = file_of(Image.fromarray(smooth_pixels(width, height)), kind)
        assert image_size_of(BytesRef("x", data)) == (width, height)


@pytest.mark.parametrize(
    "options", [{"lossless": True}, {"lossless": False}, {"lossless": False, "exif": b"Exif\0\0II*\0"}], ids=str
)
@pytest.mark.parametrize("channels", [3, 4])
def test_size_of_every_kind_of_webp(options, channels):
    data = file_of(smooth_pixels(123, 45, channels), "WEBP", **options)
    assert image_size_of(BytesRef("x", data)) == (123, 45)


def test_the_pixel_limit_is_inclusive_and_named():
    data = file_of(np.zeros((100, 200), np.uint8))
    assert image_size_of(BytesRef("x", data), ImageRules(max_image_pixels=20_000)) == (200, 100)
    with pytest.raises(SampleError, match=r"image_too_large: x is 200 x 100 pixels, more than max_image_pixels=19999"):
        image_size_of(BytesRef("x", data), ImageRules(max_image_pixels=19_999))


def test_the_pixel_limit_may_exceed_pillows_own(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    for kind in ("PNG", "JPEG", "BMP"):
        assert tiles_of(file_of(Image.new("L", (100, 100)), kind), edge=56).shape[0] == 1
    assert reason_of(file_of(Image.new("L", (100, 100)), "TIFF")) == "image_too_large", "some plugins insist"


@pytest.mark.parametrize(
    "data", [b"<!DOCTYPE html><html>404</html>", b'{"error": 1}', b"\x7fELF" + bytes(60), b"%!PS-Adobe-3.0", bytes(100)]
)
def test_what_is_no_image_says_so(data):
    assert reason_of(data) == "image_not_an_image"


def test_a_file_that_changed_after_planning_is_refused():
    data = file_of(smooth_pixels(40, 30))
    with pytest.raises(SampleError, match="image_changed"):
        decode_tiles(BytesRef("x", data), TileGrid(1, 1), 56, size=(30, 40))


# --- damage

KINDS = {
    "JPEG": {"quality": 90},
    "progressive JPEG": {"format": "JPEG", "progressive": True},
    "PNG": {},
    "WEBP": {},
    "BMP": {},
    "GIF": {},
    "TIFF": {"compression": "tiff_lzw"},
}


def noisy(kind: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8)
    options = dict(KINDS[kind])
    return file_of(pixels, options.pop("format", kind), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_found(kind):
    data, draw = noisy(kind), random.Random(0)
    for cut in [*([] if kind == "GIF" else [1]), 2, 4, 8, 12, 100, *(draw.randrange(1, len(data)) for _ in range(60))]:
        assert reason_of(data[:-cut]) in ("image_truncated", "image_corrupt", "image_not_an_image"), cut


@pytest.mark.parametrize("kind", KINDS)
def test_bit_flips_cost_one_sample_at_most(kind):
    """Nothing but a SampleError ever comes out, whatever is flipped."""
    data, draw = noisy(kind), random.Random(1)
    for _ in range(120):
        damaged = bytearray(data)
        for _ in range(draw.choice((1, 1, 8))):
            damaged[draw.randrange(min(len(data), draw.choice((64, len(data)))))] ^= 1 << draw.randrange(8)
        reason_of(bytes(damaged))


def test_every_bit_flip_of_a_png_is_found_or_changes_no_pixel():
    data, draw = noisy("PNG"), random.Random(2)
    good = tiles_of(data, edge=56)
    for _ in range(100):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        if reason_of(bytes(damaged)) is None:
            assert np.array_equal(tiles_of(bytes(damaged), edge=56), good)


SIGNATURES = [
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    b"RIFF\xff\0\0\0WEBPVP8",
    b"GIF89a",
    b"BM",
    b"II*\0\x08\0\0\0",
    b"P6 ",
    b"\0\0\1\0\1\0",
    b"\0\0\0\x0cftypavif",
]


@pytest.mark.parametrize("start", SIGNATURES)
def test_random_bytes_behind_a_signature_cost_one_sample_at_most(start):
    draw = random.Random(3)
    for length in [0, 1, 10, 40, 200] * 30:
        reason_of(start + draw.randbytes(length))


def test_blanked_jpeg_data_is_found():
    data = noisy("JPEG")
    middle = len(data) // 2
    assert reason_of(data[:middle] + bytes(200) + data[middle + 200 :]) == "image_corrupt"


def test_pillows_process_wide_switches_stay_as_they_were():
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    lenient = ImageRules(allow_truncated_images=True)
    for kind in KINDS:
        reason_of(noisy(kind)[:-200], lenient)
        assert not ImageFile.LOAD_TRUNCATED_IMAGES
    assert reason_of(noisy("PNG")[:-200]) == "image_truncated", "and the next strict one is strict"


# --- resize


@pytest.mark.slow
@pytest.mark.parametrize("size", [(448, 448), (1280, 960), (333, 777), (640, 480), (60, 20), (2000, 1), (1, 1), (3, 1)])
def test_tiles_are_within_two_levels_of_pillows_bicubic(size):
    image = Image.fromarray(smooth_pixels(*size))
    tiles = tiles_of(file_of(image))
    assert abs(tiles.astype(int) - pillow_tiles(image, plan_grid(*size), EDGE)).max() <= 2


def test_tiles_of_noise_are_within_two_levels_of_pillows_bicubic():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 500, 3), dtype=np.uint8))
    difference = abs(tiles_of(file_of(image)).astype(int) - pillow_tiles(image, plan_grid(500, 300), EDGE))
    assert difference.max() <= 2 and difference.mean() < 0.05


def test_real_jpegs_agree_with_pillows_bicubic(demo_dir):
    files = sorted(path for path in demo_dir.rglob("*.jpg"))[:8]
    assert files
    for path in files:
        image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        difference = abs(tiles_of(path.read_bytes()).astype(int) - pillow_tiles(image, plan_grid(*image.size), EDGE))
        assert difference.max() <= 2, path.name


@pytest.mark.parametrize(
    "size, target, scale",
    [
        ((4000, 3000), (448, 448), 4),
        ((1600, 1400), (448, 448), 2),
        ((1280, 960), (448, 448), 1),
        ((4000, 3000), (1792, 1344), 1),
        ((9000, 9000), (448, 448), 8),
        ((4000, 600), (448, 448), 1),
    ],
)
def test_only_jpegs_far_larger_than_their_grid_are_decoded_smaller(size, target, scale):
    header = read_header("x", file_of(Image.new("L", (8, 8)), "JPEG"), bytes, 1 << 40)
    header = type(header)("JPEG", *size, components=3)
    assert decoders._jpeg_scale(header, target) == scale


@pytest.mark.parametrize("size, scale", [((201, 175), 2), ((401, 399), 4), ((801, 799), 8)])
def test_scaled_decoding_stays_within_one_level_on_average(size, scale):
    """Also where the size is no multiple of the scale."""
    pixels = smooth_pixels(*size).astype(np.int16)
    pixels += np.random.default_rng(0).integers(-12, 12, pixels.shape, dtype=np.int16)
    data = file_of(np.clip(pixels, 0, 255).astype(np.uint8), "JPEG", quality=90)
    header = read_header("x", data, bytes, 1 << 40)
    assert decode_rgb("x", data, header, (56, 56))[1] == scale
    found = decode_tiles(BytesRef("x", data), TileGrid(1, 1), 56)
    difference = abs(found.astype(int) - pillow_tiles(Image.open(io.BytesIO(data)), TileGrid(1, 1), 56))
    assert difference.mean() < 1 and np.percentile(difference, 99) <= 8


def test_the_right_size_is_not_resized():
    pixels = np.random.default_rng(0).integers(0, 255, (448, 448, 3), dtype=np.uint8)
    assert np.array_equal(tiles_of(file_of(pixels))[0], pixels.transpose(2, 0, 1))


def test_tiles_are_written_into_the_callers_array():
    out = np.zeros((5, 3, 56, 56), np.uint8)
    grid = TileGrid(2, 1, thumbnail=True)
    found = decode_tiles(BytesRef("x", file_of(smooth_pixels(90, 45))), grid, 56, out=out[1:4])
    assert np.shares_memory(found, out)
    assert [bool(tile.any()) for tile in out] == [False, True, True, True, False]


MEMORY = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np
from PIL import Image
from helpers.encode_samples import BytesRef, file_of, smooth_pixels
from internvl_pack.encode.images import decode_tiles
from internvl_pack.encode.tiles import TileGrid
def peak():
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
Image.init()
out = np.ones((1, 3, 448, 448), np.uint8)
decode_tiles(BytesRef("x", file_of(smooth_pixels(30, 20, 4), {kind!r})), TileGrid(1, 1), 448, out=out)
data, before = sys.stdin.buffer.read(), peak()
decode_tiles(BytesRef("x", data), TileGrid(1, 1), 448, out=out)
print((peak() - before) / 4e6)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_decoding_keeps_to_its_memory():
    """32 bytes a pixel, measured with the hungriest format on 4 million pixels in a process of its own."""
    from pathlib import Path

    kind = "WEBP"
    data = file_of(np.repeat(np.repeat(smooth_pixels(200, 200, 4), 10, axis=0), 10, axis=1), kind)
    code = MEMORY.format(tests=str(Path(__file__).resolve().parents[1]), kind=kind)
    found = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert 0 < float(found.stdout) <= 32


def test_the_scale_of_a_ragged_picture_gives_the_wanted_size():
    """torch rounds `input * scale` down; any size and scale must come out at the target."""
    draw = random.Random(0)
    for _ in range(20_000):
        target, scale = draw.choice((56, 448, 1344, 5376)), draw.choice((2, 4, 8))
        width = draw.randint(int(1.5 * scale * target), 100_000)
        stored = -(-width // scale)
        _, factor = _factors(1, target, (width / scale, width / scale))
        assert int(stored * factor) == target


@pytest.mark.parametrize("height, width", [(60, 75), (33, 500), (1, 1), (83, 84), (84, 56), (85, 300)])
def test_tiles_are_torchs_resize_of_the_whole_in_any_order_of_memory(height, width):
    torch = pytest.importorskip("torch")
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    grid, edge = TileGrid(3, 4, True), 28
    options = {"mode": "bicubic", "antialias": True, "align_corners": False}
    image = torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]
    whole = torch.nn.functional.interpolate(image, (4 * edge, 3 * edge), **options)[0].numpy()
    expected = whole.reshape(3, 4, edge, 3, edge).transpose(1, 3, 0, 2, 4).reshape(12, 3, edge, edge)
    for tiles in (empty_tiles(grid.num_tiles, edge), np.empty((grid.num_tiles, 3, edge, edge), dtype=np.uint8)):
        cut_tiles(pixels, grid, tiles)
        assert np.array_equal(tiles[:12], expected)
        assert np.array_equal(tiles[12], torch.nn.functional.interpolate(image, (edge, edge), **options)[0].numpy())


@pytest.mark.parametrize("mode, white", [("1", 1), ("L", 255), ("LA", (255, 255)), ("RGBA", (0, 0, 0, 0)), ("I;16", 0)])
def test_a_png_stream_that_ends_early_is_told_from_one_that_ends_blank(mode, white, monkeypatch):
    """Pillow is content with both. Whole ones need not be inflated twice to be known."""
    data = file_of(Image.new(mode, (333, 7), white))
    with monkeypatch.context() as patch:
        patch.setattr(decoders, "_png_has_all_rows", None)
        assert tiles_of(data).shape[1:] == (3, EDGE, EDGE)
    start = data.index(b"IDAT") - 4
    stop = start + 12 + int.from_bytes(data[start : start + 4], "big")
    rows = zlib.decompress(data[start + 8 : stop - 4])
    for kept in (0, 5, 6):
        chunk = png_chunk(b"IDAT", zlib.compress(rows[: kept * len(rows) // 7]))
        with pytest.raises(SampleError, match=r"image_truncated|image_corrupt"):
            tiles_of(data[:start] + chunk + data[stop:])


ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]


@pytest.mark.parametrize("interlaced", [0, 1])
@pytest.mark.parametrize(
    "kind, depth",
    [(0, 1), (0, 2), (0, 8), (0, 16), (2, 8), (2, 16), (3, 1), (3, 4), (3, 8), (4, 8), (4, 16), (6, 8), (6, 16)],
)
def test_pngs_of_every_kind_are_pillows_when_whole_and_refused_when_short(interlaced, kind, depth):
    """Of a few pixels, where a row may hold a part of some passes only; noise, black, white and stripes."""
    rng = np.random.default_rng(depth + kind)
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    palette = png_chunk(b"PLTE", bytes(3 << depth)) if kind == 3 else b""
    for width, height in [(1, 1), (2, 1), (17, 1), (3, 2), (9, 5), (5, 9)]:
        widths = []  # bytes of each line of the stream
        for left, top, across, down in ADAM7 if interlaced else [(0, 0, 1, 1)]:
            columns, lines = max(0, -(-(width - left) // across)), max(0, -(-(height - top) // down))
            widths += [(columns * bits + 7) // 8] * (lines if columns else 0)
        for pixels in (rng.bytes(sum(widths)), bytes(sum(widths)), b"\xff" * sum(widths)):
            stream = b"".join(
                b"\0" + pixels[stop - n : stop] for n, stop in zip(widths, np.cumsum(widths), strict=True)
            )

            def png(data: bytes, width=width, height=height) -> bytes:
                header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlaced))
                whole = header + palette + png_chunk(b"IDAT", zlib.compress(data)) + png_chunk(b"IEND", b"")
                return b"\x89PNG\r\n\x1a\n" + whole

            with Image.open(io.BytesIO(png(stream))) as image:
                image.load()
            assert np.array_equal(rgb_of(png(stream)), decoders._to_rgb(image, None))
            for cut in {1, widths[-1] + 1, len(stream)}:
                assert reason_of(png(stream[:-cut])) in {"image_truncated", "image_corrupt"}, (width, height, cut)


def test_opaque_and_transparent_bands_of_one_picture_are_told_apart():
    """Bands are converted on their own; a picture higher than one has all three kinds of them."""
    pixels = np.full((1300, 700, 4), (200, 100, 50, 255), dtype=np.uint8)
    pixels[400:800, :, 3] = 0
    pixels[800:, :, 3] = 128
    found = rgb_of(file_of(Image.fromarray(pixels), "PNG"), background=(255, 255, 255))
    assert np.array_equal(found[:400], np.full((400, 700, 3), (200, 100, 50)))
    assert (found[400:800] == 255).all()
    assert np.abs(found[800:].astype(int) - np.array([227, 177, 152])).max() <= 1


@pytest.mark.parametrize("interlaced", [0, 1])
@pytest.mark.parametrize("kind, colours", [(2, 3), (0, 1), (6, 4)])
@pytest.mark.parametrize("missing", [1, 200, 399])
def test_a_png_whose_pixel_data_ends_well_but_early_is_cut(interlaced, kind, colours, missing):
    """The stream and all checksums are whole, rows are not there: Pillow would leave them black."""

    def rows(left: int, top: int, across: int, down: int) -> list[bytes]:
        columns, lines = -(-(400 - left) // across), -(-(400 - top) // down)
        return [b"\0" + b"\x80" * (columns * colours)] * lines

    lines = [row for one in (ADAM7 if interlaced else [(0, 0, 1, 1)]) for row in rows(*one)]

    def png(lines: list[bytes]) -> bytes:
        header = struct.pack(">IIBBBBB", 400, 400, 8, kind, 0, 0, interlaced)
        stream = zlib.compress(b"".join(lines))
        body = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", stream) + png_chunk(b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + body

    assert reason_of(png(lines)) is None
    assert reason_of(png(lines[:-missing])) in {"image_truncated", "image_corrupt"}
    assert reason_of(png(lines[:-missing]), ImageRules(allow_truncated_images=True)) is None


def test_a_black_picture_is_no_cut_one():
    for image in (Image.new("RGB", (300, 200)), Image.new("RGBA", (300, 200)), Image.new("1", (301, 200))):
        assert reason_of(file_of(image, "PNG")) is None


@pytest.mark.parametrize(
    "data, words",
    [
        (b"\0\0\0\x18ftypheic" + bytes(99), "HEIC"),
        (b"\xff\x0a" + bytes(99), "JPEG XL"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"Not Found", "looks like text$"),
        (b"\x1f\x8b" + bytes(99), "gzip"),
        (b"\0\0\0\x18ftypisom" + bytes(99), "video"),
    ],
)
def test_what_is_taken_for_an_image_is_told(data, words):
    with pytest.raises(SampleError, match=f"image_not_an_image: .*{words}"):
        tiles_of(data)
