"""Counted operations against PyTorch's own counter, and what is not trained counts less."""

from __future__ import annotations

import pytest
import torch
from helpers import native_samples as native
from helpers.model_samples import mixed_segments, packed_batch, tiny_packed
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from internvl_pack.model.flops import flop_counts, peak_flops, trained_parts


def counted(packed, batch, backward=True) -> float:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = packed(**batch).loss
        if backward:
            loss.backward()
    return float(counter.get_total_flops())


FREEZES = {
    "everything trained": (),
    "vision frozen": ("vision",),
    "only the projector trained": ("vision", "language", "head"),
    "language frozen": ("language", "head"),
    "only the language model trained": ("vision", "projector"),
}


@pytest.mark.parametrize("llm", ["qwen2", "llama"])
@pytest.mark.parametrize("frozen", FREEZES.values(), ids=FREEZES)
def test_a_steps_operations_are_those_pytorch_counts(tokenizer, llm, frozen):
    packed = tiny_packed(tokenizer, llm)
    parts = dict(zip(("vision", "projector"), packed.vision_modules, strict=True))
    parts |= {"language": packed.language_model, "head": packed.get_output_embeddings()}
    for name in frozen:
        parts[name].requires_grad_(False)
    batch = packed_batch(mixed_segments(tokenizer))
    counts = flop_counts(packed.config, **trained_parts(packed))
    # Written out, attention multiplies the whole square of a segment: as much again as causal attention needs.
    expected = counts.of(batch) + counts.per_squared_token * batch["sum_squared_lengths"]
    assert counted(packed, batch) == pytest.approx(expected, rel=1e-3)


def test_padding_and_text_without_labels_count_nothing_of_theirs(tokenizer):
    packed = tiny_packed(tokenizer)
    counts = flop_counts(packed.config)
    segments = mixed_segments(tokenizer)
    assert counts.of(packed_batch(segments)) == counts.of(packed_batch(segments, pad_to=512))
    whole = {"num_real_tokens": 0, "sum_squared_lengths": 0, "num_loss_tokens": 0, "num_tiles": 0}
    assert counts.of(whole) == 0


def test_experts_count_where_a_token_goes_through_them(tokenizer):
    dense = flop_counts(tiny_packed(tokenizer, "qwen3").config).per_token
    sparse = flop_counts(tiny_packed(tokenizer, "qwen3_moe").config).per_token
    hidden, layers, width = 64, 2, 64
    feed_forward = 3 * 2 * layers * 3 * hidden  # forward and backward, multiply-add, layers, three matrices
    router = 3 * 2 * layers * hidden * 4
    assert sparse - dense == feed_forward * (2 * width - 128) + router  # two of four experts of half the width


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_linear_attention_counts_its_matrices_and_three_products_with_its_state(family):
    packed = native.tiny_packed(native.native_tokenizer(family), family)
    layers = packed.language_model.layers
    matrices = sum(m.weight.numel() for m in layers.modules() if isinstance(m, nn.Linear))
    for name, parameter in layers.named_parameters():
        if ".experts." in name:
            matrices += parameter.numel() // 2  # two of four
        elif name.endswith(".gate.weight"):
            matrices += parameter.numel()
    counts = flop_counts(packed.config)
    assert counts.per_token == 6 * (matrices + 3 * 4 * 8 * 8)  # four states of 8 x 8 in one layer of two
    assert counts.per_squared_token == 6 * 4 * 16


def test_a_card_is_known_by_the_longest_name_that_fits():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H200") == 989.4e12
    assert peak_flops("some other card") is None


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_the_tower_in_chunks_gives_the_same_features(tokenizer, chunk):
    packed, whole = tiny_packed(tokenizer), tiny_packed(tokenizer)
    packed.vision_micro_tiles = chunk
    batch = packed_batch(mixed_segments(tokenizer))
    sizes = []
    hook = packed.vision_modules[0].register_forward_pre_hook(
        lambda _m, args, kwargs: sizes.append(len(kwargs.get("pixel_values", args[0] if args else None))),
        with_kwargs=True,
    )
    losses = []
    for model in (packed, whole):
        out = model(**batch)
        out.loss.backward()
        losses.append(out.loss.item())
    hook.remove()
    assert sizes[0] == min(chunk, batch["num_tiles"]) and sum(sizes) == batch["num_tiles"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for (name, got), expected in zip(packed.named_parameters(), whole.parameters(), strict=True):
        assert torch.allclose(got.grad, expected.grad, rtol=1e-4, atol=1e-6), name


def test_frozen_chunks_keep_no_graph(tokenizer):
    packed = tiny_packed(tokenizer)
    packed.vision_micro_tiles = 2
    for module in packed.vision_modules:
        module.requires_grad_(False)
    tiles = torch.randint(256, (5, 3, 56, 56), dtype=torch.uint8)
    features = packed.image_features(tiles)
    assert features.shape[:2] == (5, 4) and not features.requires_grad


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_pictures_count_by_the_square_of_their_own_patches(family):
    """Twice the sides are four times the tiles, and sixteen times the attention where all of it is seen."""
    tokenizer = native.native_tokenizer(family)
    packed = native.tiny_packed(tokenizer, family)
    counts = flop_counts(packed.config)
    small, large = (
        native.collated(tokenizer, family, [native.segment(tokenizer, family, [("image", grid), ("answer", 3)])])
        for grid in ((4, 4), (8, 8))
    )
    without = {name: 0 for name in ("num_real_tokens", "sum_squared_lengths", "num_loss_tokens")}
    found = [counts.of(batch | without) for batch in (small, large)]
    whole = len(getattr(packed.config.vision_config, "fullatt_block_indexes", range(2)))
    attention = 3 * 4 * whole * 32 * 4 * 4 * 16**2  # layers, width, patches of a tile squared, tiles squared
    assert found[1] - 4 * found[0] == pytest.approx(16 * attention - 4 * attention)
