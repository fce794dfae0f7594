"""`video` records: which frames are taken, and their pixels.

    container's header -> number of frames and their rate -> n intervals (by sample id)     planning, no frame decoded
    interval k of n -> one frame (by sample id, epoch and k) -> one tile                     decoding

As InternVL samples: n is drawn from `min_num_frame` to `max_num_frame`, the video (or its `clip`) is cut into n equal
intervals, and one random frame is taken of each. n must not change with the epoch, since lengths are planned once; the
frames within their intervals do. A video with fewer frames than n gives all of them, each once.

Of a family of native resolution a video is one picture of pairs of frames, the same in every epoch: their number
decides on their size, and their times are written beside them (families/native.py).

Needs PyAV (`pip install internvl-pack[video]`). ffmpeg opens no file and no address by itself: it reads from the
reference that it is handed, and only as one of the formats below.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, cast

import numpy as np

from ..errors import RemoteDataError, SampleError, UserError
from .augment import draw
from .conversation import IMAGE_ROLES
from .images import cut_tiles
from .tiles import ONE_TILE, TileGrid, VideoGrid

if TYPE_CHECKING:
    from av import VideoFrame, VideoStream
    from av.container import InputContainer
    from av.sidedata.sidedata import SideDataContainer

    from ..sources import ImageRef

# Containers that hold their own data. Playlists and scripts, which name other files, are not among them.
FORMATS = "mov,mp4,matroska,webm,avi,flv,mpegts,mpeg,asf,ogg,gif,m4v,h264,hevc"
# A frame that lies further ahead is sought by key frame, a nearer one decoded up to.
SEEK_SECONDS = 2.0

_PLACEHOLDER = "<video>"


@dataclass(frozen=True, slots=True)
class Clip:
    """The part of a video that counts. `first`: its first frame; `frames`: how many; rate in frames a second.

    `start` is the time of the video's frame 0 in its container, in seconds; `slack`: seconds by which the count of
    frames may be wrong at the end, where the container gives a duration only.
    """

    first: int
    frames: int
    rate: float
    start: float = 0.0
    slack: float = 0.0

    def time_of(self, frame: int) -> float:
        """A moment, in the container's time, at which frame `frame` of the video is shown."""
        return self.start + (frame + 0.5) / self.rate


@dataclass(frozen=True, slots=True)
class PlannedFrame:
    """One of the n frames of a video, one tile. Which frame it is depends on the epoch, see `frame_index`."""

    ref: ImageRef
    clip: Clip
    number: int
    count: int

    @property
    def grid(self) -> TileGrid:
        return ONE_TILE

    def frame_index(self, sample_id: str, epoch: int) -> int:
        """The frame of the video that is shown in this epoch: one of interval `number` of `count` equal ones."""
        first, stop = interval(self.clip.frames, self.number, self.count)
        return self.clip.first + first + draw(stop - first, sample_id, epoch, self.number)


@dataclass(frozen=True, slots=True)
class PlannedVideo:
    """A video as one picture of pairs of frames."""

    ref: ImageRef
    clip: Clip
    grid: VideoGrid


def interval(frames: int, number: int, count: int) -> tuple[int, int]:
    """[first, stop) of interval `number` of `count` equal ones over `frames` frames; never empty if count <= frames."""
    return frames * number // count, frames * (number + 1) // count


def number_of_frames(clip: Clip, sample_id: str, min_frames: int, max_frames: int) -> int:
    """n: drawn from min to max by sample id alone; not more than there are frames."""
    return min(clip.frames, min_frames + draw(max_frames - min_frames + 1, sample_id))


# --- the record


def video_of(data: Mapping) -> tuple[str, tuple[float, float] | None] | None:
    """(name, clip in seconds or None) of a record; None where it has no video.

    Raises:
        SampleError: `video_field`, `video_clip`.
    """
    name = data.get("video")
    if name in (None, "", []):
        return None
    if isinstance(name, list) and len(name) == 1:
        name = name[0]
    if not isinstance(name, str) or not name:
        raise SampleError("video_field", "field 'video' is not a string; one video a sample is read")
    if data.get("image"):
        raise SampleError("video_field", "fields 'image' and 'video' are both filled; give one of them")
    clip = data.get("clip")
    if clip is None or clip == []:
        return name, None
    numbers = clip if isinstance(clip, list) and len(clip) == 2 else ()
    good = [float(n) for n in numbers if type(n) in (int, float) and abs(n) <= sys.float_info.max and math.isfinite(n)]
    if len(good) != 2 or not 0 <= good[0] < good[1]:
        raise SampleError("video_clip", f"field 'clip' is {str(clip)[:60]}, not [start, end] in seconds, start < end")
    return name, (good[0], good[1])


def frame_lines(num_frames: int) -> str:
    """InternVL's text of a video: `Frame-k: <image>` lines."""
    return "".join(f"Frame-{k}: <image>\n" for k in range(1, num_frames + 1))


