"""Checks of a batch before it goes through a model: what would train something else, or stop within a kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from .attention import check_cu_seqlens_form, validate_cu_seqlens


def check_shapes(input_ids: Tensor, position_ids: Tensor | None, grid_positions: bool, **others: Tensor | None) -> None:
    """Tokens, positions, labels and weights must be of one shape.

    Args:
        input_ids: (1, N) or (B, L); position_ids: the same, with `grid_positions` on three axes.
        others: by name, of the shape of input_ids.

    Raises:
        ValueError: they are not.
    """
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must be (1, N) or (B, L), is {tuple(input_ids.shape)}")
    shape = tuple(input_ids.shape)
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, input_ids is {shape}: they must agree")
    if position_ids is not None and position_ids.shape != ((3, *shape) if grid_positions else shape):
        rule = " with three axes before: collate with grid_positions=True" if grid_positions else ""
        raise ValueError(f"position_ids is {tuple(position_ids.shape)}, input_ids is {shape}: they must agree" + rule)


def check_boundaries(
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    prefix_of: Tensor | None,
    longest_exact_segment: int | None,
) -> None:
    """The boundaries of a packed row against its tokens and positions; on the host as far as they are there.

    Args:
        longest_exact_segment: of the model, see `families.longest_exact_segment`; the others as of the forward.

    Raises:
        ValueError: what is missing, or does not agree.
        UserError: a segment that the model computes otherwise than alone.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(f"cu_seqlens describe one row, input_ids has {input_ids.shape[0]}")
    if attention_mask is not None:
        raise ValueError("attention_mask and cu_seqlens together: a pack's boundaries say all, leave the mask out")
    if max_seqlen is None or position_ids is None:
        raise ValueError("a pack needs max_seqlen (the longest segment, a Python int) and position_ids")
    if cu_seqlens.device.type == "cpu":
        validate_cu_seqlens(cu_seqlens, input_ids.shape[1], max_seqlen)
    else:
        check_cu_seqlens_form(cu_seqlens, max_seqlen)
    starts, longest = torch.zeros_like(cu_seqlens[:-1]), max_seqlen
    if prefix_of is not None:
        lengths, before = cu_seqlens.diff(), prefix_of.to(cu_seqlens.device)
        starts = lengths[before.clamp(min=0).long()] * (before >= 0)
        longest = int((lengths + starts).max())
    if position_ids.device.type == cu_seqlens.device.type == "cpu":
        first = position_ids.flatten(0, -2)[0, cu_seqlens[:-1].long()]
        if position_ids.ndim == 3:  # where a branch goes on depends on the pictures of its prefix
            starts = first.where(starts > 0, 0).to(starts.dtype)
        if not torch.equal(first, starts.to(first.dtype)):
            segment = int((first != starts).nonzero()[0])
            rule = f"go on at its prefix's length, {starts[segment]}" if starts[segment] else "restart at 0"
            raise ValueError(f"position_ids must {rule}: segment {segment} starts at {int(first[segment])}")
    if longest_exact_segment is not None and longest > longest_exact_segment:
        raise UserError(
            f"a segment of {longest} tokens with a rotary scaling that depends on the row's longest position: "
            f"lower --max_seq_length to {longest_exact_segment}, or set a static rope_type in the model's config"
        )


def tree_problem(text_config: Any) -> str | None:
    """Why prefix trees do not go with a language model, or None: with windows or with attention sinks."""
    kind = text_config.model_type
    if "sliding_attention" in (getattr(text_config, "layer_types", None) or ()):
        return (
            f"prefix trees with {kind!r}, whose layers have sliding windows: a branch would not see all of its prefix; "
            "use a model without windows"
        )
    if kind == "gpt_oss":
        return f"prefix trees with {kind!r}: its attention sinks are not joined with a prefix's; use a model without"
    return None
