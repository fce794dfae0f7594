"""Videos of a few frames that say which ones they are, and samples with one."""

from __future__ import annotations

import struct
import tempfile

import av
import numpy as np

from .encode_samples import raw_sample

STEP = 20  # grey levels between digits


def clip(frames: int = 60, rate: int = 10, kind: str = "mp4", codec: str = "mpeg4", **options) -> bytes:
    """A video of 64 x 48. Frame i has i's tens as the grey of its left half, its ones as that of the right half."""
    with tempfile.NamedTemporaryFile() as file:
        with av.open(file.name, "w", format=kind, options=options) as container:
            stream = container.add_stream(codec, rate=rate)
            stream.width, stream.height = 64, 48
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            stream.bit_rate = 4_000_000
            stream.codec_context.gop_size = 12
            for i in range(frames):
                picture = np.full((48, 64, 3), 20 + STEP * (i // 10), np.uint8)
                picture[:, 32:] = 20 + STEP * (i % 10)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        return open(file.name, "rb").read()


def video_sample(data: bytes, text: str = "<video>\nWhat happens?", **fields):
    raw = raw_sample([("human", text), ("gpt", "It brightens.")], {"v.mp4": data}, **fields)
    raw.data["video"] = raw.data.pop("image")[0]
    return raw


def shown(tiles: np.ndarray) -> list[int]:
    """The frame that each tile shows, (n, 3, height, width)."""

    def digit(pixels: np.ndarray) -> int:
        return round((float(pixels.mean()) - 20) / STEP)

    return [10 * digit(tile[:, :, :20]) + digit(tile[:, :, -20:]) for tile in tiles]


QUARTERS = "RG/BW"  # as stored: red and green above blue and white


def quartered() -> bytes:
    """A video of 64 x 48 of four colours."""
    colours = {"R": (255, 0, 0), "G": (0, 255, 0), "B": (0, 0, 255), "W": (255, 255, 255)}
    above, below = (np.repeat([[colours[c] for c in row]], 32, axis=1) for row in QUARTERS.split("/"))
    picture = np.concatenate([np.repeat(row, 24, axis=0) for row in (above, below)]).astype(np.uint8)
    with tempfile.NamedTemporaryFile() as file:
        with av.open(file.name, "w", format="mp4") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 48, "yuv420p", 4_000_000
            for _ in range(10):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        return open(file.name, "rb").read()


def turned(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """An MP4 with this display matrix."""
    place = data.index(b"tkhd") + 8 + 20 + 8 + 8  # version 0: times, id, duration; reserved; layer to volume
    a, b, c, d = (n << 16 for n in matrix)
    return data[:place] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[place + 36 :]
