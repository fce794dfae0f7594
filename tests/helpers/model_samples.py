"""Synthetic samples, tiny models and an independent reference for the tests of the model side."""

from __future__ import annotations

import copy

import torch

from internvl_pack.batch.collate import packed_collate_fn, padded_collate_fn
from internvl_pack.batch.loss_weights import IGNORE_INDEX
from internvl_pack.batch.row import PackRow
from internvl_pack.model import parity
from internvl_pack.model.packed import PackedModel
from internvl_pack.testing.tiny import tiny_internvl

IGNORE = IGNORE_INDEX
LOSS_TOLERANCE, GRADIENT_TOLERANCE = parity.LOSS_TOLERANCE, parity.GRADIENT_TOLERANCE
gradients, relative_error, plain_twin = parity.gradients, parity.relative_error, parity.own_model
SIZE = 56
TOKENS_PER_TILE = 4
_MADE: dict = {}  # models by what they are made of: they are copied in half the time


def segment(tokenizer, plan, seed=0, sample_id=None):
    """A sample from a plan of ("text" | "answer", tokens) and ("image", tiles)."""
    image_id = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    layout = {"image_token_id": image_id, "side": SIZE, "tokens_per_tile": TOKENS_PER_TILE}
    return parity.make_segment(plan, seed=seed, name=sample_id, **layout)


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
    key = tokenizer, llm, repr(settings)
    if key not in _MADE:
        _MADE[key] = parity.perturbed(tiny_internvl(tokenizer, llm, **settings))
    return parity.pack_on_cpu(copy.deepcopy(_MADE[key]), kernel)


def normalised(segment):
    """Tiles as InternVL's processor gives them to the model, from the definition."""
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return {"pixel_values": (torch.from_numpy(segment.tiles).float() / 255 - mean) / std}


def reference_loss(plain, segments, loss_reduction):
    """sum w * ce / sum w by transformers' model, a sample at a time, from the definition."""
    weight = {"token": lambda n: 1.0, "sample": lambda n: 1 / n, "square": lambda n: n**-0.5}[loss_reduction]
    process = normalised if hasattr(plain.config, "vision_config") else None
    return parity.own_loss(plain, segments, process, weight)


def assert_same_gradients(got, expected, own_errors=None):
    """Equal within GRADIENT_TOLERANCE, or within twice the reference's own relative error where that is given."""
    for name, error in parity.gradient_errors(got, expected).items():
        assert error < max(GRADIENT_TOLERANCE, 2 * (own_errors or {}).get(name, 0.0)), name
