"""The output head where there are labels, and what makes losses and gradients out of its logits."""

from .head import DEFAULT_CHUNK_TOKENS, LabelledHead, fusible_loss_and_gradient, loss_and_gradient
from .kernels import LOSS_KERNELS, select_loss_kernel

__all__ = [
    "DEFAULT_CHUNK_TOKENS",
    "LOSS_KERNELS",
    "LabelledHead",
    "fusible_loss_and_gradient",
    "loss_and_gradient",
    "select_loss_kernel",
]
