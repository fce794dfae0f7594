"""Models of native resolution: packed, they give what their own forward gives sample by sample from its processor's
inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import native_samples as native
from helpers.model_samples import assert_same_gradients, gradients

from internvl_pack.batch.collate import packed_collate_fn, padded_collate_fn
from internvl_pack.batch.loss_weights import IGNORE_INDEX
from internvl_pack.batch.row import PackRow
from internvl_pack.model import parity
from internvl_pack.model.selfcheck import check_isolation
from internvl_pack.records import Branch

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v")
TEXT = {name: plan for name, plan in native.PLANS.items() if {kind for kind, _ in plan} <= {"text", "answer"}}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(family):
    return native.native_tokenizer(family)


@pytest.fixture(scope="module")
def case(family, tokenizer):
    """A model, samples with and without images, and of all of them the loss and gradients one by one."""
    packed = native.tiny_packed(tokenizer, family)
    segments = native.segments_of(tokenizer, family)
    plain = parity.own_model(packed)
    loss = parity.own_loss(plain, segments, native.processor(family, tokenizer))
    loss.backward()
    return packed, family, segments, loss.item(), gradients(plain)


def of_decays(errors):
    """Of the gradients of linear layers' decays, which are sums over all tokens that nearly cancel."""
    return {name: error for name, error in errors.items() if name.endswith(("A_log", "dt_bias", "in_proj_a.weight"))}


@pytest.fixture(scope="module")
def own_errors(case, tokenizer):
    """Of the reference: with eager attention, not SDPA."""
    packed, family, segments, _, expected = case
    if not family.startswith("qwen3_5"):
        return {}
    return of_decays(parity.own_errors(packed, segments, native.processor(family, tokenizer), expected))


def losses(packed, batch):
    packed.zero_grad(set_to_none=True)
    loss = packed(**batch).loss
    loss.backward()
    return loss.item(), gradients(packed.model)


@pytest.mark.parametrize("collate", [packed_collate_fn, padded_collate_fn])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_pack_gives_the_loss_and_gradients_of_the_model_itself(case, own_errors, tokenizer, collate, checkpointed):
    packed, family, segments, expected, expected_gradients = case
    if checkpointed:
        packed.gradient_checkpointing_enable()
    loss, found = losses(packed, native.collated(tokenizer, family, segments, collate))
    packed.gradient_checkpointing_disable()
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(found, expected_gradients, own_errors)


def test_text_alone_gives_the_same_and_zero_gradients_to_the_tower(case, tokenizer):
    packed, family, *_ = case
    segments = native.segments_of(tokenizer, family, TEXT)
    expected = parity.own_loss(parity.own_model(packed), segments, native.processor(family, tokenizer))
    loss, found = losses(packed, native.collated(tokenizer, family, segments))
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    vision = {name: g for name, g in found.items() if ".visual." in name}
    assert len(vision) == len(list(packed.model.model.visual.parameters()))
    assert not any(g.any() for g in vision.values())


def test_positions_are_those_of_the_model_sample_by_sample(case, tokenizer):
    packed, family, segments, *_ = case
    batch = native.collated(tokenizer, family, segments, pad_seq_to_mult=4)
    starts = batch["cu_seqlens_padded"].tolist()
    for s, start in zip(segments, starts, strict=False):
        inputs = parity.own_inputs(packed.model, s, native.processor(family, tokenizer))
        if s.image_grids:
            pixels = {"pixel_values", "pixel_values_videos"}
            expected = packed.model.model.get_rope_index(**{k: v for k, v in inputs.items() if k not in pixels})[0]
        else:
            expected = torch.arange(len(s.input_ids)).expand(3, 1, -1)
        assert torch.equal(batch["position_ids"][:, :, start : start + len(s.input_ids)], expected)


def test_pairs_of_frames_without_their_second_frames_are_refused(case, tokenizer):
    packed, family, segments, *_ = case
    batch = native.collated(tokenizer, family, segments)
    del batch["second_frames"]
    with pytest.raises(ValueError, match="second_frames has 0 tiles, the pairs of frames in image_grids have"):
        packed(**batch)


def test_segments_do_not_see_their_neighbours(case):
    check_isolation(case[0])


def test_the_tower_attends_once_a_layer_and_takes_all_of_its_inputs_from_the_host(case, tokenizer, monkeypatch):
    from internvl_pack.model.vision import picture_attention

    packed, family, segments, *_ = case
    calls = []
    attend = picture_attention.attend_row
    monkeypatch.setattr(picture_attention, "attend_row", lambda kernel, *a: calls.append(a) or attend(kernel, *a))
    batch = native.collated(tokenizer, family, segments)
    with torch.no_grad():
        packed(**batch)
    assert len(calls) == packed.config.vision_config.depth
    patches = packed.config.vision_config.spatial_merge_size**2 * batch["num_tiles"]
    assert all(len(call[0]) == patches for call in calls)


def test_answers_to_one_prompt_give_what_each_gives_alone(case, tokenizer, monkeypatch):
    """A tree's branches go on after the positions that the pictures of its prefix take."""
    packed, family, *_ = case
    segment = native.segment(tokenizer, family, [("text", 4), ("image", (2, 5)), ("text", 3), *[("answer", 6)] * 2])
    labels = segment.labels.copy()
    labels[[-12, -6]] = IGNORE_INDEX  # of each branch the last token of what it follows
    branches = (Branch(6, 5, 1.0), Branch(6, 5, 0.5))
    tree = replace(segment, labels=labels, num_loss_tokens=10, branches=branches)
    segments = [tree, *native.segments_of(tokenizer, family, TEXT)]
    shared, shared_gradients = losses(packed, native.collated(tokenizer, family, segments))
    apart = native.collated(tokenizer, family, segments, unshared)
    alone, gradients_alone = losses(packed, apart)
    monkeypatch.setattr(packed.config.get_text_config(), "_attn_implementation", "eager")
    own_errors = of_decays(parity.gradient_errors(losses(packed, apart)[1], gradients_alone))
    assert shared == pytest.approx(alone, rel=1e-6)
    assert_same_gradients(shared_gradients, gradients_alone, own_errors)


def unshared(rows, **options):
    """The padded batch of the same samples, a row a branch."""
    return padded_collate_fn([PackRow([s]) for row in rows for s in row.segments], **options)
