"""FlashAttention 4 (`flash-attn-4`, compiled at first use): Hopper and Blackwell; for the vision tower's tiles too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .base import FLASH_HEADS, Gradients, Kernel, Row, needs_ampere


@functools.cache
def varlen_func() -> Callable | None:
    """FlashAttention 4's function; None where it is not installed."""
    try:  # its compiler's libraries are found, or not, only when it is imported
        from flash_attn.cute import flash_attn_varlen_func
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    return flash_attn_varlen_func


def run(q: Tensor, k: Tensor, v: Tensor, row: Row) -> Tensor:
    """Without a window `None` is what it takes for no limit."""
    attend = varlen_func()
    assert attend is not None, "checked by problem"
    limit = row.limit
    out = attend(
        q,
        k,
        v,
        cu_seqlens_q=row.cu_seqlens,
        cu_seqlens_k=row.cu_seqlens,
        max_seqlen_q=row.max_seqlen,
        max_seqlen_k=row.max_seqlen,
        softmax_scale=row.scale,
        causal=True,
        window_size=(None, None) if limit is None else (limit - 1, 0),
    )
    return out[0] if isinstance(out, tuple) else out


def forward(q: Tensor, k: Tensor, v: Tensor, row: Row) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=row.scale_of(q), return_lse=True, **_settings(row))
    return out, lse


def backward(upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, row: Row) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(q, k, v, out, upstream, lse, softmax_scale=row.scale_of(q), **_settings(row))[:3]


def _settings(row: Row) -> dict[str, Any]:
    limit = row.limit
    keys, longest_keys = row.keys
    return {
        "causal": row.causal,
        "cu_seqlens_q": row.cu_seqlens,
        "cu_seqlens_k": keys,
        "max_seqlen_q": row.max_seqlen,
        "max_seqlen_k": longest_keys,
        "window_size_left": None if limit is None else limit - 1,
        "window_size_right": None if limit is None else 0,
    }


def tiles_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=False, return_lse=True)
    return out, lse


def tiles_backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    into: tuple[Tensor, ...] | None = None,
) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv = into or (None, None, None)
    return _flash_attn_bwd(q, k, v, out, upstream, lse, softmax_scale=scale, causal=False, dq=dq, dk=dk, dv=dv)[:3]


def problem(device: torch.device) -> str | None:
    if reason := needs_ampere(device):
        return reason
    if torch.cuda.get_device_capability(device)[0] not in (9, 10, 11):
        return "needs a Hopper or Blackwell GPU: use --attn_kernel auto"
    if varlen_func() is None:
        return "needs FlashAttention 4: pip install --pre flash-attn-4, or use --attn_kernel auto"
    return None


KERNEL = Kernel(
    name="fa4",
    run=run,
    problem=problem,
    half_only=True,
    head_sizes=FLASH_HEADS,
    forward=forward,
    backward=backward,
    tiles_forward=tiles_forward,
    tiles_backward=tiles_backward,
)
