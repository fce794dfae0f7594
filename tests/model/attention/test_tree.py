"""Attention of prefix trees: kernels against a dense mask in float64, and what the links say."""

from __future__ import annotations

import pytest
import torch
from helpers.sequence_groups import cumulative

from internvl_pack.model.attention import Row, tree_links
from internvl_pack.model.attention.kernels import KERNELS
from internvl_pack.model.attention.tree import attend_trees

SEGMENTS = ((5, -1), (9, -1), (3, 1), (1, 1), (7, 1), (2, -1), (1, 5), (4, -1), (1, -1), (6, 8), (80, 8))
LENGTHS, PREFIX_OF = zip(*SEGMENTS, strict=True)


def seen_by_definition() -> torch.Tensor:
    """bool (N, N): which key each query sees."""
    segment = torch.tensor([n for n, length in enumerate(LENGTHS) for _ in range(length)])
    prefix = torch.tensor([PREFIX_OF[n] for n in segment.tolist()])
    own = (segment[:, None] == segment) & torch.ones(len(segment), len(segment), dtype=torch.bool).tril()
    return own | (prefix[:, None] == segment)


def dense(q, k, v, scale):
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(~seen_by_definition(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def test_branches_see_their_prefix_and_themselves():
    torch.manual_seed(0)
    n = sum(LENGTHS)
    exact = [torch.randn(n, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    upstream = torch.randn(n, 4, 8, dtype=torch.float64)
    expected = dense(*exact, 0.3)
    expected.backward(upstream)
    bounds = cumulative(LENGTHS)
    links = tree_links(bounds, torch.tensor(PREFIX_OF, dtype=torch.int32), "cpu")
    got = [t.detach().float().requires_grad_() for t in exact]
    out = attend_trees(KERNELS["sdpa"], *got, Row(bounds, max(LENGTHS), 0.3), links)
    out.backward(upstream.float())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(got, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=2e-6)


def test_the_links_of_a_row():
    links = tree_links(cumulative(LENGTHS), torch.tensor(PREFIX_OF, dtype=torch.int32), "cpu")
    assert links.cu_branches.tolist() == [0, 11, 12, 98] and links.cu_prefixes.tolist() == [0, 9, 11, 12]
    assert (links.max_branches, links.max_prefix) == (86, 9)
    assert links.prefix_places.tolist() == [*range(5, 14), 25, 26, 32]
    assert links.branch_places.tolist() == [*range(14, 25), 27, *range(33, 119)]
    assert tree_links(cumulative([3, 4]), torch.tensor([-1, -1], dtype=torch.int32), "cpu") is None


@pytest.mark.parametrize("prefix_of", [[0, -1, -1], [-1, -1, 0], [-1, 0, 1], [-1, 0], [1, -1, 1]])
def test_branches_that_do_not_follow_their_prefix_are_refused(prefix_of):
    with pytest.raises(ValueError, match="prefix_of"):
        tree_links(cumulative([2, 3, 4]), torch.tensor(prefix_of, dtype=torch.int32), "cpu")


def test_a_sliding_window_is_refused():
    bounds = cumulative([2, 3])
    links = tree_links(bounds, torch.tensor([-1, 0], dtype=torch.int32), "cpu")
    q = torch.randn(5, 1, 8)
    with pytest.raises(ValueError, match="sliding window of 2 tokens"):
        attend_trees(KERNELS["sdpa"], q, q, q, Row(bounds, 3, None, 2), links)
