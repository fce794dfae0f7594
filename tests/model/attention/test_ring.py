"""The blocks of ring attention in one process: which there are, and that they add up."""

from __future__ import annotations

import pytest
import torch
from helpers.model_samples import relative_error
from helpers.sequence_groups import cumulative

from internvl_pack.model.attention import Row
from internvl_pack.model.attention.kernels import sdpa
from internvl_pack.model.attention.ring import joined, seen_parts


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
    monkeypatch.setattr(sdpa, "QUERY_ROWS", 7)
    monkeypatch.setattr(sdpa, "SHORT_ROWS", 6)
    torch.manual_seed(0)
    lengths, scale = [1, 20, 2, 3, 1, 9], 0.3
    parts = cumulative(lengths)
    both = cumulative([2 * n for n in lengths])
    fronts = torch.cat([torch.arange(n) + int(start) for n, start in zip(lengths, both, strict=False)])
    backs = torch.cat([torch.arange(n) + int(start) + n for n, start in zip(lengths, both, strict=False)])
    n = int(parts[-1])
    q, k, v = (torch.randn(2 * n, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    upstream = torch.randn(2 * n, 4, 8)
    expected = sdpa.run(q, k, v, Row(both, 2 * max(lengths), scale))
    gradients = torch.autograd.grad(expected, (q, k, v), upstream)

    half = [
        {"q": q[at].detach(), "k": k[at].detach(), "v": v[at].detach(), "do": upstream[at]} for at in (fronts, backs)
    ]
    own, other = (Row(parts, max(lengths), scale, causal=causal) for causal in (True, False))
    front = sdpa.forward(half[0]["q"], half[0]["k"], half[0]["v"], own)
    back = sdpa.forward(half[1]["q"], half[1]["k"], half[1]["v"], own)
    back = joined(*back, *sdpa.forward(half[1]["q"], half[0]["k"], half[0]["v"], other))
    out = torch.empty_like(expected)
    out[fronts], out[backs] = front[0], back[0]
    assert relative_error(out, expected.detach()) < 1e-6

    got = [torch.zeros_like(t) for t in (q, k, v)]
    places, results = (fronts, backs), (front, back)
    for mine, theirs, causal in seen_parts(0, 0):
        row = own if causal else other
        parts_of = sdpa.backward(
            half[mine]["do"], half[mine]["q"], half[theirs]["k"], half[theirs]["v"], *results[mine], row
        )
        for total, part, at in zip(got, parts_of, (places[mine], places[theirs], places[theirs]), strict=True):
            total[at] += part
    for ours, theirs_ in zip(got, gradients, strict=True):
        assert relative_error(ours, theirs_) < 1e-6
