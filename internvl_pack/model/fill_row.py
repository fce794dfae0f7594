"""Rows of a few lengths, for products: tokens of zeros at a row's end, in a pack as a segment of their own.

cuBLAS chooses a kernel for each size of a product that it has not met, and keeps some thousands of choices. A step of
the 1B shape with a length not met before waits about 20 ms for the host: with a length of its own for each row that
would never end. In fp8 the number of tokens must be a multiple of 16.

What is added has no labels, so it adds nothing to a loss or a gradient, and no other segment sees it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..parallel.slices import RowSlice

MULTIPLE = 128  # of a compiled model's rows: 0.4 % more tokens in a row of 16,384


def fill_row(
    embeddings: Tensor, position_ids: Tensor | None, part: RowSlice, attention_mask: Tensor | None, multiple: int
) -> tuple[Tensor, Tensor | None, RowSlice, Tensor | None]:
    """Add tokens of zeros at the end until there is a multiple of `multiple`, in a pack as a segment of their own.

    Args:
        embeddings: (B, N, H); position_ids (..., B, N) and attention_mask (B, N).
        part: the whole row, or a padded batch, which has no boundaries.

    Returns:
        the same, (B, N + added, ...).
    """
    rows, num_tokens = embeddings.shape[:2]
    free = -num_tokens % (multiple // math.gcd(rows, multiple))
    if not free:
        return embeddings, position_ids, part, attention_mask
    embeddings = F.pad(embeddings, (0, 0, 0, free))
    if position_ids is not None:
        more = torch.arange(free, dtype=position_ids.dtype, device=position_ids.device)
        position_ids = torch.cat([position_ids, more.expand(*position_ids.shape[:-1], free)], dim=-1)
    if attention_mask is not None:
        attention_mask = F.pad(attention_mask, (0, free))
    if part.cu_seqlens is not None and part.max_seqlen is not None:
        boundaries = F.pad(part.cu_seqlens, (0, 1), value=num_tokens + free)
        part = replace(part, cu_seqlens=boundaries, max_seqlen=max(part.max_seqlen, free))
    return embeddings, position_ids, part, attention_mask
