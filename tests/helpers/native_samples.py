"""Samples with pictures and videos of many sizes, tiny models of native resolution, and their own inputs."""

from __future__ import annotations

import numpy as np
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from internvl_pack.batch.collate import packed_collate_fn, padded_collate_fn
from internvl_pack.batch.loss_weights import IGNORE_INDEX
from internvl_pack.batch.row import PackRow, Segment
from internvl_pack.checkpoints.encoding import encode_config
from internvl_pack.encode.families import make_family
from internvl_pack.encode.families.base import FAMILIES
from internvl_pack.model import parity
from internvl_pack.model.packed import PackedModel
from internvl_pack.testing.tiny import WORDS, tiny_native, tiny_tokenizer

CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
STATISTICS = {"qwen2_5_vl": CLIP, "glm4v": CLIP}
HALVES = ([0.5] * 3, [0.5] * 3)
RATE = 1.7  # frames a second of videos: at two a second all frames are taken

# ("video", (frames, rows, columns)) beside what parity.PLANS has.
PLANS: dict[str, parity.Plan] = parity.PLANS | {
    "a video": [("text", 3), ("video", (4, 2, 3)), ("text", 5), ("answer", 8)],
    "a video after an image": [("image", (2, 3)), ("text", 2), ("video", (3, 3, 2)), ("text", 4), ("answer", 6)],
}


def native_tokenizer(family="qwen3_vl"):
    return tiny_tokenizer([" ".join(WORDS)] * 3, 400, family)


