"""Samples with pictures of many sizes, tiny models of native resolution, and their own forward as the reference."""

from __future__ import annotations

from functools import partial

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from internvl_pack.batch.collate import packed_collate_fn, padded_collate_fn
from internvl_pack.batch.row import PackRow, Segment
from internvl_pack.encode.families.base import FAMILIES
from internvl_pack.model import parity
from internvl_pack.model.packed import PackedModel
from internvl_pack.testing.tiny import WORDS, tiny_native, tiny_tokenizer

CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
STATISTICS = {"qwen2_5_vl": CLIP, "glm4v": CLIP}
HALVES = ([0.5] * 3, [0.5] * 3)


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
    start, image, end = tokens_of(tokenizer)
    layout = {"image_token_id": image, "side": side_of(family), "around": ([start], [end])}
    return parity.make_segment(plan, seed=seed, name=name, **layout)


def segments_of(tokenizer, family, plans=parity.PLANS) -> list[Segment]:
    return [segment(tokenizer, family, plan, seed, name) for seed, (name, plan) in enumerate(plans.items())]


def collated(tokenizer, family, segments, collate=packed_collate_fn, **options):
    rows = [PackRow([s]) for s in segments] if collate is padded_collate_fn else [PackRow(list(segments))]
    image = tokens_of(tokenizer)[1]
    return collate(rows, image_size=side_of(family), image_token_id=image, grid_positions=True, **options)


def tiny_packed(tokenizer, family, **settings) -> PackedModel:
    """A tiny model in which no weight is at a special value."""
    assert family in FAMILIES
    return parity.pack_on_cpu(parity.perturbed(tiny_native(tokenizer, family, **settings)))


def processor(family):
    """The family's own preparation of pictures that have their size already."""
    mean, std = STATISTICS.get(family, HALVES)
    made = Qwen2VLImageProcessorPil(patch_size=side_of(family) // 2, image_mean=mean, image_std=std, do_resize=False)
    return partial(made, input_data_format="channels_last", return_tensors="pt")
