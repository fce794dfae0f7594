"""Parts of sequence parallelism in one process: checks, slices, blocks of attention."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from model_samples import padded_batch, relative_error, text_segments, tiny_packed

from internvl_pack.errors import UserError
from internvl_pack.model import kernels
from internvl_pack.parallel import blocks, checks
from internvl_pack.parallel.group import SequenceGroup, enable_sequence_parallel, group_ranks, make_groups
from internvl_pack.parallel.ring import joined, seen_parts
from internvl_pack.parallel.slices import count_slice_targets, row_slice, tiles_a_rank


def group_of(size, mode="ulysses", rank=0):
    ranks = tuple(range(size))
    return SequenceGroup(process_group=None, rank=rank, size=size, mode=mode, ranks=ranks, dp_rank=0, dp_world=1)


# --- groups and checks ----------------------------------------------------------------------------


def test_groups_are_consecutive_ranks():
    assert group_ranks(8, 4) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert group_ranks(3, 1) == [(0,), (1,), (2,)]


def test_a_process_by_itself_is_a_group_of_one():
    group = make_groups(1, 1)
    assert (group.size, group.dp_rank, group.dp_world, group.process_group) == (1, 0, 1, None)


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
    "kernel": (lambda: checks.check_kernel("flex", 2, "ring"), ["--attn_kernel flex", "ulysses"]),
    "padded": (lambda: checks.check_packed(False, 2), ["--use_packed_ds False"]),
    "window": (
        lambda: checks.check_window(SimpleNamespace(layer_types=["sliding_attention"], sliding_window=9), 2, "ring"),
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
    checks.check_budget(8190, 1, "ring")
    checks.check_kernel("flex", 2, "ulysses")
    checks.check_kernel("flash_attn", 2, "ring")
    checks.check_packed(False, 1)
    checks.check_window(SimpleNamespace(layer_types=["full_attention"], sliding_window=9), 2, "ring")
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


# --- slices ---------------------------------------------------------------------------------------

ROWS = ([1], [2], [5, 1, 1, 8], [16, 16], [1, 1, 1], [3, 64, 2, 7, 40], [7])


def cumulative(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("mode", checks.MODES)
@pytest.mark.parametrize("size", (2, 3, 4, 8))
def test_every_token_is_in_one_slice_and_slices_are_equally_long(mode, size):
    for lengths in ROWS:
        bounds = cumulative(lengths)
        slices = [row_slice(bounds, max(lengths), rank, size, mode, "cpu") for rank in range(size)]
        assert len({len(s.places) for s in slices}) == 1
        real = [s.places if s.is_pad is None else s.places[~s.is_pad] for s in slices]
        assert sorted(torch.cat(real).tolist()) == list(range(sum(lengths)))
        for s, own in zip(slices, real, strict=True):
            back = s.inverse(sum(lengths))
            assert s.places[back[own]].tolist() == own.tolist()
            assert int((back < len(s.places)).sum()) == len(own)
            covered = len(s.places) * (size if mode == "ulysses" else 1) // (2 if mode == "ring" else 1)
            assert s.cu_seqlens[-1] == covered and s.max_seqlen == int(s.cu_seqlens.diff().max())


def test_zigzag_as_drawn():
    bounds = cumulative([4, 4])
    assert [row_slice(bounds, 4, rank, 2, "ring", "cpu").places.tolist() for rank in (0, 1)] == [
        [0, 4, 3, 7],
        [1, 5, 2, 6],
    ]


def test_aligned_rows_have_no_pads():
    assert row_slice(cumulative([8, 16]), 16, 0, 4, "ring", "cpu").is_pad is None
    assert row_slice(cumulative([3, 9]), 9, 0, 4, "ulysses", "cpu").is_pad is None
    assert row_slice(cumulative([8, 15]), 15, 0, 4, "ring", "cpu").is_pad is not None


@pytest.mark.parametrize("size", (2, 3, 4, 8))
def test_zigzag_gives_each_rank_the_same_attention(size):
    lengths = [2 * size * n for n in (1, 5, 3)]
    position = torch.cat([torch.arange(n) for n in lengths])
    seen = []
    for rank in range(size):
        places = row_slice(cumulative(lengths), max(lengths), rank, size, "ring", "cpu").places
        seen.append(int((position[places] + 1).sum()))  # keys of each query
    assert len(set(seen)) == 1


def test_targets_of_the_slices_are_counted_on_the_host():
    labels = torch.tensor([[-100, 5, 6, -100, -100, 7, 8, 9, -100]])
    batch = {"labels": labels, "cu_seqlens": cumulative([4, 5]), "max_seqlen": 5}
    for mode, size in itertools.product(checks.MODES, (2, 4)):
        groups = [group_of(size, mode, rank) for rank in range(size)]
        assert sum(count_slice_targets(batch, group) for group in groups) == 5


def test_tiles_are_shared_out_whole():
    for tiles, size in itertools.product(range(1, 20), (2, 4, 8)):
        share = tiles_a_rank(tiles, size)
        assert share == max(len(range(tiles)[rank * share : (rank + 1) * share]) for rank in range(size))
        assert share * size >= tiles


# --- the model ------------------------------------------------------------------------------------


def test_a_model_is_told_of_its_group_unless_its_heads_do_not_go(tokenizer, caplog):
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


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", (2, 3, 5))
def test_the_blocks_of_all_steps_are_the_causal_mask(size):
    for rank in range(size):
        mine = (rank, 2 * size - 1 - rank)
        seen = []
        for step in range(size):
            other = (rank - step) % size
            theirs = (other, 2 * size - 1 - other)
            seen += [(mine[m], theirs[t], causal) for m, t, causal in seen_parts(step, rank)]
        expected = {(q, k, q == k) for q in mine for k in range(2 * size) if k <= q}
        assert len(seen) == len(set(seen)) and set(seen) == expected


def test_reference_blocks_add_up_to_attention_and_its_gradient(monkeypatch):
    monkeypatch.setattr(blocks, "QUERY_ROWS", 7)
    monkeypatch.setattr(blocks, "SHORT_ROWS", 6)
    torch.manual_seed(0)
    lengths, scale = [1, 20, 2, 3, 1, 9], 0.3
    parts = cumulative(lengths)
    both = cumulative([2 * n for n in lengths])
    fronts = torch.cat([torch.arange(n) + int(start) for n, start in zip(lengths, both, strict=False)])
    backs = torch.cat([torch.arange(n) + int(start) + n for n, start in zip(lengths, both, strict=False)])
    n = int(parts[-1])
    q, k, v = (torch.randn(2 * n, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    upstream = torch.randn(2 * n, 4, 8)
    expected = kernels.sdpa(q, k, v, both, 2 * max(lengths), scale, None)
    gradients = torch.autograd.grad(expected, (q, k, v), upstream)

    half = [
        {"q": q[at].detach(), "k": k[at].detach(), "v": v[at].detach(), "do": upstream[at]} for at in (fronts, backs)
    ]
    reference, row = blocks.BLOCKS["sdpa"], (parts, max(lengths), scale)
    front = reference.forward(half[0]["q"], half[0]["k"], half[0]["v"], *row, True)
    back = reference.forward(half[1]["q"], half[1]["k"], half[1]["v"], *row, True)
    back = joined(*back, *reference.forward(half[1]["q"], half[0]["k"], half[0]["v"], *row, False))
    out = torch.empty_like(expected)
    out[fronts], out[backs] = front[0], back[0]
    assert relative_error(out, expected.detach()) < 1e-6

    got = [torch.zeros_like(t) for t in (q, k, v)]
    places, results = (fronts, backs), (front, back)
    for mine, theirs, causal in seen_parts(0, 0):
        parts_of = reference.backward(
            half[mine]["do"], half[mine]["q"], half[theirs]["k"], half[theirs]["v"], *results[mine], *row, causal
        )
        for total, part, at in zip(got, parts_of, (places[mine], places[theirs], places[theirs]), strict=True):
            total[at] += part
    for ours, theirs_ in zip(got, gradients, strict=True):
        assert relative_error(ours, theirs_) < 1e-6