def with_video(turns: Sequence[tuple[str, str]], shown: str) -> list[tuple[str, str]]:
    """The turns with `shown` in place of `<video>`, or in front of the first human turn, there on lines of its own.

    Args:
        shown: a text with `<image>` for each picture. If it is lines, the line break after `<video>` is its last one's.

    Raises:
        SampleError: `placeholder_mismatch`.
    """
    is_lines = shown.endswith("\n")
    found = sum(text.count(_PLACEHOLDER) for role, text in turns if role in IMAGE_ROLES)
    if found > 1:
        raise SampleError("placeholder_mismatch", f"{found} placeholders <video> in human turns for 1 video")
    places = (
        at for at, (role, text) in enumerate(turns) if role in IMAGE_ROLES and (not found or _PLACEHOLDER in text)
    )
    place = next(places, None)
    if place is None:
        raise SampleError("placeholder_mismatch", "1 video, but no human turn to hold it")
    role, text = turns[place]
    if found:
        before, after = text.split(_PLACEHOLDER)
        text = before + shown + (after.removeprefix("\n") if is_lines else after)
    else:
        text = shown + "\n" * (not is_lines) + text
    return [*turns[:place], (role, text), *turns[place + 1 :]]


# --- the container


def plan_clip(ref: ImageRef, clip: tuple[float, float] | None, max_pixels: int) -> Clip:
    """What a video's container says, cut to `clip` (start, end in seconds).

    Args:
        max_pixels: width x height above which the video is refused.

    Raises:
        SampleError: `video_missing`, `video_empty`, `video_not_a_video`, `video_corrupt`, `video_too_large`,
            `video_clip`.
        UserError: PyAV is not installed.
    """
    with _container(ref) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        if width < 1 or height < 1:
            raise SampleError("video_corrupt", f"{ref.name} says its frames are {width} x {height} pixels")
        if width * height > max_pixels:
            detail = f"{ref.name} has frames of {width} x {height} pixels, more than max_image_pixels={max_pixels}"
            raise SampleError("video_too_large", detail)
        duration = _duration(container, stream)
        frames, exact = stream.frames, stream.frames > 0
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        if not exact and duration and rate:
            frames = round(duration * rate)
        if frames < 1:  # no count and no duration in the header: walk the packets, without decoding
            frames, exact = sum(1 for packet in container.demux(stream) if packet.size), True
        if frames < 1:
            raise SampleError("video_corrupt", f"{ref.name} holds no frame")
        if exact and duration:
            rate = frames / duration
        rate = rate or 25.0
        start = 0.0
        if stream.start_time is not None and stream.time_base is not None:
            start = float(stream.start_time * stream.time_base)
    first = 0
    if clip is not None:
        first = int(min(clip[0] * rate, frames))  # as floats: a clip may end at 1e308
        if first >= frames:
            raise SampleError("video_clip", f"{ref.name} lasts {frames / rate:.2f} s, the clip starts at {clip[0]:g} s")
        frames = max(1, int(min(frames - first, (clip[1] - clip[0]) * rate)))
    slack = 0.0 if exact else max(2 / rate, 0.02 * (duration or 0))
    return Clip(first, frames, rate, start, slack)


def decode_video(
    pictures: Sequence[PlannedFrame] | Sequence[PlannedVideo],
    sample_id: str,
    epoch: int,
    tiles: Sequence[np.ndarray] | None,
    max_pixels: int,
) -> None:
    """The pictures of one video, upright.

    Args:
        tiles: to write into, (num_tiles, 3, size, size) uint8: one array, of pairs one for the first frames and one for
            the second; None only checks the frames.

    Raises:
        SampleError: `video_truncated`, `video_corrupt`, and as `plan_clip`.
    """
    ref, clip, grid = pictures[0].ref, pictures[0].clip, ONE_TILE
    if isinstance(pictures[0], PlannedVideo):
        video = pictures[0].grid
        grid = TileGrid(video.columns, video.rows)
        indices = [clip.first + frame for frame in video.frames]
    else:
        indices = [frame.frame_index(sample_id, epoch) for frame in pictures if isinstance(frame, PlannedFrame)]
    size = grid.num_tiles
    with _container(ref) as (container, stream):
        stream.codec_context.thread_count = 1  # workers are processes, a core each
        shown = _frames_at(container, stream, [clip.time_of(i) for i in indices], clip)
        for number, (index, frame) in enumerate(zip(indices, shown, strict=False)):
            if frame is None:
                raise SampleError("video_truncated", f"{ref.name} ends before frame {index}, which its header promises")
            if frame.is_corrupt:
                raise SampleError("video_corrupt", f"{ref.name}: frame {index} is damaged")
            if frame.width * frame.height > max_pixels:
                raise SampleError("video_too_large", f"{ref.name}: frame {index} is {frame.width} x {frame.height}")
            if tiles is not None:
                place, half = divmod(number, len(tiles))
                cut_tiles(_pixels(frame), grid, tiles[half][place * size : (place + 1) * size])


