"""Videos: which frames are taken, that planning and decoding agree, and that a broken one costs one sample."""

from __future__ import annotations

import io
import json
import random
import sys
import tarfile
import tempfile
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers.clips import STEP, clip, quartered, shown, turned, video_sample
from helpers.encode_samples import SPEC, BytesRef, assert_branches_are_the_answers, jpeg, raw_sample
from helpers.factory import TINY, write_meta

from internvl_pack import EncodeConfig, Encoder, PackedDataset, PackingConfig, SampleError, UserError, build_loader
from internvl_pack.encode.video import Clip, PlannedFrame, interval, number_of_frames, plan_clip
from internvl_pack.samples import Samples
from internvl_pack.sources import FileRef, load_meta
from internvl_pack.survey.validate import Checker, validate

av = pytest.importorskip("av")
LIMIT = 1 << 26


@pytest.fixture(scope="module")
def minute() -> bytes:
    """100 frames, 10 a second."""
    return clip(100)


@pytest.fixture(scope="module")
def encoder(tokenizer) -> Encoder:
    return Encoder(tokenizer, TINY)


def reason(call) -> str:
    with pytest.raises(SampleError) as error:
        call()
    return error.value.reason


# --- which frames


@pytest.mark.parametrize("frames, count", [(100, 8), (33, 32), (32, 32), (7, 3), (1, 1)])
def test_intervals_are_equal_and_cover_the_video(frames, count):
    cuts = [interval(frames, number, count) for number in range(count)]
    assert cuts[0][0] == 0 and cuts[-1][1] == frames
    assert all(stop == start for (_, stop), (start, _) in pairwise(cuts))
    assert {stop - start for start, stop in cuts} <= {frames // count, -(-frames // count)}


def test_the_number_of_frames_spreads_from_min_to_max_by_sample():
    numbers = [number_of_frames(Clip(0, 900, 30.0), f"set/{i}", 8, 32) for i in range(2000)]
    assert set(numbers) == set(range(8, 33))
    assert numbers == [number_of_frames(Clip(0, 900, 30.0), f"set/{i}", 8, 32) for i in range(2000)]
    assert {number_of_frames(Clip(0, 5, 30.0), f"set/{i}", 8, 32) for i in range(50)} == {5}


def test_every_frame_of_an_interval_has_its_turn():
    frame = PlannedFrame(None, Clip(10, 40, 10.0), 1, 8)
    assert {frame.frame_index("set/3", epoch) for epoch in range(200)} == set(range(15, 20))


def test_one_frame_of_each_interval_is_shown(encoder, minute):
    encoded = encoder.encode(video_sample(minute), SPEC)
    count = len(encoded.images)
    assert 8 <= count <= 32 and encoded.record.num_tiles == count
    epochs = [encoder.decode(encoded, epoch=epoch) for epoch in (0, 1, 0)]
    assert epochs[0].shape == (count, 3, 56, 56)
    for epoch, tiles in zip((0, 1), epochs, strict=False):
        expected = [image.frame_index("test/0", epoch) for image in encoded.images]
        assert shown(tiles) == expected
        assert all(first <= i < stop for k, i in enumerate(expected) for first, stop in [interval(100, k, count)])
    assert not np.array_equal(epochs[0], epochs[1]) and np.array_equal(epochs[0], epochs[2])


def test_a_fragment_shows_the_same_frames(encoder, minute):
    encoded = encoder.encode(video_sample(minute), SPEC)
    whole = encoder.decode(encoded, epoch=5)
    assert np.array_equal(encoder.decode(encoded, 3, 6, epoch=5), whole[3:6])


@pytest.mark.parametrize("kind, codec", [("mp4", "mpeg4"), ("mp4", "libx264"), ("avi", "mpeg4"), ("matroska", "mpeg4"),
                                         ("mov", "mjpeg"), ("mpegts", "libx264"), ("flv", "flv1")])  # fmt: skip
def test_containers_and_codecs(encoder, kind, codec):
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    encoded = encoder.encode(video_sample(clip(50, kind=kind, codec=codec)), SPEC)
    plan = encoded.images[0].clip
    assert abs(plan.frames - 50) <= 1 and abs(plan.rate - 10) < 0.5
    expected = [image.frame_index("test/0", 0) for image in encoded.images]
    found = shown(encoder.decode(encoded))
    assert all(abs(a - b) <= 1 for a, b in zip(found, expected, strict=True)), (found, expected)


def test_a_long_video_is_sought_not_decoded_through(encoder):
    encoded = encoder.encode(video_sample(clip(100, rate=1)), SPEC)
    assert shown(encoder.decode(encoded)) == [image.frame_index("test/0", 0) for image in encoded.images]


def test_a_short_video_gives_all_of_its_frames(encoder):
    encoded = encoder.encode(video_sample(clip(5)), SPEC)
    assert shown(encoder.decode(encoded)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("window, first, last", [([2, 4], 20, 39), ([9.5, 60], 95, 99), ([0.0, 0.05], 0, 0)])
def test_a_clip_is_respected(encoder, minute, window, first, last):
    encoded = encoder.encode(video_sample(minute, clip=window), SPEC)
    for epoch in range(3):
        found = shown(encoder.decode(encoded, epoch=epoch))
        assert first <= found[0] and found[-1] <= last and found == sorted(set(found))


@pytest.mark.parametrize("window", [[0, 1e308], [0, 10**300], [4, 1.5e308]])
def test_a_clip_may_end_far_beyond_the_video(encoder, window):
    encoded = encoder.encode(video_sample(clip(60), clip=window), SPEC)
    assert encoded.images[0].clip.frames == 60 - 10 * window[0]


@pytest.mark.parametrize("window", [[6, 8], [5, 5.5], [1e300, 1e308], [0, 10**400], [0, True], ["0", "1"], [2, 1]])
def test_a_clip_that_is_none_is_refused(encoder, window):
    assert reason(lambda: encoder.encode(video_sample(clip(50), clip=window), SPEC)) == "video_clip"


# --- turned and mirrored


@pytest.mark.parametrize(
    "matrix, expected",
    [
        ((1, 0, 0, 1), "RG/BW"),
        ((0, 1, -1, 0), "BR/WG"),  # a quarter turn clockwise: a telephone held upright
        ((-1, 0, 0, -1), "WB/GR"),
        ((0, -1, 1, 0), "GW/RB"),
        ((-1, 0, 0, 1), "GR/WB"),  # mirrored: a front camera
        ((1, 0, 0, -1), "BW/RG"),
        ((0, 1, 1, 0), "RB/GW"),
        ((0, -1, -1, 0), "WG/BR"),
        ((0, 0, 0, 0), "RG/BW"),
    ],
)
def test_frames_stand_as_the_display_matrix_says(encoder, matrix, expected):
    encoded = encoder.encode(video_sample(turned(quartered(), matrix)), SPEC)
    assert encoded.record.num_tiles == len(encoded.images)
    names = {(1, 0, 0): "R", (0, 1, 0): "G", (0, 0, 1): "B", (1, 1, 1): "W"}
    for tile in encoder.decode(encoded):
        seen = [names[tuple((tile[:, y, x] > 128).astype(int))] for y in (14, 42) for x in (14, 42)]
        assert "{}{}/{}{}".format(*seen) == expected


# --- odd containers


def test_a_variable_frame_rate_is_sampled_by_time(encoder):
    """Thirty frames within a second, thirty at every half second: the frame that is shown at the moment is taken."""
    with tempfile.NamedTemporaryFile() as file:
        with av.open(file.name, "w", format="mp4") as container:
            stream = container.add_stream("mpeg4", rate=1000)
            stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 48, "yuv420p", 4_000_000
            stream.codec_context.time_base = Fraction(1, 1000)
            starts = [33 * i if i < 30 else 990 + 500 * (i - 30) for i in range(60)]
            for i, start in enumerate(starts):
                picture = np.full((48, 64, 3), 20 + STEP * (i // 10), np.uint8)
                picture[:, 32:] = 20 + STEP * (i % 10)
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                frame.pts, frame.time_base = start, Fraction(1, 1000)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        data = Path(file.name).read_bytes()
    encoded = encoder.encode(video_sample(data), SPEC)
    moments = [1000 * i.clip.time_of(i.frame_index("test/0", 0)) for i in encoded.images]
    assert shown(encoder.decode(encoded)) == [max(k for k in range(60) if starts[k] <= moment) for moment in moments]


def test_sound_alone_is_no_video(encoder):
    with tempfile.NamedTemporaryFile() as file:
        with av.open(file.name, "w", format="mp4") as container:
            stream = container.add_stream("aac", rate=8000, layout="mono")
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
            sound.sample_rate, sound.pts = 8000, 0
            container.mux(stream.encode(sound))
            container.mux(stream.encode())
        data = Path(file.name).read_bytes()
    assert reason(lambda: encoder.encode(video_sample(data), SPEC)) == "video_not_a_video"


@pytest.mark.parametrize("kind", ["mp4", "matroska", "avi"])
def test_a_video_of_no_frame_is_none(encoder, kind):
    assert reason(lambda: encoder.encode(video_sample(clip(0, kind=kind)), SPEC)) in {
        "video_not_a_video", "video_corrupt", "video_empty"
    }  # fmt: skip


def test_frames_are_counted_where_the_container_does_not_say(encoder):
    """A recording that was never closed: Matroska as it is streamed, with neither duration nor index."""
    encoded = encoder.encode(video_sample(clip(50, kind="matroska", live="1")), SPEC)
    assert encoded.images[0].clip.frames == 50
    assert shown(encoder.decode(encoded)) == [image.frame_index("test/0", 0) for image in encoded.images]


# --- text


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<video>\nWhat?", "Frame-1: <image>\nFrame-2: <image>\nWhat?"),
        ("What?", "Frame-1: <image>\nFrame-2: <image>\nWhat?"),
        ("Look. <video> What?", "Look. Frame-1: <image>\nFrame-2: <image>\n What?"),
    ],
)
def test_frames_are_lines_in_place_of_the_placeholder(encoder, tokenizer, text, expected):
    encoded = encoder.encode(video_sample(clip(2), text), SPEC)
    decoded = tokenizer.decode(encoded.input_ids)
    block = "<img>" + "<IMG_CONTEXT>" * TINY.tokens_per_tile + "</img>"
    assert f"user\n{expected.replace('<image>', block)}<|im_end|>" in decoded


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"text": "<video>\n<video>\nq"}, "placeholder_mismatch"),
        ({"text": "<video>\nand <image>?"}, "placeholder_mismatch"),
        ({"image": "a.png"}, "video_field"),
        ({"video": ["a.mp4", "b.mp4"]}, "video_field"),
        ({"video": 7}, "video_field"),
        ({"video": "gone.mp4"}, "image_missing"),  # of the test's resolver
        *(({"clip": c}, "video_clip") for c in ([3, 1], [1], "0-3", [None, 2], [-1, 2], [True, 2], [50, 60])),
    ],
    ids=str,
)
def test_records_that_cannot_be_read(encoder, minute, change, expected):
    raw = video_sample(minute, change.get("text", "q"))
    raw.data.update({k: v for k, v in change.items() if k != "text"})
    assert reason(lambda: encoder.encode(raw, SPEC)) == expected


