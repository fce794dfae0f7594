"""Logits only where there is a label, and cross-entropy over them in bounded memory.

On packs of image-text data a third of the tokens or fewer are trained on, so most rows of the largest
matrix product of a small model are never needed. The rest runs in chunks, and the gradient is made
where the logits are, in their place: at most `chunk_tokens * vocabulary` logits exist at once (and, while
not compiled, a float32 copy), none is kept for the backward pass, and no chunk is computed twice. The
peak of a training step is here, when everything else waits for its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEFAULT_CHUNK_TOKENS = 1024  # 0.3 GB of bfloat16 logits at a vocabulary of 151,674
WEIGHT_ROWS = 32768  # of the head's gradient that are made at once where several chunks are summed
# Logits a row in memory: tensor cores are not used for a row length of 151,674, or at a third of the speed.
ALIGNMENT = 64


class LabelledHead(nn.Module):
    """The sum of w * ce over the labelled positions, and the ce of each.

    A module of its own that is called once a forward pass, however many chunks there are: under ZeRO-3
    its hooks gather the output embeddings, and ranks with different numbers of labels must still make
    the same number of collective calls.

    Args:
        output_embeddings: gives the model's `lm_head`; a function, so that its weights are not
            registered twice.
    """

    def __init__(self, output_embeddings: Callable[[], nn.Linear], chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> None:
        super().__init__()
        self.output_embeddings = output_embeddings
        self.chunk_tokens = chunk_tokens
        self.loss_kernel: LossKernel = loss_and_gradient
        self._shared_with_zero3 = False

    def share_with_zero3(self) -> None:
        """Register the lm_head's weights, which this module reads, with DeepSpeed ZeRO-3 if it has partitioned them."""
        if self._shared_with_zero3 or not hasattr(self.output_embeddings().weight, "ds_id"):
            return
        import deepspeed

        for parameter in self.output_embeddings().parameters(recurse=False):
            deepspeed.zero.register_external_parameter(self, parameter)
        self._shared_with_zero3 = True

    def forward(self, hidden: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """hidden (M, H), targets (M,) in the vocabulary, weights (M,) float32.

        Returns:
            the sum of w * ce, a float32 scalar; ce of each target, float32 (M,), detached. With M = 0 the
            sum is zero, and every parameter behind `hidden` and the head still gets a gradient.
            With `weights` None the first is the log-probability of each target instead, float32 (M,), with its
            gradient, for which each chunk's logits are computed again.
        """
        lm_head = self.output_embeddings()
        if weights is None:
            settings = (self.chunk_tokens, self.loss_kernel)
            logprobs = _ChunkedLogprobs.apply(hidden, lm_head.weight, lm_head.bias, targets, *settings)
            return logprobs, -logprobs.detach()
        weighted, losses = _ChunkedCrossEntropy.apply(
            hidden,
            lm_head.weight,
            lm_head.bias,
            targets,
            weights,
            self.chunk_tokens,
            self.loss_kernel,
            torch.is_grad_enabled(),
        )
        return weighted, losses


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Losses and gradients chunk by chunk in the forward pass; the backward pass only scales them.

    The sum of w * ce is linear in what comes from behind (a scalar), so gradients for a scalar of 1 are
    all there is to keep: (M, H) and, if it is trained, the head's own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        chunk_tokens: int,
        loss_kernel: LossKernel,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        trains = tuple(with_gradient and needed for needed in ctx.needs_input_grad[:3])
        given = weights if with_gradient else None
        settings = (chunk_tokens, loss_kernel, _dtype_of(hidden), trains)
        losses, ctx.gradients = _chunk_by_chunk(hidden, weight, bias, targets, given, *settings)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the head's gradients are used up: a second backward pass needs a second forward pass")
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place: a copy would be a second head's weight
        for g in gradients:
            if g is not None:
                g.mul_(upstream)
        return (*gradients, None, None, None, None, None)


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probabilities chunk by chunk; the backward pass makes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk_tokens: int,
        loss_kernel: LossKernel,
    ) -> Tensor:
        settings = (chunk_tokens, loss_kernel, _dtype_of(hidden))
        losses, _ = _chunk_by_chunk(hidden, weight, bias, targets, None, *settings)
        ctx.save_for_backward(hidden, targets)
        ctx.head = weight, bias  # parameters as they are: ZeRO-3 gathers them again for the backward pass
        ctx.settings = settings
        return -losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        weight, bias = ctx.head
        settings = (*ctx.settings, tuple(ctx.needs_input_grad[:3]))
        _, gradients = _chunk_by_chunk(hidden, weight, bias, targets, -upstream.float(), *settings)
        return (*gradients, None, None, None)


def _dtype_of(hidden: Tensor) -> torch.dtype:
    """What products are computed in."""
    device_type = hidden.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype


