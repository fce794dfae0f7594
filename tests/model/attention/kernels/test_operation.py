"""Attention as one operation: what it gives is what the kernel gives, its gradient too."""

from __future__ import annotations

import pytest
import torch

from internvl_pack.model.attention.kernels import KERNELS, Row, attend, attend_row


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(12, heads, 16, generator=generator, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("window", [None, 3])
def test_the_operation_and_its_gradient_are_those_of_the_kernel(window):
    q, k, v = inputs()
    row = Row(torch.tensor([0, 5, 6, 12], dtype=torch.int32), 6, 0.3, window)
    kernel, upstream = KERNELS["sdpa"], torch.randn(12, 4, 16)
    results = []
    for out in (attend_row(kernel, q, k, v, row)[0], kernel.run(q, k, v, row)):
        results.append([out, *torch.autograd.grad(out, (q, k, v), upstream)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    settings = (row.cu_seqlens, row.max_seqlen, row.scale, window or 0, True, kernel.name)
    torch.library.opcheck(attend, (q, k, v, *settings), test_utils=("test_schema", "test_faketensor"))


def test_scores_are_float32_under_autocast():
    q, k, v = inputs()
    row = Row(torch.tensor([0, 12], dtype=torch.int32), 12)
    expected = attend_row(KERNELS["sdpa"], q, k, v, row)
    gradients = torch.autograd.grad(expected[0].sum(), (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        got = attend_row(KERNELS["sdpa"], q, k, v, row)
        ours = torch.autograd.grad(got[0].sum(), (q, k, v))
    for one, two in zip((*got, *ours), (*expected, *gradients), strict=True):
        assert torch.equal(one, two)
