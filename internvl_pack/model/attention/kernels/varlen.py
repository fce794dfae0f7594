"""The flash-attn 2 kernel inside torch, that of torch.nn.attention.varlen."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import FLASH_HEADS, Gradients, Kernel, Row, needs_ampere
from .flash_attn import bounds
from .operation import attend_row


def run(q: Tensor, k: Tensor, v: Tensor, row: Row) -> Tensor:
    """By the halves: torch's own function differs from version to version, and that of 2.10 has no scale or window."""
    return attend_row(KERNEL, q, k, v, row)[0]


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


KERNEL = Kernel(
    name="varlen",
    run=run,
    problem=needs_ampere,
    half_only=True,
    head_sizes=FLASH_HEADS,
    forward=forward,
    backward=backward,
)
