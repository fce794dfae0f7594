"""The checks of a pack's boundaries, on the host, before any kernel reads them."""

from __future__ import annotations

import itertools
from typing import Any


def validate_cu_seqlens(cu_seqlens: Any, num_tokens: int, max_seqlen: int | None = None) -> None:
    """Check a row's boundaries once, on the host, before any kernel reads them.

    Args:
        cu_seqlens: int32 (S+1,), numpy or torch; a CUDA tensor costs a synchronisation.
        num_tokens: N, tokens of the row, pad segment included.
        max_seqlen: as it will be given to the kernel; None if it is not known yet.

    Raises:
        ValueError: says which rule is broken.
    """
    check_cu_seqlens_form(cu_seqlens, max_seqlen)
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


def check_cu_seqlens_form(cu_seqlens: Any, max_seqlen: Any) -> None:
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
