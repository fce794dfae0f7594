"""Which ranks share a row, and a model that is set to."""

from __future__ import annotations

import pytest
from helpers.model_samples import padded_batch, text_segments, tiny_packed
from helpers.sequence_groups import group_of

from internvl_pack.errors import UserError
from internvl_pack.parallel.group import enable_sequence_parallel, group_ranks, make_groups


def test_groups_are_consecutive_ranks():
    assert group_ranks(8, 4) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert group_ranks(3, 1) == [(0,), (1,), (2,)]


def test_a_process_by_itself_is_a_group_of_one():
    group = make_groups(1, 1)
    assert (group.size, group.dp_rank, group.dp_world, group.process_group) == (1, 0, 1, None)


def test_a_model_takes_its_group_unless_its_heads_do_not_go(tokenizer, caplog):
    packed = tiny_packed(tokenizer)
    with pytest.raises(UserError, match="does not divide the language model's 4 attention heads"):
        enable_sequence_parallel(packed, group_of(3))
    assert packed.sequence_group is None
    enable_sequence_parallel(packed, group_of(3, "ring"))
    assert packed.sequence_group.size == 3
    with caplog.at_level("INFO"):
        enable_sequence_parallel(packed, group_of(4))
    assert "the 2 key/value heads are repeated 2 times for 4 ranks" in caplog.text
    enable_sequence_parallel(packed, group_of(1))
    assert packed.sequence_group is None


def test_padded_batches_are_not_cut(tokenizer):
    packed = tiny_packed(tokenizer)
    enable_sequence_parallel(packed, group_of(2))
    with pytest.raises(ValueError, match="cuts packed rows only"):
        packed(**padded_batch(text_segments(tokenizer)))
