"""Attention in the vision tower: the patches of a tile all see each other, tiles do not.

SDPA does this on every device, on a GPU mostly through cuDNN. Where the language model runs on a kernel that is
faster on tiles too (FlashAttention 4: docs/measurements.md), the tower uses it as well. It is one operation to
a compiler:

    attend_tiles(q, k, v, scale, kernel) -> out, lse

    q, k, v, out    (T, P, H, D)    tiles, patches and the class token, heads, head size
    lse             (T, H, P)       float32, logsumexp of the scores, for the gradient
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..attention import HALF, KERNELS, Kernel, attention_operation, one_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

SDPA = "sdpa"
PREFIX = "internvl_pack_tiles_"  # of a kernel's name, among transformers' attention functions
MAX_HEAD_SIZE = 128  # of FlashAttention 4's gradient on Hopper, and a multiple of 8


def use_tile_attention(model: PreTrainedModel, kernel: Kernel) -> str:
    """Let the vision tower of `model`, if it has one, use `kernel` where that is made for tiles, SDPA otherwise.

    Returns:
        the name of the tower's attention among transformers' attention functions.
    """
    from transformers import AttentionInterface

    vision = getattr(model.config, "vision_config", None)
    if vision is None:
        return SDPA
    name, head_size = SDPA, vision.hidden_size // vision.num_attention_heads
    if kernel.tiles_forward is not None and head_size % 8 == 0 and head_size <= MAX_HEAD_SIZE:
        name = PREFIX + kernel.name
        AttentionInterface.register(name, _attention_function(kernel.name))
        logger.info("attention kernel of the vision tower: %s", kernel.name)
    model.set_attn_implementation({"vision_config": name})
    return name


def tile_kernel(implementation: str | None) -> str | None:
    """The kernel whose name `use_tile_attention` gave the tower's attention; None for SDPA."""
    name = (implementation or "").removeprefix(PREFIX)
    return name if name != implementation and name in KERNELS else None


def _attention_function(kernel: str) -> Any:
    """transformers' attention contract over `attend_tiles`: (T, H, P, D) in, (T, P, H, D) out."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def tile_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = one_dtype(query, key, value)
        if attention_mask is not None or dropout or not {query.dtype, key.dtype, value.dtype} <= set(HALF):
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return attend_tiles(q, k, v, scale, kernel)[0], None

    return tile_attention


def _halves(scale: float, kernel: str) -> tuple[Any, Any, float]:
    return KERNELS[kernel].tiles_forward, KERNELS[kernel].tiles_backward, scale


attend_tiles, _ = attention_operation("attend_tiles", "float scale, str kernel", _halves)
