"""Tokens that make a row's length one of few: who gets them, and that they change nothing."""

from __future__ import annotations

import pytest
import torch
from helpers.model_samples import (
    assert_same_gradients,
    gradients,
    mixed_segments,
    packed_batch,
    relative_error,
    tiny_packed,
)
from helpers.tree_samples import trees

from internvl_pack.model.fill_row import MULTIPLE, fill_row
from internvl_pack.parallel.slices import RowSlice


@pytest.mark.parametrize(("rows", "tokens", "filled"), [(1, 1, 16), (1, 32, 32), (3, 20, 32), (4, 9, 12), (16, 5, 5)])
def test_a_row_is_filled_up_to_a_multiple(rows, tokens, filled):
    states, positions = torch.ones(rows, tokens, 8), torch.arange(tokens).expand(rows, -1)
    boundaries = torch.tensor([0, tokens], dtype=torch.int32) if rows == 1 else None
    mask = None if rows == 1 else torch.ones(rows, tokens)
    part = RowSlice.whole(boundaries, tokens if rows == 1 else None)
    states, positions, part, mask = fill_row(states, positions, part, mask, 16)
    assert states.shape[:2] == positions.shape == (rows, filled)
    assert rows * filled % 16 == 0
    assert states[:, :tokens].min() == 1 and not states[:, tokens:].any()
    if rows == 1:
        assert part.cu_seqlens.tolist() == sorted({0, tokens, filled})
        assert part.max_seqlen == max(tokens, filled - tokens)
    else:
        assert mask.sum() == rows * tokens


def test_positions_by_time_height_and_width_are_filled_too():
    states, positions = torch.ones(1, 5, 8), torch.arange(5).expand(3, 1, 5)
    _, positions, part, _ = fill_row(states, positions, RowSlice.whole(torch.tensor([0, 5]), 5), None, 8)
    assert positions.tolist() == [[[0, 1, 2, 3, 4, 0, 1, 2]]] * 3
    assert part.cu_seqlens.tolist() == [0, 5, 8]


@pytest.mark.parametrize("made", [mixed_segments, trees])
def test_a_compiled_model_sees_few_lengths_and_gives_the_same(tokenizer, made):
    """The mark alone: what the compiler makes of it is test_compiled.py's."""
    plain, filled = tiny_packed(tokenizer), tiny_packed(tokenizer)
    filled.is_compiled = True
    row = packed_batch(made(tokenizer))
    assert row["input_ids"].shape[1] % MULTIPLE
    seen = []
    filled.language_model.norm.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[1]))
    for packed in (plain, filled):
        packed.loss = packed(**row).loss
        packed.loss.backward()
    assert seen[0] == row["input_ids"].shape[1] + -row["input_ids"].shape[1] % MULTIPLE
    assert relative_error(filled.loss, plain.loss) < 1e-6
    assert_same_gradients(gradients(filled), gradients(plain))
