"""flash-attn 2, the package."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .base import FLASH_HEADS, Gradients, Kernel, Row, needs_ampere


@functools.cache
def varlen_func() -> Callable | None:
    """flash-attn's function; None where it is not installed."""
    try:  # FlashAttention 4 shares the package's name, and a wheel for another torch fails only here
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError, RuntimeError):
        return None
    return flash_attn_varlen_func


def run(q: Tensor, k: Tensor, v: Tensor, row: Row) -> Tensor:
    attend = varlen_func()
    assert attend is not None, "checked by problem"
    return attend(
        q,
        k,
        v,
        cu_seqlens_q=row.cu_seqlens,
        cu_seqlens_k=row.cu_seqlens,
        max_seqlen_q=row.max_seqlen,
        max_seqlen_k=row.max_seqlen,
        softmax_scale=row.scale,
        causal=True,
        window_size=row.flash_window,
    )


def forward(q: Tensor, k: Tensor, v: Tensor, row: Row) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_forward

    left, right = row.flash_window
    settings = {"causal": row.causal, "window_size_left": left, "window_size_right": right}
    out, lse, *_ = _wrapped_flash_attn_varlen_forward(q, k, v, *bounds(row), 0.0, row.scale_of(q), **settings)
    return out, lse


def backward(upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, row: Row) -> Gradients:
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_backward

    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    settings = (0.0, row.scale_of(q), row.causal, *row.flash_window, 0.0, None, False)
    _wrapped_flash_attn_varlen_backward(upstream, q, k, v, out, lse, dq, dk, dv, *bounds(row), *settings)
    return dq, dk, dv


def bounds(row: Row) -> tuple[Tensor, Tensor, int, int]:
    """Boundaries of queries and of keys, and their longest segments."""
    keys, longest_keys = row.keys
    # for 1 another kernel runs, with other layouts
    return row.cu_seqlens, keys, max(row.max_seqlen, 2), max(longest_keys, 2)


def problem(device: torch.device) -> str | None:
    if reason := needs_ampere(device):
        return reason
    if varlen_func() is None:
        return "needs flash-attn 2: pip install 'internvl-pack[flash]', or use --attn_kernel auto or varlen"
    return None


KERNEL = Kernel(
    name="flash_attn",
    run=run,
    problem=problem,
    half_only=True,
    head_sizes=FLASH_HEADS,
    forward=forward,
    backward=backward,
)
