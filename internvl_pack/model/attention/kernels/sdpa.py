"""Attention a segment at a time in PyTorch's own operations: the reference, and the CPU's kernel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .base import Gradients, Kernel, Row

QUERY_ROWS = 1024  # of one segment whose scores exist at once
SHORT_ROWS = 64  # of several segments together


def run(q: Tensor, k: Tensor, v: Tensor, row: Row) -> Tensor:
    """PyTorch's SDPA on each segment by itself; any dtype, any device, forward and backward.

    The row is split once rather than sliced per segment: the gradient of S slices of an N-token row
    costs S * N, that of one split costs N.
    """
    lengths = segment_lengths(row.cu_seqlens)
    grouped = q.shape[1] != k.shape[1]
    outputs = []
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        mask = None
        if row.window is not None and row.window < len(qs):
            mask = _seen_keys(0, len(qs), row.window).to(q.device)
        qs, ks, vs = (t.transpose(0, 1).unsqueeze(0) for t in (qs, ks, vs))
        out = F.scaled_dot_product_attention(
            qs, ks, vs, attn_mask=mask, is_causal=mask is None, scale=row.scale, enable_gqa=grouped
        )
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def forward(q: Tensor, k: Tensor, v: Tensor, row: Row) -> tuple[Tensor, Tensor]:
    """SDPA gives no log-sum-exp: the scores are written out, in float32, some queries at a time."""
    out = torch.empty_like(q)
    lse = torch.empty((q.shape[1], len(q)), dtype=torch.float32, device=q.device)
    for rows, keys, seen in _tiles_of_scores(row):
        ks, vs = (_by_head(t[keys], q.shape[1]) for t in (k, v))
        scores = _scores(_by_head(q[rows]), ks, row.scale_of(q), seen)
        total = scores.logsumexp(-1, keepdim=True)
        out[rows] = (scores.sub_(total).exp_() @ vs).transpose(0, 1).to(q.dtype)
        lse[:, rows] = total.squeeze(-1)
    return out, lse


def backward(upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, row: Row) -> Gradients:
    heads, kv_heads, scale = q.shape[1], k.shape[1], row.scale_of(q)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v))
    for rows, keys, seen in _tiles_of_scores(row):
        qs, o, do = (_by_head(t[rows]) for t in (q, out, upstream))
        ks, vs = (_by_head(t[keys], heads) for t in (k, v))
        p = _scores(qs, ks, scale, seen).sub_(lse[:, rows].unsqueeze(-1)).exp_()
        ds = p * (do @ vs.mT - (do * o).sum(-1, keepdim=True)) * scale
        dq[rows] = (ds @ ks).transpose(0, 1).to(q.dtype)
        for total, part in ((dk, ds.mT @ qs), (dv, p.mT @ do)):
            total[keys] += part.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, scale: float, seen: Tensor | None) -> Tensor:
    scores = (q @ k.mT).mul_(scale)
    return scores if seen is None else scores.masked_fill_(~seen.to(scores.device), -torch.inf)


def _tiles_of_scores(row: Row) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Rows of queries, keys they see, and which of these, bool (rows, keys); None for all.

    A long segment is several tiles; short ones are one tile together, most of which is masked: fewer operations.
    """
    lengths = segment_lengths(row.cu_seqlens)
    if row.key_cu_seqlens is not None:
        start = first_key = 0
        for length, keys in zip(lengths, segment_lengths(row.key_cu_seqlens), strict=True):
            for at in range(start, start + length, QUERY_ROWS):
                yield slice(at, min(at + QUERY_ROWS, start + length)), slice(first_key, first_key + keys), None
            start, first_key = start + length, first_key + keys
        return
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
            yield together, together, seen & _seen_keys(0, tokens, row.window) if row.causal else seen
        elif not row.causal:
            for at in range(0, tokens, QUERY_ROWS):
                yield slice(start + at, start + min(at + QUERY_ROWS, tokens)), together, None
        else:
            for at in range(0, tokens, QUERY_ROWS):
                last = min(at + QUERY_ROWS, tokens)
                yield slice(start + at, start + last), slice(start, start + last), _seen_keys(at, last, row.window)
        start += tokens
        first += count


def _seen_keys(first: int, last: int, window: int | None) -> Tensor:
    """bool (last - first, last): True where query i, from `first` on, sees key j, i - window < j <= i."""
    seen = torch.ones(last - first, last, dtype=torch.bool).tril(first)
    return seen if window is None else seen.triu(first + 1 - window)


def _by_head(tokens: Tensor, heads: int | None = None) -> Tensor:
    """(n, H, D) as float32 (H, n, D), heads repeated to `heads`."""
    tokens = tokens.transpose(0, 1).float()
    return tokens if heads in (None, len(tokens)) else tokens.repeat_interleave(heads // len(tokens), 0)


_lengths_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def segment_lengths(cu_seqlens: Tensor) -> list[int]:
    """Host lengths of the segments; asked of the device once a row, not once a layer."""
    if cu_seqlens.device.type == "cpu":
        return cu_seqlens.diff().tolist()
    if cu_seqlens not in _lengths_of:
        _lengths_of[cu_seqlens] = cu_seqlens.diff().tolist()
    return _lengths_of[cu_seqlens]


KERNEL = Kernel(
    name="sdpa",
    run=run,
    problem=lambda device: None,
    half_only=False,
    forward=forward,
    backward=backward,
)
