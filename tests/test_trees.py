"""Prompts with several answers in one row: every answer's log-probabilities, as the prompt with it alone has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import native_samples as native
from helpers.model_samples import LOSS_TOLERANCE, SIZE, assert_same_gradients, gradients, plain_twin, tiny_packed

from internvl_pack.batch.row import Segment
from internvl_pack.model import parity
from internvl_pack.model.images import normalize_tiles
from internvl_pack.trees import Tree, logprobs, tree_batch


@pytest.fixture
def rollouts(tokenizer):
    image = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    torch.manual_seed(0)
    tiles = torch.randint(256, (2, 3, SIZE, SIZE), dtype=torch.uint8)
    first = Tree(prompt=[5, *[image] * 8, 9, 11], answers=[[7, 8, 9], [4], [3, 1, 4, 1, 5]], tiles=tiles)
    return [first, Tree(prompt=[12, 13], answers=[[7, 2], [9, 9]])]


def test_log_probabilities_are_those_of_each_answer_alone(tokenizer, rollouts):
    packed = tiny_packed(tokenizer)
    plain = plain_twin(packed)
    found = logprobs(packed, rollouts)
    upstream, total, number = torch.linspace(-1, 2, 8), 0.0, 0
    sum((branch * upstream[: len(branch)]).sum() for branch in found).backward()
    for tree in rollouts:
        for answer in tree.answers:
            ids = torch.tensor([[*tree.prompt, *answer]])
            pixels = None if tree.tiles is None else normalize_tiles(tree.tiles, torch.float32)
            logits = plain(input_ids=ids, pixel_values=pixels, use_cache=False).logits[0, -len(answer) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
            torch.testing.assert_close(found[number], expected, rtol=LOSS_TOLERANCE, atol=1e-6)
            total, number = total + (expected * upstream[: len(answer)]).sum(), number + 1
    assert number == len(found)
    total.backward()
    assert_same_gradients(gradients(packed.model), gradients(plain))


def test_a_batch_gives_the_same_as_its_trees(tokenizer, rollouts):
    packed = tiny_packed(tokenizer)
    with torch.no_grad():
        found, again = logprobs(packed, rollouts), logprobs(packed, tree_batch(rollouts))
    assert all(map(torch.equal, found, again)) and not found[0].requires_grad


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_so_they_are_with_pictures_of_native_resolution(family):
    tokenizer = native.native_tokenizer(family)
    packed = native.tiny_packed(tokenizer, family)
    plan = [("text", 4), ("image", (2, 3)), ("text", 2), ("image", (3, 1)), ("text", 3)]
    prompt = native.segment(tokenizer, family, plan)
    answers = [[7, 8, 9], [4], [3, 1, 4, 1]]
    with_images = Tree(
        prompt=prompt.input_ids.tolist(), answers=answers, tiles=prompt.tiles, image_grids=prompt.image_grids
    )
    assert tree_batch([with_images], picture_token_ids=packed.picture_token_ids)["position_ids"].ndim == 3
    with torch.no_grad():
        found = logprobs(packed, [Tree(prompt=[5, 6], answers=[[7, 2]]), with_images])
        plain, process = parity.own_model(packed), native.processor(family, tokenizer)
        for answer, got in zip(answers, found[1:], strict=True):
            ids = np.append(prompt.input_ids, answer).astype(np.int32)
            alone = Segment(
                "", (0, 1), ids, ids, prompt.tiles, prompt.tiles_per_image, 1, image_grids=prompt.image_grids
            )
            logits = plain(**parity.own_inputs(plain, alone, process), use_cache=False).logits[0, -len(answer) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
            torch.testing.assert_close(got, expected, rtol=LOSS_TOLERANCE, atol=1e-6)
    with pytest.raises(ValueError, match=r"tree 0: 9 tiles for image_grids \[\]"):
        logprobs(packed, [Tree(prompt=with_images.prompt, answers=answers, tiles=prompt.tiles)])
    with pytest.raises(ValueError, match="tree 0: image_grids are of a model of native resolution"):
        tree_batch([with_images])


def test_what_is_no_tree_is_refused(tokenizer):
    packed = tiny_packed(tokenizer)
    for tree, message in (
        (Tree(prompt=[1], answers=[[2]]), "a prompt of 1 tokens"),
        (Tree(prompt=[1, 2], answers=[]), "tree 0: no answers"),
        (Tree(prompt=[1, 2], answers=[[3], []]), "tree 0: an empty answer"),
        (Tree(prompt=[[1, 2]], answers=[[3]]), "tree 0: token ids of a prompt and of each answer are"),
        (Tree(prompt=[1, 2], answers=[3]), "tree 0: token ids of a prompt and of each answer are"),
        (Tree(prompt=[1, 2], answers=[[3]], tiles=torch.zeros(1, 3, 56, 56)), "tree 0: tiles of float32"),
    ):
        with pytest.raises(ValueError, match=message):
            logprobs(packed, [tree])
    with pytest.raises(ValueError, match="no rows"):
        logprobs(packed, [])
    image = packed.picture_token_ids[0]
    with pytest.raises(ValueError, match="tree 1: its prompt ends with an image's token"):
        logprobs(packed, [Tree(prompt=[1, 2], answers=[[3]]), Tree(prompt=[1, *[image] * 4], answers=[[3], [4]])])
    with pytest.raises(ValueError, match="the batch is padded"):
        logprobs(packed, {"input_ids": torch.zeros(1, 2)})


def test_a_model_that_shares_its_rows_is_refused_also_within_a_wrapper(tokenizer):
    packed, wrapper = tiny_packed(tokenizer), torch.nn.Module()
    wrapper.module, packed.sequence_group = packed, object()
    for model in (packed, wrapper):
        with pytest.raises(ValueError, match="shares them over a sequence group"):
            logprobs(model, [Tree(prompt=[1, 2], answers=[[3]])])
