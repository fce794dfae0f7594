"""Boundaries of rows against the table of bad ones, and rows whose parts do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.model_samples import mixed_segments, packed_batch, text_segments, tiny_packed

from internvl_pack.model.attention import (
    validate_cu_seqlens,
)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("cu_seqlens", "num_tokens", "max_seqlen"),
    [
        (int32(0, 5, 6, 13), 13, 7),
        (int32(0, 5, 6, 13, 16), 16, 7),  # a pad segment of its own
        (int32(0, 1, 2, 3), 3, 1),
        (int32(0, 7), 7, 7),
        (np.array([0, 3, 5], dtype=np.int32), 5, None),
    ],
)
def test_good_boundaries_pass(cu_seqlens, num_tokens, max_seqlen):
    validate_cu_seqlens(cu_seqlens, num_tokens, max_seqlen)


@pytest.mark.parametrize(
    ("cu_seqlens", "num_tokens", "max_seqlen", "message"),
    [
        (int32(0, 5, 6, 13), 16, 7, "ends at 13, the row has 16 tokens: give the rest a pad segment"),
        (int32(0), 0, None, "has no segment"),
        (int32(0, 4, 4, 7), 7, 4, r"segment 1 from 4 to 4 is empty \(repeated boundary\)"),
        (int32(0, 5, 3, 7), 7, 5, "segment 1 from 5 to 3 runs backwards"),
        (int32(1, 5), 5, 4, "must start at 0, starts at 1"),
        (torch.tensor([0, 7]), 7, 7, "must be int32, is int64"),
        (torch.tensor([0.0, 7.0]), 7, 7, "must be int32, is float32"),
        (int32(0, 7), 7, torch.tensor(7), "max_seqlen must be a Python int, is Tensor"),
        (int32(0, 7), 7, np.int64(7), "max_seqlen must be a Python int, is int64"),
        (int32(0, 5, 7), 7, 7, "max_seqlen is 7, the longest segment has 5 tokens"),
        (np.array([0, 2**30, 2**31, 3 * 2**30]), 3 * 2**30, 2**30, "must be int32, is int64"),
        (np.array([0, 2**30, 2**31, 3 * 2**30]).astype(np.int32), 3 * 2**30, 2**30, "has wrapped around int32"),
        (int32(0, 7)[None], 7, 7, "must be an int32 vector"),
        ([0, 7], 7, 7, "must be an int32 vector"),
    ],
)
def test_bad_boundaries_say_what_is_wrong(cu_seqlens, num_tokens, max_seqlen, message):
    with pytest.raises(ValueError, match=message):
        validate_cu_seqlens(cu_seqlens, num_tokens, max_seqlen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_ids": torch.arange(5)[None]}, "position_ids is .1, 5., input_ids is"),
        ({"loss_weight": torch.ones(1, 3)}, "loss_weight is .1, 3., input_ids is"),
        ({"max_seqlen": None}, "a pack needs max_seqlen"),
        ({"position_ids": None}, "a pack needs max_seqlen .* and position_ids"),
        ({"attention_mask": "ones"}, "leave the mask out"),
        ({"position_ids": "row"}, "position_ids must restart at 0: segment 1 starts at"),
        ({"pixel_values": torch.zeros(1, 3, 56, 56, dtype=torch.uint8)}, "0 image tokens .* for 1 tiles of 4 tokens"),
        ({"num_loss_tokens": 1}, "was counted to hold 1"),
    ],
)
def test_a_row_whose_parts_do_not_fit_is_refused(tokenizer, change, message):
    batch = packed_batch(text_segments(tokenizer))
    n = batch["num_tokens"]
    named = {"ones": torch.ones(1, n), "row": torch.arange(n)[None]}
    change = {key: named[value] if isinstance(value, str) else value for key, value in change.items()}
    with pytest.raises(ValueError, match=message):
        tiny_packed(tokenizer)(**(batch | change))


def test_missing_tiles_and_tiles_of_another_size_are_refused(tokenizer):
    packed = tiny_packed(tokenizer)
    batch = packed_batch(mixed_segments(tokenizer))
    with pytest.raises(ValueError, match=r"28 image tokens .* for 6 tiles of 4 tokens"):
        packed(**(batch | {"pixel_values": batch["pixel_values"][1:]}))
    with pytest.raises(ValueError, match=r"tiles of \(28, 28\), the model's are \(56, 56\)"):
        packed(**(batch | {"pixel_values": batch["pixel_values"][..., ::2, ::2]}))
