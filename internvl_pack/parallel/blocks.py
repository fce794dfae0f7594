"""Attention between two equally long parts of the same segments, with its log-sum-exp: what ring attention is made of.

    forward(q, k, v, cu_seqlens, max_seqlen, scale, causal) -> out, lse
    backward(upstream, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, causal) -> dq, dk, dv

    q, out      (n, Hq, D)      one part of each segment
    k, v        (n, Hkv, D)     the same part of them (causal), or another (every query sees every key of its segment)
    lse         float32 (Hq, n) log of the sum of exp(scale * q.k) over the keys seen

`out` and `lse` in backward are those of all keys of the segment, not of this block alone: the probabilities then are
the block's share, and the gradients of the blocks add up to the exact ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..model.kernels import segment_lengths

QUERY_ROWS = 1024  # of one segment whose scores exist at once in the reference
SHORT_ROWS = 64  # of several segments together


@dataclass(frozen=True)
class Blocks:
    """Both halves, by the contract above."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


# --- flash-attn 2 ---------------------------------------------------------------------------------


def _flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_forward

    longest = max(max_seqlen, 2)  # for 1 it takes another way, with other layouts
    row = (cu_seqlens, cu_seqlens, longest, longest)
    out, lse, *_ = _wrapped_flash_attn_varlen_forward(q, k, v, *row, 0.0, scale, causal=causal)
    return out, lse


def _flash_backward(
    upstream: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_backward

    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    longest = max(max_seqlen, 2)
    row = (cu_seqlens, cu_seqlens, longest, longest)
    settings = (0.0, scale, causal, -1, -1, 0.0, None, False)
    _wrapped_flash_attn_varlen_backward(upstream, q, k, v, out, lse, dq, dk, dv, *row, *settings)
    return dq, dk, dv


# --- torch's own ----------------------------------------------------------------------------------


def _varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The flash-attn 2 kernel inside torch; torch.nn.attention.varlen calls it so."""
    longest = max(max_seqlen, 2)
    row = (cu_seqlens, cu_seqlens, longest, longest)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *row, 0.0, causal, False, scale=scale)
    return out, lse


def _varlen_backward(
    upstream: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    longest = max(max_seqlen, 2)
    row = (cu_seqlens, cu_seqlens, longest, longest)
    no_dropout = torch.zeros((2,), dtype=torch.uint64, device=q.device)
    settings = (0.0, causal, no_dropout, q.new_empty(0))
    dq, dk, dv = torch.ops.aten._flash_attention_backward(upstream, q, k, v, out, lse, *row, *settings, scale=scale)
    return dq, dk, dv


# --- the reference --------------------------------------------------------------------------------


def _reference_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(q)
    lse = torch.empty((q.shape[1], len(q)), dtype=torch.float32, device=q.device)
    for rows, keys, seen in _tiles_of_scores(cu_seqlens, causal):
        ks, vs = (_by_head(t[keys], q.shape[1]) for t in (k, v))
        scores = (_by_head(q[rows]) @ ks.mT).mul_(scale)
        if seen is not None:
            scores.masked_fill_(~seen.to(scores.device), -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        out[rows] = (scores.sub_(total).exp_() @ vs).transpose(0, 1).to(q.dtype)
        lse[:, rows] = total.squeeze(-1)
    return out, lse


def _reference_backward(
    upstream: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, kv_heads = q.shape[1], k.shape[1]
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v))
    for rows, keys, seen in _tiles_of_scores(cu_seqlens, causal):
        qs, o, do = (_by_head(t[rows]) for t in (q, out, upstream))
        ks, vs = (_by_head(t[keys], heads) for t in (k, v))
        p = (qs @ ks.mT).mul_(scale)
        if seen is not None:
            p.masked_fill_(~seen.to(p.device), -torch.inf)
        p.sub_(lse[:, rows].unsqueeze(-1)).exp_()
        ds = p * (do @ vs.mT - (do * o).sum(-1, keepdim=True)) * scale
        dq[rows] = (ds @ ks).transpose(0, 1).to(q.dtype)
        for total, part in ((dk, ds.mT @ qs), (dv, p.mT @ do)):
            total[keys] += part.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)
    return dq, dk, dv


def _tiles_of_scores(cu_seqlens: torch.Tensor, causal: bool) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Rows of queries, keys they see, and which of these, bool (rows, keys); None for all.

    A long segment is several tiles; short ones are one tile together, most of which is masked: fewer operations.
    """
    lengths = segment_lengths(cu_seqlens)
    start = first = 0
    while first < len(lengths):
        count, tokens = 1, lengths[first]
        while first + count < len(lengths) and tokens + lengths[first + count] <= SHORT_ROWS:
            tokens += lengths[first + count]
            count += 1
        together = slice(start, start + tokens)
        if count > 1:
            segment = torch.arange(count).repeat_interleave(torch.tensor(lengths[first : first + count]))
            seen = segment[:, None] == segment
            yield together, together, seen.tril() if causal else seen
        elif not causal:
            for row in range(0, tokens, QUERY_ROWS):
                yield slice(start + row, start + min(row + QUERY_ROWS, tokens)), together, None
        else:
            for row in range(0, tokens, QUERY_ROWS):
                last = min(row + QUERY_ROWS, tokens)
                seen = torch.ones(last - row, last, dtype=torch.bool).tril(row)
                yield slice(start + row, start + last), slice(start, start + last), seen
        start += tokens
        first += count


def _by_head(tokens: torch.Tensor, heads: int | None = None) -> torch.Tensor:
    """(n, H, D) as float32 (H, n, D), heads repeated to `heads`."""
    tokens = tokens.transpose(0, 1).float()
    return tokens if heads in (None, len(tokens)) else tokens.repeat_interleave(heads // len(tokens), 0)


#: By the name of the kernel (model/kernels.py); the names are checks.RING_KERNELS.
BLOCKS = {
    "flash_attn": Blocks(_flash_forward, _flash_backward),
    "varlen": Blocks(_varlen_forward, _varlen_backward),
    "sdpa": Blocks(_reference_forward, _reference_backward),
}
