"""Decodes files that cost far more than they weigh, each in a process of its own; prints what each took.

Run by test_image_bounds.py, apart from the tests' own process: the highest memory of a process never falls again.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import struct
import sys
import time
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image


def saved(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int) -> bytes:
    """Black, one bit a pixel."""
    row, pack = bytes(1 + (width + 7) // 8), zlib.compressobj(9)
    pixels = b"".join(pack.compress(row * min(1024, height - top)) for top in range(0, height, 1024)) + pack.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


SMALL = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
JPEG, GIF, PNG = saved(SMALL, "JPEG"), saved(SMALL.quantize(256), "GIF"), saved(SMALL, "PNG")
N = 20_000_000


def after(data: bytes, place: int, more: bytes) -> bytes:
    return data[:place] + more + data[place:]


def many_scans() -> bytes:
    """A progressive JPEG whose last scan comes a thousand times over."""
    data = saved(Image.new("RGB", (2048, 2048), (200, 30, 30)), "JPEG", progressive=True)
    start = data.rfind(b"\xff\xda")
    return data[:start] + data[start:-2] * 1000 + data[-2:]


def icon(inside: bytes) -> bytes:
    entry = bytes([16, 16, 0, 0, 1, 0, 32, 0]) + struct.pack("<II", len(inside), 22)
    return b"\0\0\1\0\1\0" + entry + inside


def tiled_tiff() -> bytes:
    """A picture of 16 x 16 pixels in one tile of 65,536 x 65,536."""
    tags = [
        (256, 16),
        (257, 16),
        (258, 8),
        (259, 1),
        (262, 1),
        (277, 1),
        (322, 1 << 16),
        (323, 1 << 16),
        (324, 8),
        (325, 256),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(260)


# By name: (file, the reason of its rejection; None for one that is decoded).
CASES: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "thin png": (lambda: png(1, 1_000_000), None),
    "wide png": (lambda: png(1_000_000, 1), None),
    "longer png": (lambda: png(1, 4_000_000), "image_too_large"),
    "longest png": (lambda: png(1, 1 << 26), "image_too_large"),
    "1000 scans": (many_scans, "image_too_large"),
    "jpeg padded with 0xFF": (lambda: after(JPEG, 2, b"\xff" * N), None),
    "jpeg of markers": (lambda: after(JPEG, 2, b"\xff\x00" * (N // 2)), "image_corrupt"),
    "jpeg of empty segments": (lambda: after(JPEG, 2, b"\xff\xfe\0\2" * (N // 4)), "image_corrupt"),
    "pgm with a long comment": (lambda: b"P5\n#" + b"x" * N + b"\n8 8\n255\n" + bytes(64), "image_corrupt"),
    "pgm with many comments": (lambda: b"P5\n" + b"#\n" * (N // 2) + b"8 8\n255\n" + bytes(64), "image_corrupt"),
    "plain ppm": (lambda: b"P3\n800 800\n255\n" + b"12 " * (800 * 800 * 3), None),
    "large plain ppm": (lambda: b"P3\n2000 2000\n255\n" + b"12 " * (2000 * 2000 * 3), "image_too_large"),
    "plain ppm of comments": (lambda: b"P2\n80 80\n255\n" + b"#\n" * (N // 2) + b"12 " * 6400, "image_corrupt"),
    "12-bit pgm": (lambda: b"P5\n2000 2000\n4095\n" + bytes(8_000_000), "image_too_large"),
    "gif with a long comment": (lambda: after(GIF, 781, b"!\xfe" + (b"\xff" + b"c" * 255) * (N // 256) + b"\0"), None),
    "gif with a comment in parts": (lambda: after(GIF, 781, b"!\xfe" + b"\1c" * (N // 2) + b"\0"), "image_corrupt"),
    "gif of extensions": (lambda: after(GIF, 781, b"!\xfe\0" * (N // 3)), "image_corrupt"),
    "png of comments": (lambda: after(PNG, 33, chunk(b"tEXt", b"") * (N // 12)), "image_corrupt"),
    "png of empty pixels": (lambda: after(PNG, 33, chunk(b"IDAT", b"") * (N // 12)), "image_corrupt"),
    "ico with a large png": (lambda: icon(png(8192, 8192)), None),
    "ico with a larger png": (lambda: icon(png(8192, 8193)), "image_too_large"),
    "tiff with a large tile": (tiled_tiff, "image_too_large"),
}


def measured(name: str) -> dict:
    from helpers.encode_samples import BytesRef
    from internvl_pack.encode.images import decode_tiles, image_size_of
    from internvl_pack.encode.tiles import plan_grid
    from internvl_pack.errors import SampleError

    ref = BytesRef(name, CASES[name][0]())
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest memory so far counts from here
    before, started, reason = highest_mb(), time.monotonic(), None
    try:
        size = image_size_of(ref)
        decode_tiles(ref, plan_grid(*size), 448, size=size)
    except SampleError as error:
        reason = error.reason
    return {"name": name, "reason": reason, "s": time.monotonic() - started, "mb": highest_mb() - before}


# Formats that are fuzzed, as Pillow names them, and how they are saved.
KINDS: dict[str, dict] = {
    "JPEG": {"progressive": True},
    "PNG": {},
    "WEBP": {},
    "GIF": {},
    "BMP": {},
    "TIFF": {"compression": "tiff_lzw"},
    "ICO": {},
    "PPM": {},
    "JPEG2000": {},
    "AVIF": {},
}
FUZZED = 60
MAX_PIXELS = 1 << 22  # what a file says of its size is free to be changed; this bounds what it may cost


def changed(data: bytes, draw: random.Random) -> bytes:
    """A file with some numbers of it, mostly of its header, made as large, small or odd as they can be."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(min(len(found), draw.choice((40, 200, len(found)))))
        width = draw.choice((1, 2, 4, 8))
        value = draw.choice((b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(8), b"\0\1" * 4, draw.randbytes(8)))
        found[place : place + width] = value[:width]
    if draw.random() < 0.2:
        place = draw.randrange(len(found))
        found[place:place] = draw.choice((b"\xff", b"\0", b" ", b"#\n")) * draw.choice((10, 100_000))
    return bytes(found[: draw.choice((len(found), len(found), draw.randrange(len(found))))])


def fuzzed(kind: str) -> dict:
    """The longest time and the highest memory of all changed files of a kind; any error but SampleError ends it."""
    from helpers.encode_samples import BytesRef
    from internvl_pack.encode.images import ImageRules, decode_tiles, image_size_of
    from internvl_pack.encode.tiles import plan_grid
    from internvl_pack.errors import SampleError

    draw, data, longest = random.Random(kind), saved(SMALL, kind, **KINDS[kind]), 0.0
    rules = ImageRules(max_image_pixels=MAX_PIXELS)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = highest_mb()
    for _ in range(FUZZED):
        ref, started = BytesRef(kind, changed(data, draw)), time.monotonic()
        try:
            size = image_size_of(ref, rules)
            decode_tiles(ref, plan_grid(*size), 448, rules, size=size)
        except SampleError:
            pass
        longest = max(longest, time.monotonic() - started)
    return {"name": kind, "s": longest, "mb": highest_mb() - before}


def highest_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import torch

    import internvl_pack.encode.images  # noqa: F401

    torch.set_num_threads(1)
    for measure, names in ((measured, CASES), (fuzzed, KINDS)):
        for name in names:
            if not os.fork():
                status = 1
                try:
                    print(json.dumps(measure(name)), flush=True)
                    status = 0
                finally:
                    os._exit(status)
            if os.wait()[1]:
                print(json.dumps({"name": name, "died": True}), flush=True)