def checkpoint(family):
    """What of a checkpoint's config.json decides on how its pictures are encoded."""
    vision = {"patch_size": side_of(family) // 2, "spatial_merge_size": 2}
    return {
        "model_type": family,
        "vision_config": vision | ({"tokens_per_second": 4} if family == "qwen2_5_vl" else {}),
    }


def pictures_of(family, tokenizer, **options):
    """The family's half for readers."""
    return make_family(encode_config(options, checkpoint(family)), tokenizer)


def tokens_of(tokenizer) -> list[int]:
    """Of a picture: before, in and after it."""
    glm = "<|image|>" in tokenizer.get_vocab()
    names = (
        ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>"]
        if glm
        else ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    )
    return tokenizer.convert_tokens_to_ids(names)


def side_of(family: str) -> int:
    return 28 if family in STATISTICS else 32


def segment(tokenizer, family, plan, seed=0, name=None) -> Segment:
    start, image, end = tokens_of(tokenizer)
    layout = {"image_token_id": image, "side": side_of(family), "around": ([start], [end])}
    if all(kind != "video" for kind, _ in plan):
        return parity.make_segment(plan, seed=seed, name=name, **layout)
    parts = [
        video(tokenizer, family, what, seed) if kind == "video" else parity.make_segment([(kind, what)], **layout)
        for kind, what in plan
    ]
    labels = np.concatenate([part.labels for part in parts])
    return Segment(
        sample_id=name or f"synthetic/{seed}",
        fragment=(0, 1),
        input_ids=np.concatenate([part.input_ids for part in parts]),
        labels=labels,
        tiles=np.concatenate([part.tiles for part in parts]),
        tiles_per_image=sum((part.tiles_per_image for part in parts), ()),
        num_loss_tokens=int((labels[1:] != IGNORE_INDEX).sum()),
        image_grids=sum((part.image_grids for part in parts), ()),
        second_tiles=np.concatenate([part.second_tiles for part in parts if part.second_tiles is not None]),
    )


def video(tokenizer, family, what, seed) -> Segment:
    """A video of random frames."""
    rng = np.random.default_rng(seed)
    (frames, rows, columns), side = what, side_of(family)
    rules = pictures_of(family, tokenizer)
    grid = rules.plan_video((columns * side, rows * side), frames, RATE)
    assert (grid.rows, grid.columns) == (rows, columns)
    ids = rules.block(grid)
    counts, grids = zip(*grid.pictures, strict=True)
    tiles, second = (rng.integers(0, 256, (grid.num_tiles, 3, side, side), dtype=np.uint8) for _ in range(2))
    return Segment("", (0, 1), ids, np.full_like(ids, IGNORE_INDEX), tiles, counts, 0, (), grids, second)


def segments_of(tokenizer, family, plans=PLANS) -> list[Segment]:
    numbered = list(enumerate(plans.items()))
    if family == "glm4v":  # whose own forward takes images or videos, since both have the same tokens
        numbered = [(seed, (name, plan)) for seed, (name, plan) in numbered if {"image", "video"} - dict(plan).keys()]
    return [segment(tokenizer, family, plan, seed, name) for seed, (name, plan) in numbered]


def collated(tokenizer, family, segments, collate=packed_collate_fn, **options):
    rows = [PackRow([s]) for s in segments] if collate is padded_collate_fn else [PackRow(list(segments))]
    image = pictures_of(family, tokenizer).picture_token_ids
    return collate(rows, image_size=side_of(family), image_token_id=image, grid_positions=True, **options)


def tiny_packed(tokenizer, family, **settings) -> PackedModel:
    """A tiny model in which no weight is at a special value."""
    assert family in FAMILIES
    return parity.pack_on_cpu(parity.perturbed(tiny_native(tokenizer, family, **settings)))


def processor(family, tokenizer):
    """The family's own preparation of pictures and frames that have their size already."""
    mean, std = STATISTICS.get(family, HALVES)
    patch = side_of(family) // 2
    of_images = Qwen2VLImageProcessorPil(patch_size=patch, image_mean=mean, image_std=std, do_resize=False)

    def process(segment: Segment):
        images, videos = pictures(segment)
        inputs = {}
        if images:
            inputs |= of_images(images, input_data_format="channels_last", return_tensors="pt")
        if not videos:
            return inputs
        made, grids = [], []
        for frames in videos:
            scaled = (torch.from_numpy(frames) / 255 - torch.tensor(mean)) / torch.tensor(std)
            patches, *grid = Qwen3VLVideoProcessor.patchify(None, scaled.permute(0, 3, 1, 2)[None], patch, 2, 2)
            made.append(patches[0])
            grids.append(grid)
        inputs |= {"pixel_values_videos": torch.cat(made), "video_grid_thw": torch.tensor(grids)}
        inputs["mm_token_type_ids"] = kinds_of(segment, family, tokenizer)
        return inputs | {"second_per_grid_ts": torch.tensor([2 / RATE] * len(videos))}  # taken by Qwen2.5-VL

    return process


def kinds_of(segment: Segment, family, tokenizer) -> torch.Tensor:
    """Of each token 1 if it is of an image, 2 of a video, else 0."""
    ids = torch.from_numpy(segment.input_ids)[None]
    image, other = pictures_of(family, tokenizer).picture_token_ids
    if family == "glm4v":
        start, end = tokenizer.convert_tokens_to_ids(["<|begin_of_video|>", "<|end_of_video|>"])
        return (ids == image).int() * (1 + ((ids == start).cumsum(1) > (ids == end).cumsum(1)))
    return (ids == image).int() + 2 * (ids == other).int()


def pictures(segment: Segment) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What a segment's tiles are of: pictures (height, width, 3), and the frames (2t, height, width, 3) of videos.

    Neighbours among the pairs of frames are of one video.
    """
    images, videos, done, paired = [], [], 0, 0
    last = ()
    for rows, columns, *times in segment.image_grids:
        size, frames = rows * columns, []
        for _ in times or [None]:
            frames.append(parity.picture(segment.tiles[done : done + size], rows))
            done += size
            if times:
                frames.append(parity.picture(segment.second_tiles[paired : paired + size], rows))
                paired += size
        if not times:
            images.append(frames[0])
        elif last:
            videos[-1] = np.concatenate([videos[-1], frames])
        else:
            videos.append(np.stack(frames))
        last = times
    return images, videos
