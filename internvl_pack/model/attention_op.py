"""Attention as one opaque operation, so that a compiled decoder layer is one graph.

    attend(q, k, v, cu_seqlens, max_seqlen, scale, window, kernel) -> out, lse

The compiler sees shapes only: the row's tokens are a symbol, `max_seqlen` is another, and what runs is the
kernel registered under the name. Its gradient is an operation of the same kind. Kernels that give no
`forward` and `backward` of their own (kernels.py) are called between two graphs instead.
"""

from __future__ import annotations

from typing import Any

import torch

from .kernels import KERNELS

NO_WINDOW = 0  # of the `window` argument here, which must be an int


@torch.library.custom_op("internvl_pack::attend", mutates_args=())
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel contract, and the logsumexp of the scores, float32 (Hq, N), which the gradient needs."""
    forward = KERNELS[kernel].forward
    assert forward is not None, "called for kernels that have one"
    out, lse = forward(q, k, v, cu_seqlens, max_seqlen, scale, window or None)
    return out.contiguous(), lse.contiguous()


@attend.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("internvl_pack::attend_backward", mutates_args=())
def attend_backward(
    upstream: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    backward = KERNELS[kernel].backward
    assert backward is not None, "a kernel with a forward has a backward"
    gradients = backward(upstream.contiguous(), q, k, v, out, lse, cu_seqlens, max_seqlen, scale, window or None)
    dq, dk, dv = (g.contiguous() for g in gradients)
    return dq, dk, dv


@attend_backward.register_fake
def _(
    upstream: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, upstream: torch.Tensor | None, _lse_upstream: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    gradients: tuple[torch.Tensor | None, ...] = (None, None, None)
    if upstream is not None:
        gradients = attend_backward(upstream, *ctx.saved_tensors, *ctx.rest)
    return (*gradients, None, None, None, None, None)


attend.register_autograd(_gradients, setup_context=_save)
