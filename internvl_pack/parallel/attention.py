"""Packed attention of a slice of a row, in either mode; called by the attention function of model/attention.py."""

from __future__ import annotations

import torch

from ..model.kernels import Kernel
from .group import SequenceGroup
from .ring import ring_attention
from .ulysses import ulysses_attention


def attend_over_group(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
    group: SequenceGroup,
) -> torch.Tensor:
    """The kernel contract on this rank's tokens, with the boundaries of its `RowSlice`."""
    if group.mode == "ulysses":
        return ulysses_attention(kernel.run, q, k, v, cu_seqlens, max_seqlen, scale, window, group)
    if window is not None:
        raise ValueError(f"ring attention has no sliding windows, the layer has one of {window} tokens: use ulysses")
    return ring_attention(kernel.name, q, k, v, cu_seqlens, max_seqlen, scale, group)
