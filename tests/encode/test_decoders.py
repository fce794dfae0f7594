"""Pixels of a kind of picture are those of `Image.open(...).convert("RGB")`, which InternVL trains and infers with."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
from helpers.encode_samples import file_of, smooth_pixels
from PIL import Image

from internvl_pack.encode import EncodeConfig
from internvl_pack.encode.decoders import decode_rgb
from internvl_pack.encode.headers import read_header
from internvl_pack.encode.images import colour_of
from internvl_pack.errors import UserError

PHOTO = Image.fromarray(smooth_pixels(37, 23))
RGBA = Image.fromarray(smooth_pixels(37, 23, 4), "RGBA")
PALETTE = PHOTO.quantize(16)
KINDS = {
    "RGB PNG": file_of(PHOTO),
    "RGB JPEG": file_of(PHOTO, "JPEG", quality=95, subsampling=0),
    "grey JPEG": file_of(PHOTO.convert("L"), "JPEG"),
    "CMYK JPEG": file_of(PHOTO.convert("CMYK"), "JPEG"),
    "RGB WebP": file_of(PHOTO, "WEBP", lossless=True),
    "BMP": file_of(PHOTO, "BMP"),
    "grey PNG": file_of(PHOTO.convert("L")),
    "1-bit PNG": file_of(PHOTO.convert("1")),
    "1-bit TIFF": file_of(PHOTO.convert("1"), "TIFF"),
    "CMYK TIFF": file_of(PHOTO.convert("CMYK"), "TIFF"),
    "palette PNG": file_of(PALETTE),
    "palette GIF": file_of(PALETTE, "GIF"),
    "RGBA PNG": file_of(RGBA),
    "RGBA PNG, all transparent": file_of(Image.new("RGBA", (9, 7), (200, 30, 4, 0))),
    "RGBA WebP": file_of(RGBA, "WEBP", lossless=True, exact=True),
    "RGBA TIFF": file_of(RGBA, "TIFF"),
    "grey and alpha PNG": file_of(RGBA.convert("LA")),
    "palette PNG, a transparent colour": file_of(PALETTE, transparency=3),
    "palette PNG, a table of alphas": file_of(PALETTE, transparency=bytes(range(0, 256, 16))),
    "palette GIF, a transparent colour": file_of(PALETTE, "GIF", transparency=3),
    "RGB PNG, a colour key": file_of(PHOTO, transparency=PHOTO.getpixel((3, 3))),
    "grey PNG, a level key": file_of(PHOTO.convert("L"), transparency=PHOTO.convert("L").getpixel((3, 3))),
}


def rgb_of(data: bytes, **options) -> np.ndarray:
    return decode_rgb("x", data, read_header("x", data, lambda: data, 1 << 40), **options)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_pillows(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rgb_of(KINDS[kind])
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(KINDS[kind])) as image:
            assert np.array_equal(found, np.asarray(image.convert("RGB")))


def test_what_lies_under_transparent_pixels_shows():
    """As InternVL sees it; a drawing on a transparent page is mostly black there."""
    pixels = np.array([[(255, 0, 0, 0), (0, 0, 255, 255), (9, 8, 7, 128)]], dtype=np.uint8)
    assert rgb_of(file_of(Image.fromarray(pixels, "RGBA"))).tolist() == [[[255, 0, 0], [0, 0, 255], [9, 8, 7]]]


@pytest.mark.parametrize("mode, through", [("La", "LA"), ("RGBa", "RGBA")])
def test_premultiplied_alpha_is_undone(mode, through):
    """Associated alpha of TIFF: Pillow itself goes no further than to the mode with alpha."""
    from internvl_pack.encode.decoders import _to_rgb

    image = RGBA.convert("LA").convert("La") if mode == "La" else RGBA.convert("RGBa")
    assert np.array_equal(_to_rgb(image, None), np.asarray(image.convert(through).convert("RGB")))


@pytest.mark.parametrize(
    "name, colour", [("white", (255, 255, 255)), ("#ff8800", (255, 136, 0)), ("rgb(1, 2, 3)", (1, 2, 3))]
)
def test_a_background_is_named_as_in_css(name, colour):
    assert colour_of(name) == colour == EncodeConfig(transparent_background=name).rules.background


def test_an_unknown_colour_names_the_option():
    with pytest.raises(UserError, match="transparent_background is 'wite': give a colour"):
        EncodeConfig(transparent_background="wite").rules  # noqa: B018
