"""The checks of a pack's boundaries, before any kernel reads them: on the host, as far as they are there."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError


def validate_cu_seqlens(cu_seqlens: Any, num_tokens: int, max_seqlen: int | None = None) -> None:
    """Check a row's boundaries once, on the host, before any kernel reads them.

    Args:
        cu_seqlens: int32 (S+1,), numpy or torch; a CUDA tensor costs a synchronisation.
        num_tokens: N, tokens of the row, pad segment included.
        max_seqlen: as it will be given to the kernel; None if it is not known yet.

    Raises:
        ValueError: says which rule is broken.
    """
    _check_form(cu_seqlens, max_seqlen)
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, starts at {bounds[0]}")
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if stop < 0:
            raise ValueError(f"cu_seqlens[{i + 1}] is {stop}: the row's length has wrapped around int32")
        if stop <= start:
            kind = "is empty (repeated boundary)" if stop == start else "runs backwards"
            raise ValueError(f"cu_seqlens must be strictly increasing: segment {i} from {start} to {stop} {kind}")
    if bounds[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens ends at {bounds[-1]}, the row has {num_tokens} tokens: give the rest a pad segment of its "
            "own, or trim the row; gradients of uncovered tokens are undefined"
        )
    if max_seqlen is not None:
        longest = max(stop - start for start, stop in itertools.pairwise(bounds))
        if max_seqlen != longest:
            raise ValueError(f"max_seqlen is {max_seqlen}, the longest segment has {longest} tokens")


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
        _check_form(cu_seqlens, max_seqlen)
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


def _check_form(cu_seqlens: Any, max_seqlen: Any) -> None:
    """What can be said of boundaries without reading their values: no synchronisation.

    Raises:
        ValueError: wrong shape or dtype, no segment, or a max_seqlen that is not a Python int.
    """
    if not hasattr(cu_seqlens, "dtype") or len(cu_seqlens.shape) != 1:
        raise ValueError(f"cu_seqlens must be an int32 vector (S+1,), is {_describe(cu_seqlens)}")
    if cu_seqlens.shape[0] < 2:
        raise ValueError("cu_seqlens has no segment: an empty pack must not reach the model")
    if (dtype := str(cu_seqlens.dtype).removeprefix("torch.")) != "int32":
        raise ValueError(f"cu_seqlens must be int32, is {dtype}: the kernels would refuse or misread it")
    if max_seqlen is not None and type(max_seqlen) is not int:
        raise ValueError(f"max_seqlen must be a Python int, is {_describe(max_seqlen)}: layers must not ask the device")


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
