"""Attention in towers of native resolution: a row of patches, of which each sees its whole segment.

A segment is a picture, or a window of one. The kernels are those of the language model (attention/kernels), without
causality.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import HALF, KERNELS, Kernel, Row, attend_row, one_dtype

PREFIX = "internvl_pack_flash_pictures_"  # transformers gives boundaries to names with "flash" in them
TILE_HEADS = (64, 96, 128)  # head sizes that FlashAttention 4 takes for sure


def register_picture_attention(kernel: Kernel, head_size: int) -> str:
    """Register the kernel of a tower with transformers.

    Args:
        kernel: of the language model. Where it does not take heads of this size another of its device does.
        head_size: of the tower, such as 72 or 80.

    Returns:
        the name to set as the vision config's attention.
    """
    from transformers import AttentionInterface

    if kernel.name == "fa4" and head_size not in TILE_HEADS:
        kernel = KERNELS["varlen"] if KERNELS["varlen"].problem(torch.device("cuda")) is None else KERNELS["sdpa"]
    if kernel.forward is None:  # one from elsewhere, which is causal only
        kernel = KERNELS["sdpa"]
    name = PREFIX + kernel.name
    AttentionInterface.register(name, _attention_function(kernel))
    return name


def _attention_function(kernel: Kernel) -> Any:
    """transformers' attention contract over `attend_row`: (1, H, P, D) in, (1, P, H, D) out."""

    def picture_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        assert cu_seq_lens_q is not None and max_length_q is not None, "given by the tower"
        q, k, v = (t[0].transpose(0, 1) for t in one_dtype(query, key, value))
        own = KERNELS["sdpa"] if kernel.half_only and q.dtype not in HALF else kernel
        row = Row(cu_seq_lens_q, max_length_q, scaling, causal=False)
        return attend_row(own, q, k, v, row)[0].unsqueeze(0), None

    return picture_attention
