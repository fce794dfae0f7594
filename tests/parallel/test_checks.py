"""What sequence parallelism refuses, and in which words."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from internvl_pack.errors import UserError
from internvl_pack.parallel import checks

REFUSED = {
    "world": (lambda: checks.check_world(6, 4), ["--sequence_parallel_size 4", "6 processes"]),
    "size": (lambda: checks.check_world(6, 0), ["--sequence_parallel_size 0"]),
    "mode": (lambda: checks.check_mode("zigzag"), ["--sequence_parallel_mode 'zigzag'", "ulysses or ring"]),
    "heads": (lambda: checks.check_heads(14, 2, 4, "ulysses"), ["14 attention heads", "--sequence_parallel_mode ring"]),
    "budget": (lambda: checks.check_budget(8190, 4, "ulysses"), ["--max_packed_tokens 8190", "use 8188 or 8192"]),
    "ring budget": (lambda: checks.check_budget(8188, 4, "ring"), ["multiple of 8", "ring", "use 8184 or 8192"]),
    "budget and alignment": (
        lambda: checks.check_budget(8192, 2, "ring", 6),
        ["multiple of 12", "--pad_to_multiple_of 6", "use 8184 or 8196"],
    ),
    "small budget": (lambda: checks.check_budget(7, 4, "ring"), ["--max_packed_tokens 7", "use 8"]),
    "kernel": (lambda: checks.check_kernel("flex", "ring"), ["--attn_kernel flex", "ulysses"]),
    "padded": (lambda: checks.check_packed(False, 2), ["--use_packed_ds False"]),
    "window": (
        lambda: checks.check_window(SimpleNamespace(layer_types=["sliding_attention"], sliding_window=9), "ring"),
        ["sliding windows (9 tokens)", "ulysses"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_is_refused_in_one_line_that_names_the_options(name):
    call, words = REFUSED[name]
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_what_goes_is_not_refused():
    checks.check_world(8, 4)
    checks.check_budget(8192, 4, "ring", 16)
    checks.check_kernel("flex", "ulysses")
    checks.check_kernel("flash_attn", "ring")
    checks.check_packed(True, 2)
    checks.check_window(SimpleNamespace(layer_types=["full_attention"], sliding_window=9), "ring")
    assert checks.check_heads(28, 4, 4, "ulysses") is None
    assert checks.check_heads(14, 2, 4, "ring") is None
    assert "4 key/value heads are repeated 7 times for 14 ranks" in checks.check_heads(28, 4, 14, "ulysses")


def test_key_value_heads_are_repeated_as_seldom_as_the_ranks_allow():
    for kv_heads, group, size in itertools.product((1, 2, 3, 4), (1, 2, 3, 7), (1, 2, 3, 4, 7, 14)):
        heads = kv_heads * group
        if heads % size:
            continue
        copies = checks.kv_copies(heads, kv_heads, size)
        each, kv_each = heads // size, kv_heads * copies // size
        for rank in range(size):  # the copies that a rank has are the ones its query heads read, in groups
            read = [head // group for head in range(rank * each, (rank + 1) * each)]
            there = [copy // copies for copy in range(rank * kv_each, (rank + 1) * kv_each)]
            assert read == [there[i // (each // kv_each)] for i in range(each)]
