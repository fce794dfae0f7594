"""What a fused layer of the vision tower (fused.py) is made of, besides matrix products and attention.

Each is written out here in PyTorch, which is what runs on a CPU and what the tests hold against autograd; on a GPU the
Triton kernels of fused_triton.py do the same in one pass over memory. Sums over rows are float32 throughout.

    rows        tiles * patches, flattened
    width       of the layer, or of what the function is given
"""

from __future__ import annotations

import functools
import importlib.util
import math
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor


@functools.cache
def triton_kernels() -> ModuleType | None:
    """The Triton kernels; None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from . import fused_triton

    return fused_triton


def _kernels(tensor: Tensor) -> ModuleType | None:
    return triton_kernels() if tensor.is_cuda else None


def add_norm(
    x: Tensor, y: Tensor | None, bias: Tensor | None, weight: Tensor, norm_bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A branch added to the stream, and the layer norm after it.

    Args:
        x, y: (rows, width), contiguous, the stream and what is added to it; bias: float32 (width,) of y's linear layer;
            y may be None, and bias too.
        weight, norm_bias: (width,) of the norm.

    Returns:
        x + y + bias, its norm, and of each row the mean and 1 / deviation, float32 (rows,).
    """
    if kernels := _kernels(x):
        return kernels.add_norm(x, y, bias, weight, norm_bias, epsilon)
    total = x
    if y is not None:
        added = _wide(x) + _wide(y)
        total = (added if bias is None else added + bias).to(x.dtype)
    wide = _wide(total)
    mean = wide.mean(-1)
    centred = wide - mean.unsqueeze(-1)
    scale = torch.rsqrt(centred.square().mean(-1) + epsilon)
    return total, (centred * scale.unsqueeze(-1) * weight + norm_bias).to(x.dtype), mean, scale


def add_norm_backward(
    normed_grad: Tensor, total_grad: Tensor | None, total: Tensor, means: Tensor, scales: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of `add_norm`, which x and y share.

    Args:
        normed_grad, total_grad: (rows, width), of the norm and of the sum; total_grad may be None.

    Returns:
        (rows, width), and float32 (3, width): gradients of weight, norm_bias and bias.
    """
    if kernels := _kernels(total):
        return kernels.add_norm_backward(normed_grad, total_grad, total, means, scales, weight)
    g, x = _wide(normed_grad), (_wide(total) - means.unsqueeze(-1)) * scales.unsqueeze(-1)
    weight_grad, bias_grad = (g * x).sum(0), g.sum(0)
    g = g * weight
    g = (g - g.mean(-1, keepdim=True) - x * (g * x).mean(-1, keepdim=True)) * scales.unsqueeze(-1)
    grad = g if total_grad is None else g + total_grad
    return grad.to(total.dtype), torch.stack([weight_grad, bias_grad, grad.sum(0)])


def gelu_backward(upstream: Tensor, inputs: Tensor, again: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradient of the exact GELU; `upstream` (rows, width) is overwritten.

    Args:
        again: whether to compute the activation again, too.

    Returns:
        the gradient, gelu(inputs) or None, and the gradient's sum over rows, float32 (width,).
    """
    if kernels := _kernels(inputs):
        return kernels.gelu_backward(upstream, inputs, again)
    x = _wide(inputs)
    below = 0.5 * torch.erfc(-x / math.sqrt(2.0))
    density = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    grad = _wide(upstream) * (below + x * density)
    return upstream.copy_(grad), F.gelu(inputs) if again else None, grad.sum(0)


def column_sums(values: Tensor) -> Tensor:
    """float32 (width,): the sum of (rows, width) over rows."""
    if kernels := _kernels(values):
        return kernels.column_sums(values)
    return _wide(values).sum(0)


def fold(weight: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """scale[:, None] * weight, like weight (out, in), and scale * bias, float32 (out,)."""
    if kernels := _kernels(weight):
        return kernels.fold(weight, bias, scale)
    return weight * scale.unsqueeze(-1), _wide(bias) * scale


def fold_backward(
    folded_grad: Tensor, sums: Tensor, weight: Tensor, bias: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weight, bias and scale from those of the folded weight and, float32, of the folded bias."""
    if kernels := _kernels(weight):
        return kernels.fold_backward(folded_grad, sums, weight, bias, scale)
    wide = _wide(folded_grad)
    scale_grad = (wide * weight).sum(-1) + sums * bias
    return (wide * scale.unsqueeze(-1)).to(weight.dtype), (sums * scale).to(bias.dtype), scale_grad.to(scale.dtype)


def _wide(tensor: Tensor) -> Tensor:
    """float32, or float64 as it is: what sums and norms are computed in."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
