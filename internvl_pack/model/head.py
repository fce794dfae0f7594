"""Logits only where there is a label, and cross-entropy over them in bounded memory.

On packs of image-text data a third of the tokens or fewer are trained on, so most rows of the largest
matrix product of a small model are never needed. The rest runs in chunks: at most
`chunk_tokens * vocabulary` float32 logits (and as many for their gradient) exist at once; more than one
chunk costs a second forward of the head in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..loss import IGNORE_INDEX

DEFAULT_CHUNK_TOKENS = 4096  # 2.5 GB of float32 logits at a vocabulary of 151,674


def shift_targets(
    labels: torch.Tensor, weights: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each position the label and weight of the next token of its own segment.

    Args:
        labels: (B, N) int64, not shifted; weights: (B, N) float32 or None for 1 everywhere.
        cu_seqlens: boundaries of a pack's row, or None where each row is one segment.

    Returns:
        targets (B, N) int64, IGNORE_INDEX where nothing follows or the next token starts a segment;
        weights (B, N) float32, 0 there.
    """
    if weights is None:
        weights = torch.ones_like(labels, dtype=torch.float32)
    if cu_seqlens is not None:
        labels = labels.index_fill(1, cu_seqlens[:-1].long(), IGNORE_INDEX)
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    weights = F.pad(weights[:, 1:].float(), (0, 1)).masked_fill(targets == IGNORE_INDEX, 0.0)
    return targets, weights


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
        self._shared_with_zero3 = False

    def share_with_zero3(self) -> None:
        """Tell DeepSpeed ZeRO-3, where it has partitioned the weights, that this module reads the lm_head's."""
        if self._shared_with_zero3 or not hasattr(self.output_embeddings().weight, "ds_id"):
            return
        import deepspeed

        for parameter in self.output_embeddings().parameters(recurse=False):
            deepspeed.zero.register_external_parameter(self, parameter)
        self._shared_with_zero3 = True

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden (M, H), targets (M,) in the vocabulary, weights (M,) float32.

        Returns:
            the sum of w * ce, a float32 scalar; ce of each target, float32 (M,), detached. With M = 0 the
            sum is zero, and every parameter behind `hidden` and the head still gets a gradient.
        """
        lm_head = self.output_embeddings()
        weight, bias = lm_head.weight, lm_head.bias
        if len(targets) <= self.chunk_tokens:
            return _cross_entropy(hidden, weight, bias, targets, weights)
        weighted, losses = hidden.new_zeros((), dtype=torch.float32), []
        pieces = (t.split(self.chunk_tokens) for t in (hidden, targets, weights))
        for h, t, w in zip(*pieces, strict=True):
            chunk_sum, chunk_losses = checkpoint(_cross_entropy, h, weight, bias, t, w, use_reentrant=False)
            weighted = weighted + chunk_sum
            losses.append(chunk_losses)
        return weighted, torch.cat(losses)


def _cross_entropy(hidden, weight, bias, targets, weights) -> tuple[torch.Tensor, torch.Tensor]:
    losses = F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, reduction="none")
    return (losses * weights).sum(), losses.detach()
