"""Attention sinks: each head has a logit that no key has, which takes a share of every query's probability (GPT-OSS).

No kernel of its own is needed. With the kernel's log-sum-exp `lse` of a query's scores and the head's sink s,

    lse' = log(exp(lse) + exp(s))        out' = out * exp(lse - lse')

and the kernel's own backward, given (out', lse'), makes the probabilities exp(score - lse'): gradients of q, k and v
are exact. That of the sink is minus the sum over queries of exp(s - lse') * (gradient of out' . out').
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import Kernel, Row, attend, attend_backward, settings_of


def attend_with_sinks(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, row: Row) -> Tensor:
    """The kernel contract with sinks (Hq,), whose gradient is float32 in between; in a compiled layer too."""
    assert kernel.forward is not None and kernel.backward is not None, "a kernel with its two halves"
    settings = settings_of(kernel, q, row)
    return _WithSinks.apply(q.contiguous(), k.contiguous(), v.contiguous(), sinks, row.cu_seqlens, *settings)


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens: Tensor, *settings: Any) -> Tensor:
        out, lse = attend(q, k, v, cu_seqlens, *settings)
        total = torch.logaddexp(lse, sinks.float()[:, None])  # (Hq, N)
        out = (out * (lse - total).exp().mT[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total, sinks, cu_seqlens)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = upstreams
        q, k, v, out, total, sinks, cu_seqlens = ctx.saved_tensors
        dq, dk, dv = attend_backward(upstream.contiguous(), q, k, v, out, total, cu_seqlens, *ctx.settings)
        share = (sinks.float()[:, None] - total).exp()  # of each query's probability that went to the sink
        dsinks = -(share * (upstream.float() * out.float()).sum(dim=-1).mT).sum(dim=1)
        return dq, dk, dv, dsinks.to(sinks.dtype), None, *[None] * len(ctx.settings)


def masked_attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, scale: float, window: int | None
) -> Tensor:
    """Written out, for padded batches and generation, which have masks and no boundaries.

    Args:
        q: (B, Hq, N, D); k, v: (B, Hkv, M, D), of which the last N are the queries' own.
        mask: bool or added, (B, 1, N, M); None for causality alone, within the window.

    Returns:
        (B, N, Hq, D).
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = (q @ k.mT).float() * scale
    if mask is None:
        ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = ones.tril(k.shape[2] - q.shape[2])
        mask = mask if window is None else mask.triu(k.shape[2] - q.shape[2] + 1 - window)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    with_sink = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    return (with_sink.softmax(dim=-1)[..., :-1].to(v.dtype) @ v).transpose(1, 2)
