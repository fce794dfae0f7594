"""Videos in families of native resolution: against transformers' processors, and from file to batch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import own_videos
from helpers.clips import clip, quartered, shown, turned, video_sample
from helpers.encode_samples import SPEC, BytesRef
from helpers.factory import write_meta
from helpers.native_samples import checkpoint, native_tokenizer, pictures_of, side_of
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
from transformers.utils import is_torchvision_available

from internvl_pack import Encoder, PackedDataset, PackingConfig, SampleError, build_loader
from internvl_pack.checkpoints.encoding import encode_config
from internvl_pack.encode.tiles import VideoGrid
from internvl_pack.encode.video import upright_size
from internvl_pack.model.packed import PackedModel

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "glm4v")
TEXT = "Look:<|vision_start|><|video_pad|><|vision_end|> What?"
GLM_TEXT = "Look:<|begin_of_video|><|video|><|end_of_video|> What?"


def encoder_of(family, **options):
    options = {"conv_style": "chat_template", "min_num_frame": 4} | options
    return Encoder(native_tokenizer(family), encode_config(options, checkpoint(family)))


# --- which frames, how large, which tokens


def cases(family, options):
    """Videos of up to 90 frames of up to 200 pixels, of one frame, and of a side less than a token's."""
    rng = random.Random(0)
    found = [(1, 25.0, (64, 64)), (2, 1.0, (20, 90)), (7, 2.0, (200, 3))]
    for _ in range(20):
        frames, fps = rng.randint(2, 90), rng.choice([1, 5, 12.5, 23.976, 29.97, 60])
        found.append((frames, fps, (rng.randint(20, 200), rng.randint(20, 200))))
    if family == "glm4v":  # whose processor has no bounds of their number
        return [case for case in found if 2 <= case[0] / case[1] * 2 < 1 + options["max_num_frame"]]
    return found


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """By family: of each case what was asked, what was planned, and what the saved processor makes of it."""
    if not (is_torchvision_available() or "INTERNVL_PACK_TORCHVISION" in os.environ):
        pytest.skip("transformers' processors of videos need torchvision; shell/test.sh names one")
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        options = {"min_num_frame": 1 if family == "glm4v" else 4, "max_num_frame": 40, "video_max_pixels": 300_000}
        tokenizer = native_tokenizer(family)
        tokenizer.save_pretrained(folder)
        pictures = pictures_of(family, tokenizer, **options)
        for name, content in pictures.processor_files(encode_config(options, checkpoint(family))).items():
            (folder / name).write_text(json.dumps(content))
        about = {"folder": str(folder), "text": GLM_TEXT if family == "glm4v" else TEXT}
        found[family] = []
        for frames, fps, size in cases(family, options):
            case = about | {"frames": frames, "fps": fps, "size": size}
            if frames == 1:  # they take no video of one
                case["sampled"] = [0, 0]
            found[family].append((case, pictures.plan_video(size, frames, fps)))
    command = [sys.executable, own_videos.__file__]
    asked = json.dumps([case for each in found.values() for case, _ in each])
    said = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
    answers = iter(json.loads(said.stdout.splitlines()[-1]))
    return {family: [(*one, next(answers)) for one in each] for family, each in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_frames_grids_and_ids_are_those_of_the_saved_processor(family, asked):
    tokenizer = native_tokenizer(family)
    pictures = pictures_of(family, tokenizer)
    before, after = (tokenizer(part)["input_ids"] for part in ("Look:", " What?"))
    for case, grid, found in asked[family]:
        assert [grid.num_pairs, grid.rows, grid.columns] == found["grid"], case
        assert list(grid.frames[: len(found["frames"])]) == found["frames"], case
        assert [*before, *pictures.block(grid).tolist(), *after] == found["ids"], case
        if family == "qwen2_5_vl":
            times = torch.arange(grid.num_pairs) * (4 * torch.tensor(found["seconds"]))
            assert list(grid.times) == times.long().tolist(), case


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_frames_share_the_pixels_of_their_video_on_200_sizes(family):
    pictures, side, rng = pictures_of(family, native_tokenizer(family)), side_of(family), random.Random(1)
    most, refused = pictures._video_max_pixels, 0
    for _ in range(200):
        frames, size = rng.randint(2, 200), (rng.randint(1, 2000), rng.randint(1, 2000))
        bounds = (pictures.VIDEO_MIN_PIXELS, most)
        if family == "qwen3_vl":
            share = max(min(768 * side**2, most // frames), int(pictures.VIDEO_MIN_PIXELS * 1.05))
            bounds = (pictures.VIDEO_MIN_PIXELS, share * frames)
        try:
            expected = smart_resize(frames, size[1], size[0], 2, side, *bounds)
        except ValueError:
            refused += 1
            with pytest.raises(SampleError, match="image_shape"):
                pictures._frame_grid(size, frames)
            continue
        grid = pictures._frame_grid(size, frames)
        assert (grid.rows * side, grid.columns * side) == expected, (frames, size)
    assert refused < 20


def test_a_video_of_an_odd_number_of_frames_shows_the_last_one_twice():
    pictures = pictures_of("qwen3_vl", native_tokenizer(), min_num_frame=3)
    grid = pictures.plan_video((64, 64), 3, 10.0)
    assert grid == VideoGrid(2, 2, (0, 1, 2, 2), ("<0.1 seconds>", "<0.2 seconds>"))
    assert grid.num_tiles == 8 and grid.pictures == ((4, (2, 2, 0)),) * 2


# --- from the file


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_of_frames_are_decoded_in_order_whatever_the_epoch(family):
    encoder = encoder_of(family)
    encoded = encoder.encode(video_sample(clip(31)), SPEC)
    grid = encoded.images[0].grid
    assert encoded.record.num_tiles == grid.num_tiles and encoded.has_pairs
    assert grid.num_pairs == len(grid.frames) // 2 >= 3
    tiles, second = (np.empty((grid.num_tiles, 3, side_of(family), side_of(family)), np.uint8) for _ in range(2))
    for epoch in (0, 1):
        encoder.decode(encoded, epoch=epoch, out=tiles, second=second)
        for found, frames in ((tiles, grid.frames[::2]), (second, grid.frames[1::2])):
            cells = found.reshape(grid.num_pairs, grid.rows, grid.columns, *found.shape[1:])
            pictures = cells.transpose(0, 3, 1, 4, 2, 5).reshape(grid.num_pairs, 3, grid.rows * found.shape[2], -1)
            assert shown(pictures) == list(frames)


def test_a_clip_counts_its_time_from_its_start():
    encoder = encoder_of("qwen3_vl")
    whole, part = (
        encoder.encode(video_sample(clip(100), **fields), SPEC).images[0] for fields in ({}, {"clip": [4, 6]})
    )
    assert part.clip.first == 40 and part.grid.frames[0] == 0 and part.grid.frames[-1] == 19
    assert part.grid.stamps[0] == "<0.3 seconds>" and whole.grid.stamps[-1] == "<9.7 seconds>"


def test_a_turned_video_is_planned_as_it_is_shown():
    for matrix, size in (((1, 0, 0, 1), (64, 48)), ((-1, 0, 0, -1), (64, 48)), ((0, 1, -1, 0), (48, 64))):
        assert upright_size(BytesRef("v.mp4", turned(quartered(), matrix))) == size, matrix


@pytest.mark.parametrize("text", ["<video>\nWhat?", "What?", "Look:<video> What?"])
def test_the_video_stands_in_place_of_its_placeholder(text):
    encoder, tokenizer = encoder_of("qwen3_vl"), native_tokenizer()
    encoded = encoder.encode(video_sample(clip(4), text), SPEC)
    block = tokenizer.decode(encoder.family.block(encoded.images[0].grid))
    expected = text.replace("<video>", block) if "<video>" in text else f"{block}\n{text}"
    assert f"user\n{expected}<|im_end|>" in tokenizer.decode(encoded.input_ids)


def test_answers_about_a_video_share_it():
    encoder = encoder_of("qwen2_5_vl")
    raw = video_sample(clip(20))
    raw.data["conversations"].pop()
    tree = encoder.encode(replace(raw, data=raw.data | {"answers": ["It brightens.", "No."]}), SPEC)
    assert len(tree.branches) == 2 and tree.record.num_tiles == tree.images[0].grid.num_tiles


def test_the_number_of_frames_and_the_bound_of_pixels_are_in_the_fingerprint():
    fingerprint = encoder_of("qwen2_5_vl", max_num_frame=6).fingerprint()
    names = ("min_num_frame", "max_num_frame", "video_max_pixels", "positions_per_second")
    assert [fingerprint[name] for name in names] == [4, 6, 6_422_528, 4]


def data(folder: Path, family: str):
    """A meta file of a picture, a text, two videos and a broken one, and a loader of its batches."""
    from PIL import Image

    answer = {"from": "gpt", "value": "one two three"}
    records = [{"id": "text", "conversations": [{"from": "human", "value": "four"}, answer]}]
    human = {"from": "human", "value": "<image>\nfour"}
    records.append({"id": "picture", "image": "a.png", "conversations": [human, answer]})
    Image.new("RGB", (70, 90), (9, 99, 199)).save(folder / "a.png")
    for name, content in {"v0.mp4": clip(20), "v1.mp4": clip(5), "v2.mp4": b"<html>"}.items():
        (folder / name).write_bytes(content)
        human = {"from": "human", "value": "<video>\nfour"}
        records.append({"id": name, "video": name, "conversations": [human, answer]})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, records)))
    meta = write_meta(folder, {"set": {"root": ".", "annotation": "rows.jsonl"}})
    encode = encode_config({"conv_style": "chat_template", "min_pixels": 1024}, checkpoint(family))
    config = PackingConfig(max_packed_tokens=1000, num_images_expected=1000)
    return build_loader(PackedDataset.from_meta(meta, native_tokenizer(family), config, encode=encode))


@pytest.mark.parametrize("family", FAMILIES)
def test_videos_are_packed_beside_pictures_and_trained(family, tmp_path):
    from helpers.native_samples import tiny_packed

    loader = data(tmp_path, family)
    (batch,) = loader
    assert loader.ledger.samples_packed == 4 and loader.ledger.samples_quarantined == 1
    assert [event["reason"] for event in loader.take_events()] == ["video_not_a_video"]
    pairs = [grid for grid in batch["image_grids"] if len(grid) > 2]
    assert len(batch["second_frames"]) == sum(r * c * len(times) for r, c, *times in pairs)
    assert batch["num_tiles"] == batch["num_image_tokens"] == len(batch["pixel_values"])
    model: PackedModel = tiny_packed(native_tokenizer(family), family)
    with torch.no_grad():
        loss = model(**batch).loss
        seen = model(**batch | {"second_frames": 255 - batch["second_frames"]}).loss
    assert loss.isfinite() and seen != loss
