"""Packed training is unpacked training: losses and gradients against transformers' own model, a sample at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.factory import TINY
from helpers.model_samples import (
    LOSS_TOLERANCE,
    assert_same_gradients,
    gradients,
    mixed_segments,
    packed_batch,
    padded_batch,
    plain_twin,
    reference_loss,
    relative_error,
    segment,
    text_segments,
    tiny_packed,
)

from internvl_pack.batch.row import Segment
from internvl_pack.config import PackingConfig
from internvl_pack.model.loss import head
from internvl_pack.model.packed import PackedModel
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.loader import build_loader


def one_by_one(packed: PackedModel, segments, loss_reduction):
    """Loss and gradients of the same weights in transformers' own model."""
    plain = plain_twin(packed)
    loss = reference_loss(plain, segments, loss_reduction)
    loss.backward()
    return loss.item(), gradients(plain)


def assert_packed_equals_one_by_one(packed: PackedModel, batch, expected):
    loss = packed(**batch).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected[0], rel=LOSS_TOLERANCE)
    assert_same_gradients(gradients(packed.model), expected[1])
    for vision in packed.vision_modules:
        assert all(p.grad is not None for p in vision.parameters())


@pytest.fixture(scope="module")
def expected_of(tokenizer):
    """Of a kind of language model and a reduction, made once."""
    return cache(lambda llm, reduction: one_by_one(tiny_packed(tokenizer, llm), mixed_segments(tokenizer), reduction))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("loss_reduction", ["token", "sample", "square"])
