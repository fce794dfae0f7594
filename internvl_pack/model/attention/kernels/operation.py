"""Attention as one opaque operation, so that a compiled layer is one graph.

    attend(q, k, v, cu_seqlens, max_seqlen, scale, window, causal, kernel) -> out, lse

The compiler sees shapes only: the row's tokens are a symbol, `max_seqlen` is another, and what runs is the
kernel registered under the name. Its gradient is an operation of the same kind. Kernels without a
`forward` and a `backward` (kernels/) are called between two graphs instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .base import KERNELS, Gradients, Kernel, Row

NO_WINDOW = 0  # of the `window` argument here, which must be an int


def attention_operation(
    name: str, settings: str, halves: Callable[..., tuple[Any, Any, Any]]
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Gradients]]:
    """(attend, attend_backward): a kernel's two halves as operations, called outside of autocast.

    Args:
        name: of the operation in torch's library.
        settings: what comes after q, k and v, in torch's schema language, tensors first.
        halves: halves(*settings) -> forward, backward, given:
            forward(q, k, v, given) -> out, like q; lse, the log-sum-exp of the scores, float32 (..., Hq, N).
            backward(upstream, q, k, v, out, lse, given) -> gradients of q, k and v.
    """

    @torch.library.custom_op(
        f"internvl_pack::{name}",
        mutates_args=(),
        schema=f"(Tensor q, Tensor k, Tensor v, {settings}) -> (Tensor, Tensor)",
    )
    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        forward, _, given = halves(*rest)
        assert forward is not None, "called for kernels that have one"
        with torch.autocast(q.device.type, enabled=False):
            out, lse = forward(q, k, v, given)
        return out.contiguous(), lse.contiguous()

    @attend.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *outer, tokens, heads, _ = q.shape
        return q.new_empty(q.shape), q.new_empty((*outer, heads, tokens), dtype=torch.float32)

    saved = "Tensor upstream, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"

    @torch.library.custom_op(
        f"internvl_pack::{name}_backward", mutates_args=(), schema=f"({saved}, {settings}) -> (Tensor, Tensor, Tensor)"
    )
    def attend_backward(upstream: Tensor, *rest: Any) -> Gradients:
        _, backward, given = halves(*rest[5:])
        with torch.autocast(upstream.device.type, enabled=False):
            gradients = backward(upstream.contiguous(), *rest[:5], given)
        dq, dk, dv = (g.to(t.dtype).contiguous() for g, t in zip(gradients, rest[:3], strict=True))
        return dq, dk, dv

    @attend_backward.register_fake
    def _(upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Gradients:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        ctx.settings = inputs[len(tensors) :]
        ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, upstream: Tensor | None, _lse_upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        nones = (None,) * (len(tensors) - 5 + len(ctx.settings))
        if upstream is None:
            return (None, None, None, *nones)
        return (*attend_backward(upstream, *tensors, *ctx.settings), *nones)

    attend.register_autograd(gradients, setup_context=save)
    return attend, attend_backward


def attend_row(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, row: Row) -> tuple[Tensor, Tensor]:
    """`attend` of a row."""
    return attend(q, k, v, row.cu_seqlens, *settings_of(kernel, q, row))


def settings_of(kernel: Kernel, q: Tensor, row: Row) -> tuple[Any, ...]:
    """What `attend` and `attend_backward` take after their tensors."""
    return row.max_seqlen, row.scale_of(q), row.window or NO_WINDOW, row.causal, kernel.name


def _halves(
    cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int, causal: bool, name: str
) -> tuple[Any, Any, Row]:
    kernel = KERNELS[name]
    return kernel.forward, kernel.backward, Row(cu_seqlens, max_seqlen, scale, window or None, causal)


# The kernel contract, and the log-sum-exp of the scores.
attend, attend_backward = attention_operation(
    "attend",
    "Tensor cu_seqlens, SymInt max_seqlen, float scale, SymInt window, bool causal, str kernel",
    _halves,
)
