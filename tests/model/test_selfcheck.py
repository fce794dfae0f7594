"""No segment sees another: exact zero gradients, and the self-check that a run starts with."""

from __future__ import annotations

import pytest
import torch
from helpers.model_samples import mixed_segments, packed_batch, text_segments, tiny_packed
from torch import nn

from internvl_pack.errors import UserError
from internvl_pack.model.attention import tree_links
from internvl_pack.model.images import normalize_tiles
from internvl_pack.model.selfcheck import IsolationError, check_isolation
from internvl_pack.testing.tiny import LANGUAGE_MODELS


def gradients_of_one_segments_loss(packed, batch, index):
    """Gradients of segment `index`'s loss with respect to the row's embeddings and to the pixels."""
    start, stop = batch["cu_seqlens"][index : index + 2].tolist()
    labels = torch.full_like(batch["labels"], -100)
    labels[:, start:stop] = batch["labels"][:, start:stop]
    pixels = normalize_tiles(batch["pixel_values"], torch.float32).requires_grad_()
    seen = []
    hook = packed.get_input_embeddings().register_forward_hook(
        lambda _m, _i, out: seen.append(out.detach().requires_grad_()) or seen[-1]
    )
    packed(**(batch | {"labels": labels, "pixel_values": pixels, "num_loss_tokens": None})).loss.backward()
    hook.remove()
    return seen[0].grad[0], pixels.grad


@pytest.mark.parametrize("llm", LANGUAGE_MODELS)
def test_the_loss_of_a_segment_has_no_gradient_in_any_other(tokenizer, llm):
    packed = tiny_packed(tokenizer, llm)
    batch = packed_batch(mixed_segments(tokenizer))
    bounds, tiles = batch["cu_seqlens"].tolist(), batch["segment_tile_offsets"].tolist()
    for index in range(len(bounds) - 1):
        embeddings, pixels = gradients_of_one_segments_loss(packed, batch, index)
        inside = embeddings[bounds[index] : bounds[index + 1]]
        own = pixels[tiles[index] : tiles[index + 1]]
        assert inside.any() and (not len(own) or own.flatten(1).any(1).all())
        inside.zero_()
        own.zero_()
        assert torch.count_nonzero(embeddings) == 0 and torch.count_nonzero(pixels) == 0


@pytest.mark.parametrize("llm", LANGUAGE_MODELS)
def test_the_self_check_passes_and_leaves_the_model_as_it_was(tokenizer, llm):
    packed = tiny_packed(tokenizer, llm)
    packed.gradient_checkpointing_enable()
    before = {name: p.clone() for name, p in packed.named_parameters()}
    check_isolation(packed)
    assert packed.training
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in packed.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("llm", LANGUAGE_MODELS)
def test_the_self_check_runs_in_bfloat16_and_under_autocast(tokenizer, llm):
    packed = tiny_packed(tokenizer, llm)
    with torch.autocast("cpu", torch.bfloat16):
        check_isolation(packed)
    check_isolation(packed.bfloat16())


def test_attention_that_ignores_the_boundaries_is_named(tokenizer):
    packed = tiny_packed(tokenizer)
    packed.model.set_attn_implementation({"text_config": "eager"})
    # transformers looks for restarting positions by itself unless a mask is given: give one.
    hook = packed.language_model.register_forward_pre_hook(
        lambda _m, args, kwargs: (args, kwargs | {"attention_mask": torch.ones(1, kwargs["inputs_embeds"].shape[1])}),
        with_kwargs=True,
    )
    with pytest.raises(IsolationError, match=r"attention of decoder layer 0 \(eager\) leaks") as caught:
        check_isolation(packed)
    assert isinstance(caught.value, UserError)
    hook.remove()


def test_a_branch_that_sees_its_sibling_is_named(tokenizer, monkeypatch):
    """The links of a row say that the first branch's tokens are part of the prefix: the next one sees them."""
    packed = tiny_packed(tokenizer)

    def leaking(cu_seqlens, prefix_of, device):
        links = tree_links(cu_seqlens, prefix_of, device)
        first = torch.arange(int(cu_seqlens[1]), int(cu_seqlens[2]))
        places = torch.cat([links.prefix_places, first])
        count = torch.tensor([0, len(places)], dtype=torch.int32)
        return links._replace(prefix_places=places, cu_prefixes=count, max_prefix=len(places))

    monkeypatch.setattr("internvl_pack.model.packed.make_tree_links", leaking)
    with pytest.raises(
        IsolationError, match=r"attention of decoder layer 0 .* leaks, a branch's values move"
    ) as caught:
        check_isolation(packed)
    assert "when the branch before it changes" in str(caught.value)


def test_a_branch_that_does_not_see_its_prefix_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr("internvl_pack.model.packed.make_tree_links", lambda *_: None)
    with pytest.raises(UserError, match="a branch does not see its prefix"):
        check_isolation(tiny_packed(tokenizer))


def test_a_model_that_takes_no_trees_is_checked_without(tokenizer):
    packed = tiny_packed(tokenizer, "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert packed.tree_problem and not tiny_packed(tokenizer).tree_problem
    check_isolation(packed)


class MixesTheBatch(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, features):
        out = self.inner(features)
        return out + out.mean(0, keepdim=True)


def test_a_projector_that_mixes_tiles_is_named(tokenizer):
    packed = tiny_packed(tokenizer)
    packed.model.model.multi_modal_projector = MixesTheBatch(packed.model.model.multi_modal_projector)
    with pytest.raises(IsolationError, match="the projector leaks"):
        check_isolation(packed)


class CarriesTheLastToken(nn.Module):
    """A layer with a memory along the row, as a short convolution has."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        out = self.inner(x)
        return out + 0.1 * out.roll(1, dims=1)


def test_a_layer_with_a_state_along_the_row_is_named(tokenizer):
    packed = tiny_packed(tokenizer)
    layer = packed.language_model.layers[1]
    layer.mlp = CarriesTheLastToken(layer.mlp)
    with pytest.raises(IsolationError, match=r"decoder layer 1 \(Qwen2DecoderLayer\) leaks"):
        check_isolation(packed)


def test_the_vision_tower_and_the_language_model_get_what_they_may_see(tokenizer):
    packed = tiny_packed(tokenizer)
    calls = {}
    for name, module in (("vision", packed.vision_modules[0]), ("language", packed.language_model)):
        module.register_forward_pre_hook(
            lambda _m, _a, kwargs, name=name: calls.__setitem__(name, kwargs), with_kwargs=True
        )
    packed(**packed_batch(mixed_segments(tokenizer)))
    assert "cu_seq_lens_q" not in calls["vision"]
    assert calls["language"]["attention_mask"].shape == (1, 1, 1, 1)  # stands for a finished mask; nobody reads it
    assert calls["language"]["use_cache"] is False
    assert type(calls["language"]["max_length_q"]) is int
    assert calls["language"]["cu_seq_lens_q"].dtype == torch.int32


def test_no_mask_is_made_for_a_pack(tokenizer):
    packed = tiny_packed(tokenizer)
    masks = []
    for layer in packed.language_model.layers:
        layer.register_forward_pre_hook(lambda _m, _a, kw: masks.append(kw["attention_mask"]), with_kwargs=True)
    packed(**packed_batch(text_segments(tokenizer)))
    assert [m.numel() for m in masks] == [1] * len(packed.language_model.layers)
