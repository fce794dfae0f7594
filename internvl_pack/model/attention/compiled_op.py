"""Attention as one opaque operation, so that a compiled decoder layer is one graph.

    attend(q, k, v, cu_seqlens, max_seqlen, scale, window, kernel) -> out, lse

The compiler sees shapes only: the row's tokens are a symbol, `max_seqlen` is another, and what runs is the
kernel registered under the name. Its gradient is an operation of the same kind. Kernels without a
`forward` and a `backward` (kernels/) are called between two graphs instead.
"""

from __future__ import annotations

from typing import Any

import torch

from .kernels import KERNELS, Kernel, Row

NO_WINDOW = 0  # of the `window` argument here, which must be an int

#: A row as an operation takes it, and the name of the kernel.
_ROW = "Tensor cu_seqlens, SymInt max_seqlen, float scale, SymInt window, str kernel"


def attend_row(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: Row
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` of a row."""
    settings = (row.max_seqlen, row.scale_of(q), row.window or NO_WINDOW, kernel.name)
    return attend(q, k, v, row.cu_seqlens, *settings)


def _row(cu_seqlens: torch.Tensor, max_seqlen: int, scale: float, window: int) -> Row:
    return Row(cu_seqlens, max_seqlen, scale, window or None)


@torch.library.custom_op(
    "internvl_pack::attend", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_ROW}) -> (Tensor, Tensor)"
)
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel contract, and the log-sum-exp of the scores, float32 (Hq, N), which the gradient needs."""
    *row, kernel = rest
    forward = KERNELS[kernel].forward
    assert forward is not None, "called for kernels that have one"
    with torch.autocast(q.device.type, enabled=False):
        out, lse = forward(q, k, v, _row(*row))
    return out.contiguous(), lse.contiguous()


@attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op(
    "internvl_pack::attend_backward",
    mutates_args=(),
    schema="(Tensor upstream, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_ROW}) -> (Tensor, Tensor, Tensor)",
)
def attend_backward(upstream: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *tensors, cu_seqlens, max_seqlen, scale, window, kernel = rest
    backward = KERNELS[kernel].backward
    assert backward is not None, "a kernel with a forward has a backward"
    with torch.autocast(upstream.device.type, enabled=False):
        gradients = backward(upstream.contiguous(), *tensors, _row(cu_seqlens, max_seqlen, scale, window))
    dq, dk, dv = (g.to(t.dtype).contiguous() for g, t in zip(gradients, tensors[:3], strict=True))
    return dq, dk, dv


@attend_backward.register_fake
def _(
    upstream: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
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