@pytest.mark.parametrize("llm", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_a_pack_equals_its_samples_one_by_one(tokenizer, llm, loss_reduction, checkpointing, expected_of):
    packed = tiny_packed(tokenizer, llm)
    if checkpointing:
        packed.gradient_checkpointing_enable()
        assert packed.is_gradient_checkpointing
    batch = packed_batch(mixed_segments(tokenizer), loss_reduction=loss_reduction)
    assert_packed_equals_one_by_one(packed, batch, expected_of(llm, loss_reduction))


def segments_of(batch) -> list[Segment]:
    """The samples of a batch, cut out again."""
    bounds, tiles = batch["cu_seqlens"].tolist(), batch["segment_tile_offsets"].tolist()
    out = []
    for i, sample_id in enumerate(batch["sample_ids"]):
        ids, labels = (batch[k][0, bounds[i] : bounds[i + 1]].numpy() for k in ("input_ids", "labels"))
        pixels = batch["pixel_values"][tiles[i] : tiles[i + 1]].numpy()
        out.append(Segment(sample_id, (0, 1), ids, labels, pixels, (), int((labels[1:] != -100).sum())))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("loss_reduction", ["token", "sample", "square"])
def test_a_pack_of_real_samples_equals_them_one_by_one(tokenizer, demo_dir, loss_reduction, checkpointing):
    encode = replace(TINY, max_dynamic_patch=4)
    config = PackingConfig(max_packed_tokens=4096, num_images_expected=64)
    dataset = PackedDataset.from_meta(demo_dir / "meta.json", tokenizer, config, encode=encode)
    batch = next(iter(build_loader(dataset, loss_reduction=loss_reduction)))
    segments = segments_of(batch)
    images = [len(s.tiles) for s in segments]
    assert len(segments) >= 6 and max(images) > 1 and min(images) == 0
    packed = tiny_packed(tokenizer, "qwen2", max_position_embeddings=4096)
    if checkpointing:
        packed.gradient_checkpointing_enable()
    assert_packed_equals_one_by_one(packed, batch, one_by_one(packed, segments, loss_reduction))


def test_a_padded_batch_equals_the_pack(tokenizer):
    packed = tiny_packed(tokenizer, "qwen3")
    segments = mixed_segments(tokenizer)
    results = []
    for batch in (packed_batch(segments, loss_reduction="square"), padded_batch(segments, loss_reduction="square")):
        packed.zero_grad()
        out = packed(**batch)
        out.loss.backward()
        results.append((out, gradients(packed)))
    (one, one_gradients), (other, other_gradients) = results
    assert other.loss.item() == pytest.approx(one.loss.item(), rel=LOSS_TOLERANCE)
    assert other.num_targets == one.num_targets
    assert_same_gradients(other_gradients, one_gradients)


def test_sliding_windows_are_kept_in_a_pack(tokenizer):
    packed = tiny_packed(tokenizer, "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert set(packed.config.text_config.layer_types) == {"full_attention", "sliding_attention"}
    segments = mixed_segments(tokenizer)
    assert_packed_equals_one_by_one(packed, packed_batch(segments), one_by_one(packed, segments, "token"))
    full = tiny_packed(tokenizer, "qwen2")
    full.model.load_state_dict(packed.model.state_dict())
    assert full(**packed_batch(segments)).loss.item() != pytest.approx(
        packed(**packed_batch(segments)).loss.item(), rel=1e-4
    )


def test_tied_embeddings_are_kept(tokenizer):
    packed = tiny_packed(tokenizer, "qwen2", tie_word_embeddings=True)
    assert packed.get_output_embeddings().weight is packed.get_input_embeddings().weight
    segments = mixed_segments(tokenizer)
    assert_packed_equals_one_by_one(packed, packed_batch(segments), one_by_one(packed, segments, "token"))


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_the_heads_chunk_changes_nothing(tokenizer, chunk):
    packed = tiny_packed(tokenizer)
    batch = packed_batch(mixed_segments(tokenizer), loss_reduction="square")
    results = []
    for chunk_tokens in (10_000, chunk):
        packed.head.chunk_tokens = chunk_tokens
        packed.zero_grad()
        out = packed(**batch)
        out.loss.backward()
        results.append((out.loss.item(), out.ce_sum.item(), gradients(packed)))
    assert results[1][:2] == pytest.approx(results[0][:2], rel=LOSS_TOLERANCE)
    assert_same_gradients(results[1][2], results[0][2])


def test_no_more_logits_than_a_chunk_exist_at_once_and_none_is_made_twice(tokenizer):
    packed = tiny_packed(tokenizer)
    packed.head.chunk_tokens = 7
    sizes = []
    packed.head.loss_kernel = lambda logits, *rest: sizes.append(len(logits)) or head.loss_and_gradient(logits, *rest)
    batch = packed_batch(mixed_segments(tokenizer))
    packed(**batch).loss.backward()
    assert max(sizes) == 7
    assert sum(sizes) == batch["num_loss_tokens"]


@pytest.mark.parametrize("kernel", [head.loss_and_gradient, head.fusible_loss_and_gradient])
@pytest.mark.parametrize("trains", [(True, True, True), (True, False, False), (False, True, False)])
def test_the_heads_gradients_are_autograds(kernel, trains):
    generator = torch.Generator().manual_seed(0)
    shapes = [(11, 8), (23, 8), (23,)]
    tensors = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_(t)
        for s, t in zip(shapes, trains, strict=True)
    ]
    targets, weights = torch.arange(11), torch.rand(11, generator=generator)
    lm_head = torch.nn.Linear(8, 23, dtype=torch.float64)
    lm_head.weight, lm_head.bias = (torch.nn.Parameter(t.detach(), requires_grad=t.requires_grad) for t in tensors[1:])
    module = head.LabelledHead(lambda: lm_head, chunk_tokens=4)
    module.loss_kernel = kernel
    ce = torch.nn.functional.cross_entropy(tensors[0] @ tensors[1].T + tensors[2], targets, reduction="none")
    wanted = [t for t in tensors if t.requires_grad]
    expected = torch.autograd.grad(3 * (ce * weights).sum(), wanted)
    got = [p for p in (tensors[0], lm_head.weight, lm_head.bias) if p.requires_grad]
    weighted, losses = module(tensors[0], targets, weights)
    for g, e in zip(torch.autograd.grad(3 * weighted, got), expected, strict=True):
        assert relative_error(g, e) < LOSS_TOLERANCE
    assert torch.allclose(losses.double(), ce.detach(), rtol=1e-6)
    with torch.no_grad():
        assert module(tensors[0], targets, weights)[0].item() == pytest.approx(weighted.item(), rel=1e-6)


def test_the_heads_gradients_are_finite_whatever_lay_in_memory(monkeypatch):
    torch.manual_seed(0)
    x, weight = torch.randn(64, 16).bfloat16(), torch.randn(301, 16).bfloat16()  # no multiple of the alignment, and odd
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # then memory that nothing has written to is NaN
    try:
        logits = head.logits_of(x, weight, None)
    finally:
        torch.use_deterministic_algorithms(False)
    beside = logits.as_strided((64, logits.stride(0) - 301), logits.stride(), logits.storage_offset() + 301)
    assert beside.eq(0).all()
    assert head.gradient_of_input(logits, weight).isfinite().all()


def test_the_heads_gradients_are_given_once(tokenizer):
    packed = tiny_packed(tokenizer)
    loss = packed(**packed_batch(mixed_segments(tokenizer))).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass needs a second forward pass"):
        loss.backward()


def test_the_first_token_of_a_segment_is_never_a_target(tokenizer):
    packed = tiny_packed(tokenizer)
    batch = packed_batch(mixed_segments(tokenizer))
    starts = batch["cu_seqlens"][:-1].long()
    labels, weights = batch["labels"].clone(), batch["loss_weight"].clone()
    labels[0, starts], weights[0, starts] = batch["input_ids"][0, starts], 1.0
    out = packed(**(batch | {"labels": labels, "loss_weight": weights}))
    assert out.loss.item() == packed(**batch).loss.item()
    assert out.num_targets == batch["num_loss_tokens"]


def test_the_order_of_segments_and_a_pad_segment_change_nothing(tokenizer):
    packed = tiny_packed(tokenizer)
    segments = mixed_segments(tokenizer)
    losses = [
        packed(**packed_batch(segments)).loss.item(),
        packed(**packed_batch(segments[::-1])).loss.item(),
        packed(**packed_batch(segments, pad_to=512)).loss.item(),
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=LOSS_TOLERANCE)


def test_two_packs_in_one_step_add_up_to_one(tokenizer):
    packed = tiny_packed(tokenizer)
    segments = mixed_segments(tokenizer)
    whole = packed(**packed_batch(segments, loss_reduction="sample"))
    parts = [packed_batch(part, loss_reduction="sample") for part in (segments[:3], segments[3:])]
    normalizer = sum(b["loss_weight"].sum() for b in parts)
    assert sum(packed(**b, loss_normalizer=normalizer).loss for b in parts).item() == pytest.approx(
        whole.loss.item(), rel=LOSS_TOLERANCE
    )


def test_a_pack_without_an_image_gives_the_vision_side_zero_gradients(tokenizer):
    packed = tiny_packed(tokenizer)
    packed.gradient_checkpointing_enable()
    out = packed(**packed_batch(text_segments(tokenizer)))
    out.loss.backward()
    parameters = [p for module in packed.vision_modules for p in module.parameters()]
    assert len(parameters) > 30
    assert all(p.grad is not None and not p.grad.any() for p in parameters)
    assert all(p.grad is not None for p in packed.parameters())


def test_a_pack_without_an_image_is_not_moved_by_the_vision_side(tokenizer):
    packed = tiny_packed(tokenizer)
    batch = packed_batch(text_segments(tokenizer))
    expected = packed(**batch).loss.item()
    with torch.no_grad():
        packed.vision_modules[1].linear_2.bias.fill_(float("inf"))
    assert packed(**batch).loss.item() == expected


def test_a_row_without_a_label_is_zero_and_reaches_every_parameter(tokenizer):
    packed = tiny_packed(tokenizer)
    batch = packed_batch([segment(tokenizer, [("text", 5), ("image", 1), ("text", 3)])])
    out = packed(**batch)
    out.loss.backward()
    assert out.loss.item() == 0.0 and out.num_targets == 0
    assert all(p.grad is not None and torch.isfinite(p.grad).all() and not p.grad.any() for p in packed.parameters())


def test_the_sums_for_metrics_are_unweighted(tokenizer):
    packed = tiny_packed(tokenizer)
    segments = mixed_segments(tokenizer)
    out = packed(**packed_batch(segments, loss_reduction="sample"))
    plain = packed(**packed_batch(segments, loss_reduction="token"))
    assert out.ce_sum.item() == pytest.approx(plain.weighted_sum.item(), rel=1e-6)
    assert out.num_targets.item() == plain.weight_sum.item() == packed_batch(segments)["num_loss_tokens"]
    assert out.weight_sum.item() == pytest.approx(sum(s.num_loss_tokens > 0 for s in segments), rel=1e-5)


@pytest.mark.parametrize("llm", ["qwen2", "qwen3"])
def test_under_autocast_the_kernel_computes_in_half_and_the_loss_in_float32(tokenizer, llm):
    packed = tiny_packed(tokenizer, llm)
    packed.gradient_checkpointing_enable()
    batch = packed_batch(mixed_segments(tokenizer))
    expected = packed(**batch).loss
    types = set()
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _m, args: types.add(args[0].dtype))
        for layer in packed.language_model.layers
    ]
    with torch.autocast("cpu", torch.bfloat16):
        loss = packed(**batch).loss
    loss.backward()
    assert types == {torch.bfloat16} and len(hooks) == 2
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-2)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in packed.parameters())


def test_a_text_only_model_packs_too(tokenizer):
    from transformers import AutoModelForCausalLM

    from internvl_pack.model.attention import register_packed_attention
    from internvl_pack.testing.tiny import tiny_text_config

    config = tiny_text_config("llama", vocab_size=len(tokenizer))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=register_packed_attention("sdpa", "cpu"))
    packed = PackedModel(model)
    segments = text_segments(tokenizer)
    assert_packed_equals_one_by_one(packed, packed_batch(segments), one_by_one(packed, segments, "token"))
