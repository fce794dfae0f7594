"""What makes losses and gradients out of a chunk of logits (head.py): PyTorch, the compiler, or liger-kernel.

    kernel(logits, targets, weights, grad_dtype) -> losses, gradient

    torch       a few passes over the logits and a float32 copy of them; with `--compile` two passes and no copy
    liger       liger-kernel's Triton kernel: two passes and no copy without `--compile` too, so with ZeRO-3 as well

liger-kernel's own functions return losses in the logits' type and wait for the device, so its kernel is launched from
here, with losses in float32. It is used only if a small example gives on this device what PyTorch gives.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor

from ...batch.loss_weights import IGNORE_INDEX
from ...errors import UserError, first_line
from ..attention import run_device
from .head import LossKernel, loss_and_gradient

logger = logging.getLogger(__name__)

LOSS_KERNELS = ("auto", "torch", "liger")

# Tokens and vocabulary of the example: columns beyond one block of the kernel, and no multiple of anything.
EXAMPLE = (5, 40_003)


def select_loss_kernel(name: str, device: torch.device | str | None, dtype: torch.dtype) -> LossKernel:
    """The kernel called `name`; with `auto` liger's where it is installed, runs and gives the same loss.

    Args:
        device, dtype: where (see `run_device`) and in what the logits will be computed.

    Raises:
        UserError: an unknown name, or `liger` where it cannot be used.
    """
    if name not in LOSS_KERNELS:
        raise UserError(f"--loss_kernel {name!r} is unknown: use {', '.join(LOSS_KERNELS)}")
    if name == "torch":
        return loss_and_gradient
    problem = liger_problem(run_device(device), dtype)
    if problem is None:
        logger.info("loss kernel: liger")
        return liger_loss_and_gradient
    if name == "liger":
        raise UserError(f"--loss_kernel liger: {problem}; use auto or torch")
    logger.info("loss kernel: torch (liger: %s)", problem)
    return loss_and_gradient


def liger_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """None where liger's kernel gives the losses and gradients of `loss_and_gradient`, else why not."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"it needs a CUDA device, this run is on {device.type}"
    if dtype == torch.float16:
        return "it keeps gradients in the logits' float16, which cannot hold them unscaled"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed: pip install 'internvl-pack[liger]'"
    return difference_from_torch(device, dtype)


def difference_from_torch(device: torch.device, dtype: torch.dtype) -> str | None:
    """Run the example through both; what differs, if anything does by more than rounding."""
    generator = torch.Generator().manual_seed(0)
    tokens, vocabulary = EXAMPLE
    logits = (4 * torch.randn(tokens, vocabulary, generator=generator)).to(device, dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    weights = torch.rand(tokens, generator=generator).to(device)
    exact = logits.to(torch.float32, copy=True)  # the gradient takes its place
    expected, expected_grad = loss_and_gradient(exact, targets, weights, torch.float32)
    try:
        losses, grad = liger_loss_and_gradient(logits.clone(), targets, weights, dtype)
    except Exception as error:  # a version whose kernel takes other arguments, or that does not compile here
        return f"liger-kernel does not run here ({type(error).__name__}: {first_line(error)})"
    if not torch.allclose(losses, expected, rtol=1e-5, atol=1e-5):
        return f"liger-kernel gives other losses, by {(losses - expected).abs().max().item():.1e}"
    apart = ((grad.float() - expected_grad).norm() / expected_grad.norm()).item()
    if not apart <= max(2 * torch.finfo(dtype).eps, 1e-5):
        return f"liger-kernel gives other gradients, by {apart:.1e}"
    return None


def liger_loss_and_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor, grad_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `loss_and_gradient`, by liger-kernel; where the gradient cannot be in the logits' place, by PyTorch."""
    if logits.dtype != grad_dtype or not len(logits):
        return loss_and_gradient(logits, targets, weights, grad_dtype)
    kernel, settings = _liger_kernel()
    tokens, vocabulary = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    kernel[(tokens,)](
        **settings,
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=1,
        loss_ptr=losses,
        loss_stride=1,
        n_cols=vocabulary,
        BLOCK_SIZE=min(32768, 1 << (vocabulary - 1).bit_length()),
        num_warps=32,
    )
    return losses, logits.mul_(weights.unsqueeze(-1))


@functools.cache
def _liger_kernel() -> tuple[Any, dict[str, Any]]:
    """The kernel, and those of its arguments, which differ between versions, that are the same in every call."""
    from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel as kernel

    off: dict[str, Any] = {
        "ignore_index": IGNORE_INDEX,
        "reduction": "none",
        "n_non_ignore": 1,
        "sum_non_ignore_weight": 1.0,
        "weight_sum": 0.0,
        "lse_square_scale": 0.0,
        "label_smoothing": 0.0,
        "token_accuracy_stride": 0,
        "predicted_tokens_stride": 0,
        "RETURN_Z_LOSS": False,
        "RETURN_TOKEN_ACCURACY": False,
        "RETURN_PREDICTED_TOKENS": False,
        "HAS_WEIGHT": False,
        "HAS_SOFTCAPPING": False,
        "HAS_GRADIENTS": True,
    }
    ours = {"X_ptr", "X_stride", "Y_ptr", "Y_stride", "loss_ptr", "loss_stride", "n_cols", "BLOCK_SIZE"}
    return kernel, {name: off.get(name) for name in kernel.arg_names if name not in ours}
