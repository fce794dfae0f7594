"""Rows with prefix trees are their answers one by one: log-probabilities, losses and every parameter's gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.model_samples import (
    LOSS_TOLERANCE,
    assert_same_gradients,
    gradients,
    mixed_segments,
    packed_batch,
    padded_batch,
    plain_twin,
    reference_loss,
    tiny_packed,
)
from helpers.sequence_groups import group_of
from helpers.tree_samples import TREES, trees

from internvl_pack.batch.row import Segment
from internvl_pack.errors import UserError
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.images import normalize_tiles
from internvl_pack.parallel import enable_sequence_parallel


def one_by_one(segments) -> list[Segment]:
    return [alone for s in segments for alone in s.unshared()]


def assert_trees_equal_one_by_one(packed, segments, loss_reduction="token"):
    plain = plain_twin(packed)
    loss = packed(**packed_batch(segments, loss_reduction=loss_reduction)).loss
    loss.backward()
    expected = reference_loss(plain, one_by_one(segments), loss_reduction)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=LOSS_TOLERANCE)
    got, exact = gradients(packed.model), gradients(plain)
    assert not any(got.pop(name).any() for name in got.keys() - exact.keys())  # a tower that saw no image
    assert_same_gradients(got, exact)
    for vision in packed.vision_modules:
        assert all(p.grad is not None for p in vision.parameters())


@pytest.mark.parametrize("name", TREES)
def test_a_tree_equals_its_answers_one_by_one(tokenizer, name):
    assert_trees_equal_one_by_one(tiny_packed(tokenizer), trees(tokenizer, name))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("llm", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_trees_among_plain_samples_equal_them_one_by_one(tokenizer, llm, checkpointing):
    packed = tiny_packed(tokenizer, llm)
    if checkpointing:
        packed.gradient_checkpointing_enable()
    first, *others = mixed_segments(tokenizer)
    assert_trees_equal_one_by_one(packed, [first, *trees(tokenizer), *others], "square")


def test_compiled_layers_take_trees_and_plain_rows(tokenizer):
    torch._dynamo.reset()
    packed = tiny_packed(tokenizer)
    compiled = []
    compile_blocks(packed, backend=lambda graph, _: compiled.append(graph) or graph.forward)
    rows = [mixed_segments(tokenizer), trees(tokenizer), trees(tokenizer, "text only"), trees(tokenizer, "one branch")]
    for segments in rows[:2]:
        assert_trees_equal_one_by_one(packed, segments)
        packed.zero_grad()
    known = len(compiled)
    for segments in [*rows, trees(tokenizer, "eight answers", "pair with an image")]:
        assert_trees_equal_one_by_one(packed, segments)
        packed.zero_grad()
    assert len(compiled) == known  # whatever a row's trees are
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [3, 1000])
def test_log_probabilities_have_their_gradient(tokenizer, chunk):
    packed = tiny_packed(tokenizer)
    packed.head.chunk_tokens = chunk
    segments = [*trees(tokenizer), *mixed_segments(tokenizer)]
    batch = packed_batch(segments)
    out = packed(**batch, return_logprobs=True)
    assert out.loss is None and out.target_logprobs.shape == out.target_positions.shape
    upstream = torch.linspace(-1, 2, len(out.target_logprobs))
    (out.target_logprobs * upstream).sum().backward()

    plain, total, seen = plain_twin(packed), 0.0, 0
    logits = packed.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits[0]
    at = out.target_positions
    expected = logits.log_softmax(-1)[at, batch["input_ids"][0, at + 1]]
    torch.testing.assert_close(out.target_logprobs, expected, rtol=LOSS_TOLERANCE, atol=1e-6)
    bounds = batch["cu_seqlens"].tolist()
    of = torch.bucketize(at, torch.tensor(bounds[1:]), right=True)
    number = 0
    for s in segments:
        pieces = [number] if not s.branches else range(number + 1, number + 1 + len(s.branches))
        for piece, alone in zip(pieces, s.unshared(), strict=True):
            ids = torch.from_numpy(alone.input_ids).long()
            pixels = padded_batch([alone])["pixel_values"]
            tiles = normalize_tiles(pixels, torch.float32) if len(pixels) else None
            logprobs = plain(input_ids=ids[None], pixel_values=tiles, use_cache=False).logits[0].log_softmax(-1)
            where = at[of == piece] - bounds[piece] + (len(ids) - (bounds[piece + 1] - bounds[piece]))
            mine = logprobs[where, ids[where + 1]]
            total = total + (mine * upstream[of == piece]).sum()
            seen += len(mine)
            torch.testing.assert_close(out.target_logprobs[of == piece], mine, rtol=LOSS_TOLERANCE, atol=1e-6)
        if s.branches and any(s.labels[1 : s.num_prefix_tokens] != -100):  # turns that the prefix trains
            where = at[of == number] - bounds[number]
            mine = logprobs[where, ids[where + 1]]
            total = total + (mine * upstream[of == number]).sum()
            seen += len(mine)
        number += 1 + len(s.branches)
    assert seen == len(at)
    total.backward()
    assert_same_gradients(gradients(packed.model), gradients(plain))


def test_log_probabilities_of_a_row_without_labels_have_a_gradient(tokenizer):
    packed = tiny_packed(tokenizer)
    batch = packed_batch([])
    out = packed(**batch, return_logprobs=True)
    assert out.target_logprobs.shape == (0,)
    out.target_logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in packed.parameters())


def test_a_branch_does_not_see_another(tokenizer):
    packed = tiny_packed(tokenizer).eval()
    batch = packed_batch([*trees(tokenizer, "several images, long prompt", "text only"), *mixed_segments(tokenizer)])
    bounds = batch["cu_seqlens"].tolist()

    def logits(**changes):
        with torch.no_grad():
            return packed(**{k: v for k, v in (batch | changes).items() if k != "labels"}).logits[0]

    before = logits()
    for changed, also in ((2, ()), (0, (1, 2)), (3, (4, 5, 6)), (5, ()), (7, ())):
        ids = batch["input_ids"].clone()
        ids[0, bounds[changed]] ^= 1
        moved = (logits(input_ids=ids) != before).any(-1)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
            assert moved[start:stop].any() == (number == changed or number in also), (changed, number)


def test_rows_of_plain_samples_take_the_path_they_took(tokenizer, monkeypatch):
    packed = tiny_packed(tokenizer)
    batch = packed_batch(mixed_segments(tokenizer))
    expected = packed(**batch).loss
    monkeypatch.setattr("internvl_pack.model.attention.register.attend_trees", None)
    none = torch.full((len(batch["cu_seqlens"]) - 1,), -1, dtype=torch.int32)
    assert torch.equal(packed(**batch, prefix_of=none).loss, expected)


def test_what_trees_do_not_go_with_is_refused(tokenizer):
    batch = packed_batch(trees(tokenizer))
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    with pytest.raises(UserError, match="sliding windows"):
        tiny_packed(tokenizer, "qwen2", **windows)(**batch)
    packed = tiny_packed(tokenizer)
    wrong = batch["position_ids"].clone()
    wrong[0, batch["cu_seqlens"][1]] = 0
    with pytest.raises(ValueError, match="go on at its prefix's length, 23: segment 1 starts at 0"):
        packed(**batch | {"position_ids": wrong})
    with pytest.raises(UserError, match="ring: use ulysses"):
        enable_sequence_parallel(packed, group_of(2, "ring"))
        packed(**batch)
