"""Rows with prefix trees: what the collators make of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.model_samples import mixed_segments, packed_batch, padded_batch
from helpers.tree_samples import tree, trees

from internvl_pack.batch.collate import PREFIX_ID


def test_a_tree_is_a_prefix_and_its_branches(tokenizer):
    one = tree(tokenizer, [("text", 3), ("image", 1), ("text", 1)], [2, 3])
    batch = packed_batch([one], image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"))
    assert batch["cu_seqlens"].tolist() == [0, 8, 11, 15]  # the prompt's last token begins each branch
    assert batch["position_ids"][0].tolist() == [*range(8), 8, 9, 10, 8, 9, 10, 11]
    assert batch["prefix_of"].tolist() == [-1, 0, 0] and batch["prefix_of"].dtype == torch.int32
    assert batch["sample_ids"] == [PREFIX_ID, one.sample_id, one.sample_id]
    assert batch["segment_tile_offsets"].tolist() == [0, 1, 1, 1]
    assert (batch["num_samples"], batch["num_segments"], batch["num_loss_tokens"]) == (1, 3, 5)
    assert batch["sum_squared_lengths"] == 8**2 + 3 * (3 + 16) + 4 * (4 + 16)


def test_twice_the_pairs_that_see_each_other_are_counted(tokenizer):
    batch = packed_batch(trees(tokenizer) + mixed_segments(tokenizer), pad_to=1000)
    bounds, prefix_of = batch["cu_seqlens"].tolist(), batch["prefix_of"].tolist()
    pairs = 0
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if batch["sample_ids"][number] != "<pad>":
            seen = (
                torch.ones(stop - start, stop - start).tril().sum() - (stop - start) / 2
            )  # a token sees half of itself
            before = bounds[prefix_of[number] + 1] - bounds[prefix_of[number]] if prefix_of[number] >= 0 else 0
            pairs += float(seen) + (stop - start) * before
    assert batch["sum_squared_lengths"] == 2 * pairs


@pytest.mark.parametrize("reduction", ["token", "sample", "square"])
def test_weights_are_those_of_the_answers_one_by_one(tokenizer, reduction):
    for seed, weights in enumerate([None, [0.5, 2.0]]):
        one = tree(tokenizer, [("text", 4), ("answer", 5), ("text", 3)], [4, 6], seed, weights)
        shared = packed_batch([one], loss_reduction=reduction)
        alone = padded_batch([one], loss_reduction=reduction)
        assert len(alone["input_ids"]) == 2 and "cu_seqlens" not in alone
        assert shared["loss_weight"].sum().item() == pytest.approx(alone["loss_weight"].sum().item(), rel=1e-6)
        ids, weight = (alone[k] for k in ("input_ids", "loss_weight"))
        n = one.num_prefix_tokens
        assert torch.equal(ids[0, :n], ids[1, :n])
        torch.testing.assert_close(shared["loss_weight"][0, :n], weight[:, :n].sum(0))
        assert alone["attention_mask"].sum().item() == len(one.input_ids) + n


def test_pairs_and_keys_name_the_answers(tokenizer):
    first, second = trees(tokenizer, "pair with an image", "several images, long prompt")
    batch = packed_batch([first, second], pairs=True, branch_keys=True)
    assert batch["pairs"].tolist() == [[1, 2], [4, 5]]
    keys = batch["branch_keys"]
    assert [bool(key) for key in keys] == [False, True, True] * 2 and len({*keys}) == 5
    assert packed_batch([second], branch_keys=True)["branch_keys"] == keys[3:]  # whatever else is in the row
    unpacked = padded_batch([first, second], pairs=True, branch_keys=True)
    assert unpacked["pairs"].tolist() == [[0, 1], [2, 3]]
    assert unpacked["branch_keys"] == [key for key in keys if key]
    pixels = first.tiles.copy()
    pixels[0, 0, 0, 0] ^= 1
    changed = tree(tokenizer, [("text", 5), ("image", 3), ("text", 6)], [7, 4], tiles=pixels)
    assert not {*packed_batch([changed], branch_keys=True)["branch_keys"]} & {*keys} - {""}
    assert packed_batch([], pairs=True)["pairs"].shape == (0, 2)
    with pytest.raises(ValueError, match="has 8 branches: a pair has two"):
        packed_batch(trees(tokenizer, "eight answers"), pairs=True)


def test_rewards_are_of_branches(tokenizer):
    one = tree(tokenizer, [("text", 3)], [2, 3])
    rewarded = tree(
        tokenizer,
        [("text", 3)],
        [2, 3],
        branches=tuple(b._replace(reward=r) for b, r in zip(one.branches, (1.0, 0.5), strict=True)),
    )
    assert "branch_rewards" not in packed_batch([one])
    np.testing.assert_equal(packed_batch([rewarded, one])["branch_rewards"].numpy(), [np.nan, 1, 0.5, *[np.nan] * 3])
    np.testing.assert_equal(padded_batch([rewarded])["branch_rewards"].numpy(), [1, 0.5])


def test_rows_without_trees_say_nothing_of_them(tokenizer):
    batch = packed_batch(mixed_segments(tokenizer))
    assert not {"prefix_of", "pairs", "branch_keys", "branch_rewards"} & batch.keys()


def test_pads_within_segments_are_refused(tokenizer):
    with pytest.raises(ValueError, match="pad_seq_to_mult 4 with prefix trees"):
        packed_batch(trees(tokenizer), pad_seq_to_mult=4)
