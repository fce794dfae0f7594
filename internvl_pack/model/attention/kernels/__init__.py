"""Attention kernels behind one signature.

    kernel.run(q, k, v, row) -> out
    kernel.forward(q, k, v, row) -> out, lse
    kernel.backward(upstream, q, k, v, out, lse, row) -> dq, dk, dv

    q, out      (N, Hq, D)      the row's tokens, heads, head size
    k, v        (N, Hkv, D)     Hq is a multiple of Hkv; heads are grouped, never expanded here
    lse         float32 (Hq, N) log of the sum of exp(scale * q.k) over the keys seen
    row         Row             boundaries, longest segment, scale, window

Each query sees the keys of its own segment at or before its own place (window 2 on the right):

    a a a b b         a a a b b
    x . . . .         x . . . .
    x x . . .         x x . . .
    x x x . .         . x x . .
    . . . x .         . . . x .
    . . . x x         . . . x x

A kernel is a file with a `KERNEL`, and a place among these; one from elsewhere goes through `register_kernel`.
"""

from . import fa4, flash_attn, sdpa, varlen
from .base import HALF, KERNELS, Gradients, Kernel, Row, run_device
from .operation import attend, attend_backward, attend_row, attention_operation, settings_of

__all__ = [
    "HALF",
    "KERNELS",
    "Gradients",
    "Kernel",
    "Row",
    "attend",
    "attend_backward",
    "attend_row",
    "attention_operation",
    "register_kernel",
    "run_device",
    "settings_of",
]


def register_kernel(kernel: Kernel) -> Kernel:
    """Add a kernel, after all that are there, or in the place of the one of its name."""
    KERNELS[kernel.name] = kernel
    return kernel


for module in (fa4, flash_attn, varlen, sdpa):
    register_kernel(module.KERNEL)
