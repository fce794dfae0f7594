"""Synthetic samples, tiny models and an independent reference for the tests of the model side."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F

from internvl_pack.batch.collate import packed_collate_fn, padded_collate_fn
from internvl_pack.batch.row import PackRow, Segment
from internvl_pack.model.attention import register_packed_attention
from internvl_pack.model.packed import PackedModel
from internvl_pack.testing.tiny import tiny_internvl

IGNORE = -100
SIZE = 56
TOKENS_PER_TILE = 4
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
ZERO = 1e-9  # of the whole gradient's norm: rounding of one that is zero, as a key bias's without rotary positions


def segment(tokenizer, plan, seed=0, sample_id=None):
    """A sample from a plan of ("text" | "answer", tokens) and ("image", tiles)."""
    rng = np.random.default_rng(seed)
    image_id = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    ids, labels, tiles_per_image = [], [], []
    for kind, count in plan:
        if kind == "image":
            ids += [image_id] * (count * TOKENS_PER_TILE)
            labels += [IGNORE] * (count * TOKENS_PER_TILE)
            tiles_per_image.append(count)
        else:
            words = rng.integers(0, 256, count).tolist()
            ids += words
            labels += words if kind == "answer" else [IGNORE] * count
    tiles = rng.integers(0, 256, (sum(tiles_per_image), 3, SIZE, SIZE), dtype=np.uint8)
    return Segment(
        sample_id=sample_id or f"synthetic/{seed}",
        fragment=(0, 1),
        input_ids=np.array(ids, dtype=np.int32),
        labels=np.array(labels, dtype=np.int32),
        tiles=tiles,
        tiles_per_image=tuple(tiles_per_image),
        num_loss_tokens=sum(label != IGNORE for label in labels[1:]),
    )


PLANS = {
    "several images": [("text", 5), ("image", 2), ("text", 3), ("image", 1), ("text", 4), ("answer", 9)],
    "text only, two turns": [("text", 8), ("answer", 6), ("text", 5), ("answer", 11)],
    "one-token answer": [("text", 7), ("answer", 1)],
    "one image": [("text", 2), ("image", 3), ("text", 6), ("answer", 4)],
    "shortest": [("text", 1), ("answer", 1)],
    "image first": [("image", 1), ("text", 3), ("answer", 17)],
    "answer first": [("answer", 5), ("text", 2), ("answer", 3)],
}


def mixed_segments(tokenizer):
    return [segment(tokenizer, plan, seed, name) for seed, (name, plan) in enumerate(PLANS.items())]


def text_segments(tokenizer):
    texts = [plan for plan in PLANS.values() if all(kind != "image" for kind, _ in plan)]
    return [segment(tokenizer, plan, seed) for seed, plan in enumerate(texts)]


def packed_batch(segments, **options):
    return packed_collate_fn([PackRow(list(segments))], image_size=SIZE, **options)


def padded_batch(segments, **options):
    return padded_collate_fn([PackRow([s]) for s in segments], image_size=SIZE, **options)


def tiny_packed(tokenizer, llm="qwen2", kernel="sdpa", **settings) -> PackedModel:
    """A tiny model in which no weight is at a special value, so that every gradient says something."""
    model = tiny_internvl(tokenizer, llm, **settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.set_attn_implementation({"text_config": register_packed_attention(kernel, "cpu", torch.float32)})
    return PackedModel(model).train()


def plain_twin(packed: PackedModel):
    """The same weights in transformers' own model with its own attention."""
    twin = copy.deepcopy(packed.model)
    twin.set_attn_implementation({"text_config": "sdpa", "vision_config": "sdpa", "": "sdpa"})
    return twin.train()


def reference_loss(plain, segments, loss_reduction):
    """sum w * ce / sum w by transformers' model, a sample at a time, from the definition."""
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    total, weights = torch.zeros(()), 0.0
    for s in segments:
        pixels = (torch.from_numpy(s.tiles).float() / 255 - mean) / std if len(s.tiles) else None
        ids = torch.from_numpy(s.input_ids).long()[None]
        logits = plain(input_ids=ids, pixel_values=pixels, use_cache=False).logits[0]
        targets = torch.from_numpy(s.labels).long()[1:]
        n = int((targets != IGNORE).sum())
        if not n:
            continue
        w = {"token": 1.0, "sample": 1 / n, "square": n**-0.5}[loss_reduction]
        total = total + w * F.cross_entropy(logits[:-1], targets, ignore_index=IGNORE, reduction="sum")
        weights += w * n
    return total / weights


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def assert_same_gradients(got, expected, own_errors=None):
    """Equal within GRADIENT_TOLERANCE, or within twice the reference's own relative error where that is given."""
    assert got.keys() == expected.keys()
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, gradient in expected.items():
        if gradient.norm() < ZERO * total:
            assert got[name].norm() < ZERO * total, name
        else:
            tolerance = max(GRADIENT_TOLERANCE, 2 * (own_errors or {}).get(name, 0.0))
            assert relative_error(got[name], gradient) < tolerance, name