def test_a_placeholder_without_a_video_is_a_mismatch(encoder):
    assert reason(lambda: encoder.encode(raw_sample([("human", "<video>\nq"), ("gpt", "a")]), SPEC)) == (
        "placeholder_mismatch"
    )
    encoder.encode(raw_sample([("human", "What does the tag <video> mean?"), ("gpt", "a")]), SPEC)


# --- broken videos


@pytest.mark.parametrize(
    "data, expected",
    [
        (b"", "video_empty"),
        (b"<html>404</html>", "video_not_a_video"),
        (jpeg(), "video_not_a_video"),
        (bytes(5000), "video_not_a_video"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/passwd\n", "video_not_a_video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "video_not_a_video"),
    ],
    ids=["empty", "page", "picture", "zeros", "playlist", "concat"],
)
def test_what_is_no_video(tmp_path, data, expected):
    path = tmp_path / "v.mp4"
    path.write_bytes(data)
    assert reason(lambda: plan_clip(FileRef(str(path)), None, LIMIT)) == expected


def test_a_missing_video_is_named(tmp_path):
    with pytest.raises(SampleError, match=r"video_missing.*gone\.mp4"):
        plan_clip(FileRef(str(tmp_path / "gone.mp4")), None, LIMIT)


def test_frames_beyond_the_limit_are_refused_from_the_header(minute):
    assert reason(lambda: plan_clip(BytesRef("v", minute), None, 64 * 48 - 1)) == "video_too_large"


