"""Samples with pictures of many sizes, tiny models of native resolution, and their own forward as the reference."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from internvl_pack.batch.collate import packed_collate_fn, padded_collate_fn
from internvl_pack.batch.row import PackRow, Segment
from internvl_pack.encode.families.base import FAMILIES
from internvl_pack.model.attention import register_packed_attention
from internvl_pack.model.packed import PackedModel
from internvl_pack.testing.tiny import WORDS, tiny_native, tiny_tokenizer

IGNORE = -100
CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
STATISTICS = {"qwen2_5_vl": CLIP, "glm4v": CLIP}
HALVES = ([0.5] * 3, [0.5] * 3)

# ("text" | "answer", tokens) and ("image", (rows, columns) of tokens)
PLANS = {
    "two images": [("text", 5), ("image", (2, 3)), ("text", 3), ("image", (4, 2)), ("text", 4), ("answer", 9)],
    "text only, two turns": [("text", 8), ("answer", 6), ("text", 5), ("answer", 11)],
    "image first": [("image", (5, 6)), ("text", 3), ("answer", 7)],
    "shortest": [("text", 1), ("answer", 1)],
    "one token": [("text", 2), ("image", (1, 1)), ("text", 6), ("answer", 4)],
    "side by side": [("text", 2), ("image", (1, 7)), ("image", (9, 1)), ("answer", 5)],
}


def native_tokenizer(family="qwen3_vl"):
    return tiny_tokenizer([" ".join(WORDS)] * 3, 400, family)


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
    rng = np.random.default_rng(seed)
    start, image, end = tokens_of(tokenizer)
    ids, labels, grids = [], [], []
    for kind, what in plan:
        if kind == "image":
            rows, columns = what
            new = [start, *[image] * (rows * columns), end]
            grids.append(what)
        else:
            new = rng.integers(0, 256, what).tolist()
        ids += new
        labels += new if kind == "answer" else [IGNORE] * len(new)
    counts = tuple(rows * columns for rows, columns in grids)
    side = side_of(family)
    return Segment(
        sample_id=name or f"synthetic/{seed}",
        fragment=(0, 1),
        input_ids=np.array(ids, dtype=np.int32),
        labels=np.array(labels, dtype=np.int32),
        tiles=rng.integers(0, 256, (sum(counts), 3, side, side), dtype=np.uint8),
        tiles_per_image=counts,
        num_loss_tokens=sum(label != IGNORE for label in labels[1:]),
        image_columns=tuple(columns for _, columns in grids),
    )


def segments_of(tokenizer, family, plans=PLANS) -> list[Segment]:
    return [segment(tokenizer, family, plan, seed, name) for seed, (name, plan) in enumerate(plans.items())]


def collated(tokenizer, family, segments, collate=packed_collate_fn, **options):
    rows = [PackRow([s]) for s in segments] if collate is padded_collate_fn else [PackRow(list(segments))]
    image = tokens_of(tokenizer)[1]
    return collate(rows, image_size=side_of(family), image_token_id=image, grid_positions=True, **options)


def tiny_packed(tokenizer, family, **settings) -> PackedModel:
    """A tiny model in which no weight is at a special value."""
    assert family in FAMILIES
    model = tiny_native(tokenizer, family, **settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.set_attn_implementation({"text_config": register_packed_attention("sdpa", "cpu", torch.float32)})
    return PackedModel(model).train()


def plain_twin(packed: PackedModel):
    """The same weights in transformers' own model with its own attention."""
    twin = copy.deepcopy(packed.model)
    twin.set_attn_implementation({"text_config": "sdpa", "vision_config": "sdpa", "": "sdpa"})
    twin.model.visual.config._attn_implementation = "sdpa"
    return twin.train()


def pictures(segment: Segment) -> list[np.ndarray]:
    """The pictures that a segment's tiles are of, (height, width, 3) uint8."""
    found, done = [], 0
    for rows, columns in segment.image_grids:
        tiles = segment.tiles[done : done + rows * columns].reshape(rows, columns, *segment.tiles.shape[1:])
        found.append(tiles.transpose(0, 3, 1, 4, 2).reshape(rows * tiles.shape[3], columns * tiles.shape[4], 3))
        done += rows * columns
    return found


def own_inputs(family, segment: Segment, image_token_id: int):
    """What the family's processor gives the model for one sample."""
    ids = torch.from_numpy(segment.input_ids).long()[None]
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == image_token_id).int()}
    if segment.tiles_per_image:
        mean, std = STATISTICS.get(family, HALVES)
        processor = Qwen2VLImageProcessorPil(
            patch_size=side_of(family) // 2, image_mean=mean, image_std=std, do_resize=False
        )
        made = processor(pictures(segment), input_data_format="channels_last", return_tensors="pt")
        inputs |= {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
    return inputs


def reference_loss(plain, family, segments):
    """Mean cross-entropy of all targets by transformers' own model and inputs, a sample at a time."""
    total, count = torch.zeros(()), 0
    for s in segments:
        logits = plain(**own_inputs(family, s, plain.config.image_token_id), use_cache=False).logits[0]
        targets = torch.from_numpy(s.labels).long()[1:]
        total = total + F.cross_entropy(logits[:-1], targets, ignore_index=IGNORE, reduction="sum")
        count += int((targets != IGNORE).sum())
    return total / count
