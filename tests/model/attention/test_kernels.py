"""Kernels against a dense mask, and how those of other libraries are called."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from internvl_pack.model.attention import Row
from internvl_pack.model.attention.kernels import KERNELS, fa4, sdpa, varlen

ON_CPU = [name for name, kernel in KERNELS.items() if kernel.problem(torch.device("cpu")) is None]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def dense_reference(q, k, v, cu_seqlens, window):
    """Softmax over an explicit (N, N) mask, heads expanded; float64."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    n = len(q)
    segment = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    seen = (segment[:, None] == segment[None]) & (j <= i)
    if window is not None:
        seen &= j > i - window
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [5, 1, 7], [16], [2, 9, 3, 1]])
@pytest.mark.parametrize("name", ON_CPU)
def test_a_kernel_is_attention_under_a_block_mask(name, lengths, heads, window):
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    n, dim = sum(lengths), 8
    q, k, v = (torch.randn(n, h, dim, requires_grad=True) for h in (heads[0], heads[1], heads[1]))
    upstream = torch.randn(n, heads[0], dim)
    results = []
    for out in (
        KERNELS[name].run(q, k, v, Row(cu_seqlens, max(lengths), None, window)),
        dense_reference(q, k, v, cu_seqlens, window),
    ):
        results.append([out, *torch.autograd.grad((out * upstream).sum(), (q, k, v))])
    for got, expected in zip(*results, strict=True):
        assert (got - expected).abs().max() < 1e-5


def test_the_scale_is_the_callers():
    q, k, v = (torch.randn(3, 2, 8) for _ in range(3))
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    scaled = sdpa.run(q * 0.7 * 8**0.5, k, v, Row(bounds, 3))
    assert torch.allclose(sdpa.run(q, k, v, Row(bounds, 3, 0.7)), scaled, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3, 100])
def test_flash_attention_4_is_called_as_causal_with_or_without_a_window(monkeypatch, window):
    calls = []

    def like_4(q, k, v, **given):
        calls.append(given)
        return q, None

    monkeypatch.setattr(fa4, "varlen_func", lambda: like_4)
    q = torch.zeros(4, 2, 8)
    assert fa4.run(q, q, q, Row(int32(0, 4), 4, 0.5, window)) is q
    assert calls[0]["causal"] and calls[0]["softmax_scale"] == 0.5
    assert calls[0]["window_size"] == ((2, 0) if window == 3 else (None, None))


@pytest.mark.parametrize("window", [None, 3])
def test_the_written_out_gradient_of_the_reference_is_autograds(window):
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(12, heads, 16, generator=generator) for heads in (4, 2, 2, 4))
    row = Row(int32(0, 5, 6, 12), 6, 0.3, window)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(sdpa.run(*leaves, row), leaves, upstream)
    out, lse = sdpa.forward(q, k, v, row)
    for got, right in zip(sdpa.backward(upstream, q, k, v, out, lse, row), expected, strict=True):
        assert torch.allclose(got, right, atol=1e-5)


def test_torchs_kernel_is_called_as_causal_with_or_without_a_window(monkeypatch):
    calls = []

    def like_aten(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, mask, *, scale, window_size_left, **right):
        calls.append((causal, window_size_left, *right.values()))
        assert (max_q, max_k, dropout, mask, scale) == (4, 4, 0.0, False, 0.5)
        return torch.zeros_like(q), torch.zeros(2, 4), None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", like_aten)
    q, k = torch.zeros(4, 2, 8), torch.zeros(4, 1, 8)
    for window in (None, 2, 4):
        varlen.run(q, k, k, Row(int32(0, 4), 4, 0.5, window))
    varlen.forward(q, k, k, Row(int32(0, 4), 4, 0.5, causal=False))
    assert calls == [(True, -1, 0), (False, 1, 0), (True, -1, 0), (False, -1, -1)]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("lengths", [[1], [5, 1, 7], [70, 2, 9, 3, 1, 40]])
def test_the_log_sum_exp_of_the_reference_is_that_of_the_scores_seen(monkeypatch, lengths, window):
    monkeypatch.setattr(sdpa, "QUERY_ROWS", 16)
    torch.manual_seed(0)
    row = Row(torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), max(lengths), None, window)
    q, k, v = (torch.randn(sum(lengths), heads, 8) for heads in (4, 2, 2))
    out, lse = sdpa.forward(q, k, v, row)
    assert (out - dense_reference(q, k, v, row.cu_seqlens, window)).abs().max() < 1e-5
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 8**-0.5
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
    seen = (segment[:, None] == segment[None]) & (back >= 0) & (back < (window or len(q)))
    assert (lse - scores.masked_fill(~seen, -torch.inf).logsumexp(-1)).abs().max() < 1e-5