def _chunk_by_chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor | None,
    chunk_tokens: int,
    loss_kernel: LossKernel,
    dtype: torch.dtype,
    trains: tuple[bool, ...] = (False, False, False),
) -> tuple[Tensor, list[Tensor | None]]:
    """ce of each target, float32 (M,), and the gradients of sum(w * ce) of hidden, weight and bias that are asked for.

    Without `weights` the losses alone.
    """
    # Half floats cannot hold the unscaled gradients of a whole row; bfloat16 can.
    grad_dtype = torch.float32 if dtype == torch.float16 else dtype
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if trains[0] else None
    grad_weight = _Sum(weight) if trains[1] else None
    grad_bias = _Sum(bias) if trains[2] and bias is not None else None
    with torch.autocast(hidden.device.type, enabled=False):
        w = weight.to(dtype)
        b = None if bias is None else bias.to(dtype)
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            h = hidden[rows].to(dtype)
            logits = logits_of(h, w, b)
            if weights is None:
                losses[rows] = F.cross_entropy(logits.float(), targets[rows], reduction="none")
                continue
            losses[rows], grad = loss_kernel(logits, targets[rows], weights[rows], grad_dtype)
            del logits
            if grad_hidden is not None:
                grad_hidden[rows] = gradient_of_input(grad, w.to(grad_dtype))
            if grad_weight is not None:
                grad_weight.add_product(grad, h.to(grad_dtype))
            if grad_bias is not None:
                grad_bias.add(grad.sum(0, dtype=torch.float32))
    return losses, [grad_hidden, *(None if total is None else total.total() for total in (grad_weight, grad_bias))]


def vocabulary_pieces(width: int) -> list[slice]:
    """The vocabulary as its aligned part and the rest.

    A product over all of 151,674 columns runs on kernels for unaligned memory, at a third of the speed. In two
    pieces, with rows of logits that start aligned, all but a few columns run on the fast ones; nothing is padded.
    """
    aligned = width - width % ALIGNMENT
    if aligned == width or aligned == 0:
        return [slice(0, width)]
    return [slice(0, aligned), slice(aligned, width)]


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (C, H) @ weight (V, H).T + bias, without autograd; rows (C, V) lie a multiple of ALIGNMENT apart in memory."""
    width = len(weight)
    padded = x.new_empty((len(x), width + -width % ALIGNMENT))
    padded[:, width:] = 0  # oneDNN's bfloat16 products read one column beyond an odd width, and NaN times 0 is NaN
    out = padded[:, :width]
    for piece in vocabulary_pieces(width):
        if bias is None:
            torch.mm(x, weight[piece].t(), out=out[:, piece])
        else:
            torch.addmm(bias[piece], x, weight[piece].t(), out=out[:, piece])
    return out


def gradient_of_input(grad: Tensor, weight: Tensor) -> Tensor:
    """grad (C, V) @ weight (V, H), without autograd."""
    first, *rest = vocabulary_pieces(len(weight))
    total = grad[:, first] @ weight[first]
    for piece in rest:
        total.addmm_(grad[:, piece], weight[piece])
    return total


class _Sum:
    """Gradients of a parameter summed over chunks: in float32 where there are several."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.sum: Tensor | None = None

    def add(self, part: Tensor) -> None:
        self.sum = part if self.sum is None else self.sum.float().add_(part)

    def add_product(self, grad: Tensor, hidden: Tensor) -> None:
        """grad (C, V), hidden (C, H): adds grad.T @ hidden."""
        if self.sum is None:
            self.sum = grad.t() @ hidden
            return
        self.sum = self.sum.float()
        for rows in range(0, len(self.sum), WEIGHT_ROWS):
            part = slice(rows, rows + WEIGHT_ROWS)
            self.sum[part].add_(grad[:, part].t() @ hidden)

    def total(self) -> Tensor:
        if self.sum is None:
            return torch.zeros_like(self.parameter)
        return self.sum.to(self.parameter.dtype)


LossKernel = Callable[
    [Tensor, Tensor, Tensor, torch.dtype],
    tuple[Tensor, Tensor],
]


def loss_and_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor, grad_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row, float32 (C,), and the gradient of sum(w * ce) in `grad_dtype`, (C, V).

    The gradient is in the place of `logits` where their types agree.
    """
    x = logits.float()
    total = torch.logsumexp(x, dim=-1, keepdim=True)
    index = targets.unsqueeze(-1)
    losses = (total - x.gather(-1, index)).squeeze(-1)
    grad = x.sub_(total).exp_()
    grad.scatter_add_(-1, index, grad.new_full((1, 1), -1.0).expand(index.shape))
    return losses, _in_place_of(logits, grad.mul_(weights.unsqueeze(-1)), grad_dtype)


def fusible_loss_and_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor, grad_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`loss_and_gradient` in a form that a compiler makes into two passes over the logits."""
    x = logits.float()
    total = torch.logsumexp(x, dim=-1, keepdim=True)
    index = targets.unsqueeze(-1)
    losses = (total - x.gather(-1, index)).squeeze(-1)
    is_target = torch.arange(x.shape[-1], device=x.device) == index
    grad = ((x - total).exp() - is_target.float()) * weights.unsqueeze(-1)
    return losses, _in_place_of(logits, grad, grad_dtype)


def _in_place_of(logits: Tensor, grad: Tensor, grad_dtype: torch.dtype) -> Tensor:
    return logits.copy_(grad) if logits.dtype == grad_dtype else grad.to(grad_dtype)