def test_a_cut_video_is_found_at_decoding(encoder):
    whole = clip(100, movflags="faststart")
    encoded = encoder.encode(video_sample(whole[: len(whole) * 2 // 3]), SPEC)
    assert reason(lambda: encoder.decode(encoded)) in ("video_truncated", "video_corrupt")
    assert reason(lambda: encoder.check_pixels(encoded)) in ("video_truncated", "video_corrupt")


@pytest.mark.slow
@pytest.mark.parametrize("kind, codec", [("mp4", "mpeg4"), ("matroska", "libx264"), ("avi", "mjpeg")])
def test_random_damage_costs_one_sample_at_most(encoder, kind, codec):
    rng = random.Random(kind)
    data = clip(20, kind=kind, codec=codec)
    for _ in range(60):
        at = rng.randrange(len(data))
        hurt = data[:at] if rng.random() < 0.5 else data[:at] + rng.randbytes(40) + data[at + 40 :]
        try:
            encoded = encoder.encode(video_sample(hurt), SPEC)
            assert encoder.decode(encoded).shape[0] == encoded.record.num_tiles
        except SampleError as error:
            assert error.reason.startswith("video_")


def test_without_pyav_the_run_ends_with_the_cure(encoder, minute, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"pip install internvl-pack\[video\]"):
        encoder.encode(video_sample(minute), SPEC)


@pytest.mark.parametrize("options, named", [({"min_num_frame": 0}, "min_num_frame"), ({"max_num_frame": 4}, "exceeds")])
def test_impossible_options_are_named(options, named):
    with pytest.raises(UserError, match=named):
        EncodeConfig(**options)


def test_answers_about_a_video_share_its_frames(encoder, minute):
    answers = ["It brightens.", "It brightens, step by step.", "No."]
    raw = video_sample(minute)
    raw.data["conversations"].pop()
    tree = encoder.encode(replace(raw, data=raw.data | {"answers": answers}), SPEC)
    alone = []
    for answer in answers:
        one = video_sample(minute)
        one.data["conversations"][1]["value"] = answer
        alone.append(encoder.encode(one, SPEC))
    assert_branches_are_the_answers(tree, alone)
    assert tree.record.num_tiles > 1 and len(tree.input_ids) < sum(len(each.input_ids) for each in alone)
    np.testing.assert_array_equal(encoder.decode(tree), encoder.decode(alone[0]))


# --- from the meta file to the batch


@pytest.mark.parametrize("kind", ["files", "shard"])
def test_videos_are_packed_beside_images_and_broken_ones_leave(tmp_path, tokenizer, encoder, minute, kind):
    faststart = clip(100, movflags="faststart")
    files = {"v0.mp4": minute, "v1.mp4": b"<html>", "v2.mp4": faststart[: len(faststart) // 2], "v3.mp4": clip(9)}
    turns = [{"from": "human", "value": "<video>\nq"}, {"from": "gpt", "value": "a"}]
    records = [{"id": name, "video": name, "conversations": turns} for name in files]
    if kind == "files":
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, records)))
        spec = {"root": ".", "annotation": "rows.jsonl"}
    else:
        with tarfile.open(tmp_path / "s.tar", "w") as tar:
            for record in records:
                for name, data in ((record["id"][:2] + ".json", json.dumps(record).encode()),
                                   (record["id"], files[record["id"]])):  # fmt: skip
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        spec = {"shards": "s.tar"}
    meta = write_meta(tmp_path, {"set": spec})
    checker = Checker(Samples.from_specs(load_meta(meta), encoder), decode=True)
    bad = {sample.id: sample.reason for _, part in validate(checker) for sample in part}
    assert bad.keys() == {"v1.mp4", "v2.mp4"} and bad["v1.mp4"] == "video_not_a_video"
    config = PackingConfig(max_packed_tokens=1000)
    loader = build_loader(PackedDataset.from_meta(meta, tokenizer, config, encode=TINY))
    tiles = sum(batch["num_tiles"] for batch in loader)
    assert loader.ledger.samples_packed == 2 and loader.ledger.samples_quarantined == 2
    assert 17 <= tiles <= 41
    loader.ledger.check()