def upright_size(ref: ImageRef) -> tuple[int, int]:
    """(width, height) of a video's frames as they are shown, from its first one: PyAV tells a turn of frames only.

    Raises:
        SampleError: as `decode_video`.
    """
    with _container(ref) as (container, stream):
        stream.codec_context.thread_count = 1
        frame = next(container.decode(stream), None)
        if frame is None:
            raise SampleError("video_corrupt", f"{ref.name} holds no frame")
        matrix = _display_matrix(frame)
        if matrix is not None and abs(matrix[0]) < abs(matrix[1]):
            return frame.height, frame.width
        return frame.width, frame.height


def _frames_at(
    container: InputContainer, stream: VideoStream, moments: Sequence[float], clip: Clip
) -> Iterator[VideoFrame | None]:
    """The frame that is shown at each of rising moments (container's time); None beyond the end."""
    frames = _timed(container, stream, clip)
    current: tuple[float, float, VideoFrame] | None = None
    following = next(frames, None)
    for moment in moments:
        if following is not None and moment - following[0] > SEEK_SECONDS:
            assert stream.time_base is not None, "a stream of a container that was read"
            container.seek(max(0, int(moment / stream.time_base)), stream=stream, backward=True)
            frames = _timed(container, stream, clip)
            current, following = None, next(frames, None)
            if following is None or following[0] > moment:  # a broken index: from the start, then
                container.seek(0, stream=stream, backward=True)
                frames = _timed(container, stream, clip)
                following = next(frames, None)
        while following is not None and following[0] <= moment:
            current, following = following, next(frames, None)
        if current is None:
            current = following  # before the first frame
        if current is None or (following is None and moment > current[0] + current[1] + clip.slack):
            yield None
            return
        yield current[2]


def _timed(container: InputContainer, stream: VideoStream, clip: Clip) -> Iterator[tuple[float, float, VideoFrame]]:
    """(time, duration, frame) of the decoded frames; where the container gives none, by the rate."""
    step = 1.5 / clip.rate
    time = clip.start - 1 / clip.rate
    for frame in container.decode(stream):
        unit = frame.time_base
        time = float(frame.pts * unit) if frame.pts is not None and unit else time + 1 / clip.rate
        lasts = float(frame.duration * unit) if frame.duration and unit else 0.0
        yield time, max(lasts, step), frame


def _pixels(frame: VideoFrame) -> np.ndarray:
    """(height, width, 3) uint8, turned and mirrored as the display matrix says: telephones store portraits sideways.

    The matrix takes (x, y) of the stored picture to (a x + c y, b x + d y) of the shown one. Of an angle that is not a
    right one the nearest right one counts.
    """
    pixels, matrix = frame.to_ndarray(format="rgb24"), _display_matrix(frame)
    if matrix is not None:
        a, b, c, d = matrix
        if abs(a) < abs(b):  # axes change places
            pixels, a, d = pixels.swapaxes(0, 1), c, b
        pixels = pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
    return np.ascontiguousarray(pixels)


def _display_matrix(frame: VideoFrame) -> tuple[int, int, int, int] | None:
    """(a, b, c, d) of a decoded frame; None where the container gives none, or one of zeros."""
    for data in cast("SideDataContainer", frame.side_data):  # PyAV 18 declares it as the names of one kind
        if data.type.name == "DISPLAYMATRIX" and len(bytes(data)) >= 36:
            a, b, _, c, d = struct.unpack("=5i", bytes(data)[:20])
            return (a, b, c, d) if (a or b) and (c or d) else None
    return None


def _duration(container: InputContainer, stream: VideoStream) -> float:
    """Seconds; 0 where unknown."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return float(Fraction(container.duration, 1_000_000)) if container.duration else 0.0


@contextmanager
def _container(ref: ImageRef) -> Iterator[tuple[InputContainer, VideoStream]]:
    """(container, its first picture stream); everything that goes wrong inside is a SampleError by the video's name."""
    try:
        import av
    except ImportError:
        raise UserError(
            f"{ref.name}: 'video' records need PyAV: pip install internvl-pack[video], or leave them out of the data"
        ) from None
    try:
        with ref.open() as file:
            try:
                container = av.open(file, "r", options={"format_whitelist": FORMATS, "err_detect": "explode"})
            except (av.FFmpegError, ValueError) as error:
                reason = "video_truncated" if isinstance(error, av.error.EOFError) else "video_not_a_video"
                raise SampleError(reason, f"{ref.name} cannot be opened as a video: {_words(error)}") from None
            with container:
                pictures = [s for s in container.streams.video if s.codec_context is not None]
                if not pictures:
                    raise SampleError("video_not_a_video", f"{ref.name} holds no pictures that can be decoded")
                pictures[0].codec_context.options = {"err_detect": "explode"}
                yield container, pictures[0]
    except SampleError as error:
        if not error.reason.startswith("image_"):
            raise
        raise SampleError("video_" + error.reason.removeprefix("image_"), error.detail) from None
    except (UserError, RemoteDataError, AssertionError):
        raise
    except MemoryError:
        raise SampleError("video_too_large", f"{ref.name}: no memory for its frames") from None
    except Exception as error:  # codecs raise whatever ffmpeg reports; one video must not end a worker
        raise SampleError("video_corrupt", f"{ref.name}: {_words(error)}") from None


def _words(error: Exception) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())
