"""What each position is to predict, what that weighs in the loss, and what the sum is divided by.

Over one optimizer step the loss is

    sum of w * ce / sum of w        over all micro-batches and data-parallel ranks

so it does not depend on how samples were packed, on the number of ranks or on gradient accumulation.
A step with no supervised token anywhere is zero. The weight of a supervised token whose sample has n
supervised targets in all (every fragment counted):

    token   1            every token counts the same
    sample  1 / n        every sample counts the same
    square  1 / sqrt(n)  in between (InternVL's default)

Averaging per micro-batch first, or over masked tokens too, gives other numbers: the tests hold both
against an example worked by hand.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import LOSS_REDUCTIONS
from ..errors import UserError

IGNORE_INDEX = -100


def check_loss_reduction(loss_reduction: str) -> None:
    """Refuse what is none of LOSS_REDUCTIONS.

    Raises:
        UserError: an unknown reduction.
    """
    if loss_reduction not in LOSS_REDUCTIONS:
        raise UserError(f"loss_reduction {loss_reduction!r} is unknown: use {', '.join(LOSS_REDUCTIONS)}")


def token_weights(labels: Any, loss_reduction: str, num_targets: int | None = None) -> Any:
    """Loss weights of one fragment's tokens, each as a target.

    Args:
        labels: (n,) integers, numpy or torch, not shifted; IGNORE_INDEX where not trained and at the
            fragment's first token, which nothing predicts.
        num_targets: supervised targets of the whole sample, so that a fragment weighs the same as it
            would unsplit; None counts those of `labels`.

    Returns:
        (n,) float32 of the same kind as `labels`: 0 where not trained.

    Raises:
        UserError: an unknown reduction.
        ValueError: a fragment with more targets than its whole sample.
    """
    trained = labels != IGNORE_INDEX
    here = int(trained.sum())
    whole = here if num_targets is None else num_targets
    if here > whole:
        raise ValueError(f"a fragment with {here} supervised targets of a sample that has {whole}")
    check_loss_reduction(loss_reduction)
    n = max(whole, 1)
    weight = {"token": 1.0, "sample": 1.0 / n, "square": 1.0 / math.sqrt(n)}[loss_reduction]
    weights = trained.float() if hasattr(trained, "float") else trained.astype("float32")
    weights *= weight
    return weights


def shift_targets(labels: Tensor, weights: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
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


def normalized(weighted_sum: Any, weight_sum: Any) -> Any:
    """`weighted_sum / weight_sum`, zero where nothing is supervised; numbers or torch scalars.

    `weight_sum` is that of the whole optimizer step: summed over its micro-batches and over the
    data-parallel ranks. Where gradients are averaged over ranks afterwards (DDP, DeepSpeed), multiply
    by the number of ranks; where the trainer divides by the accumulation steps, by those too.
    """
    if hasattr(weight_sum, "where"):
        return weighted_sum / weight_sum.where(weight_sum > 0, 1.0)
    return weighted_sum / weight_sum if weight_sum > 0 else weighted_sum * 0.0
