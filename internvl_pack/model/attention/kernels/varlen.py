"""torch.nn.attention.varlen: the flash-attn 2 kernel inside torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from .base import Gradients, Kernel, Row, needs_ampere
from .flash_attn import bounds


@functools.cache
def varlen_attn() -> tuple[Callable, bool]:
    """torch's function, and whether grouped heads must be announced (torch 2.13; 2.11 just takes them)."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def run(q: Tensor, k: Tensor, v: Tensor, row: Row) -> Tensor:
    """Causal is a window of (-1, 0)."""
    attend, announce = varlen_attn()
    grouped = {"enable_gqa": True} if announce and q.shape[1] != k.shape[1] else {}
    at = (row.cu_seqlens, row.cu_seqlens, row.max_seqlen, row.max_seqlen)
    return attend(q, k, v, *at, scale=row.scale, window_size=row.flash_window, **grouped)


def forward(q: Tensor, k: Tensor, v: Tensor, row: Row) -> tuple[Tensor, Tensor]:
    """As torch.nn.attention.varlen calls it."""
    settings = (0.0, row.causal and row.limit is None, False)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *bounds(row), *settings, **_options(q, row))
    return out, lse


def backward(upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, row: Row) -> Gradients:
    no_dropout = torch.zeros((2,), dtype=torch.uint64, device=q.device)
    settings = (0.0, row.causal and row.limit is None, no_dropout, q.new_empty(0))
    return torch.ops.aten._flash_attention_backward(
        upstream, q, k, v, out, lse, *bounds(row), *settings, **_options(q, row)
    )


def _options(q: Tensor, row: Row) -> dict[str, float | int]:
    left, right = row.flash_window
    return {"scale": row.scale_of(q), "window_size_left": left, "window_size_right": right}


KERNEL = Kernel(name="varlen", run=run, problem=needs_ampere, half_only=True, forward=forward, backward=backward)
