"""Attention of prefix trees: branches that see their prefix and themselves, not each other.

A tree lies in the row as its prefix and then its branches, each a segment of its own:

    prefix | branch | branch | branch          the next tree, or a plain sample

    1. all segments, causally, as in any row
    2. the branches of each tree together, against the keys of its prefix, all of them

What the two give a branch is joined by their log-sum-exp in float32. No key is copied for a branch, and scores are made
only where a token is seen. With few long branches a single call, with the prefix's keys copied before those of each
branch, is up to a tenth faster; with many short ones it takes half as long again (docs/measurements.md).

Kept for the backward pass: q, k, v, out and the log-sum-exp. A kernel's backward half, given the joined ones, gives
each call's share of the gradients (kernels/base.py): they add up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .kernels import KERNELS, Gradients, Kernel, Row, attention_operation
from .ring import joined


class TreeLinks(NamedTuple):
    """Which tokens of a row see which prefix. Tensors on the device.

    Attributes:
        branch_places: int64 (B,), places in the row of the tokens of branches, tree by tree.
        prefix_places: int64 (P,), of the tokens of the prefixes that have branches.
        cu_branches, cu_prefixes: int32 (T+1,), boundaries of the T trees among them.
        max_branches, max_prefix: of one tree, the tokens of its branches together and of its prefix at most.
    """

    branch_places: Tensor
    prefix_places: Tensor
    cu_branches: Tensor
    cu_prefixes: Tensor
    max_branches: int
    max_prefix: int


def tree_links(cu_seqlens: Tensor, prefix_of: Tensor, device: torch.device | str) -> TreeLinks | None:
    """The links of a row; None where no segment has a prefix. The device is not waited for.

    Args:
        cu_seqlens: int32 (S+1,) on the host.
        prefix_of: int32 (S,) on the host: of each segment the number of its prefix's, -1 for none. Branches follow
            their prefix.

    Raises:
        ValueError: shapes that do not fit, or branches that do not follow their prefix.
    """
    bounds, prefixes = cu_seqlens.numpy(), prefix_of.numpy()
    if prefixes.shape != (len(bounds) - 1,):
        raise ValueError(f"prefix_of has {prefixes.size} entries for {len(bounds) - 1} segments")
    branches = np.flatnonzero(prefixes >= 0)
    if not len(branches):
        return None
    before = branches - 1  # a branch's neighbour is its prefix, or another branch of the same prefix
    follows = (prefixes[branches] == before) | (prefixes[before] == prefixes[branches])
    if branches[0] == 0 or not follows.all() or (prefixes[prefixes[branches]] >= 0).any():
        raise ValueError(f"branches must follow their prefix directly, prefix_of is {prefixes.tolist()}")
    roots, first = np.unique(prefixes[branches], return_index=True)
    last = np.append(first[1:], len(branches)) - 1
    begin, stop = bounds[roots + 1], bounds[branches[last] + 1]
    branch_tokens, prefix_tokens = stop - begin, bounds[roots + 1] - bounds[roots]

    def places(starts: np.ndarray, counts: np.ndarray) -> tuple[Tensor, Tensor]:
        total, edges = int(counts.sum()), np.append(0, np.cumsum(counts)).astype(np.int32)
        shift, cu = (torch.from_numpy(a).to(device, non_blocking=True) for a in (starts - edges[:-1], edges))
        return torch.arange(total, device=device) + shift.repeat_interleave(cu.diff(), output_size=total), cu

    branch_places, cu_branches = places(begin, branch_tokens)
    prefix_places, cu_prefixes = places(bounds[roots], prefix_tokens)
    longest = int(branch_tokens.max()), int(prefix_tokens.max())
    return TreeLinks(branch_places, prefix_places, cu_branches, cu_prefixes, *longest)


def attend_trees(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, row: Row, links: TreeLinks) -> Tensor:
    """q (N, Hq, D), k and v (N, Hkv, D) to out (N, Hq, D), as one operation, in a compiled layer too.

    Raises:
        ValueError: a row with a sliding window, which cuts a branch's view of its prefix.
    """
    if row.window is not None:
        raise ValueError(
            f"prefix trees with a sliding window of {row.window} tokens: leave --share_prefix out, or take a model "
            "without windows"
        )
    settings = (row.max_seqlen, links.max_branches, links.max_prefix, row.scale_of(q), kernel.name)
    return _attend(q.contiguous(), k.contiguous(), v.contiguous(), row.cu_seqlens, *links[:4], *settings)[0]


# The kernel, the rows of its two calls, and the places of the second one's queries and keys.
_Calls = tuple[Kernel, Row, Row, Tensor, Tensor]


def _forward(q: Tensor, k: Tensor, v: Tensor, calls: _Calls) -> tuple[Tensor, Tensor]:
    kernel, row, cross, branches, prefixes = calls
    assert kernel.forward is not None, "a kernel for trees has halves"
    out, lse = kernel.forward(q, k, v, row)
    more, more_lse = kernel.forward(q[branches], k[prefixes], v[prefixes], cross)
    both, both_lse = joined(out[branches].float(), lse[:, branches], more, more_lse)
    out[branches], lse[:, branches] = both.to(out.dtype), both_lse
    return out, lse


def _backward(upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, calls: _Calls) -> Gradients:
    kernel, row, cross, branches, prefixes = calls
    assert kernel.backward is not None, "a kernel with a forward has a backward"
    totals = kernel.backward(upstream, q, k, v, out, lse, row)
    seen = (out[branches], lse[:, branches].contiguous(), cross)
    parts = kernel.backward(upstream[branches], q[branches], k[prefixes], v[prefixes], *seen)
    for total, part, places in zip(totals, parts, (branches, prefixes, prefixes), strict=True):
        total[places] += part  # no place comes twice
    return totals


def _halves(
    cu_seqlens: Tensor,
    branches: Tensor,
    prefixes: Tensor,
    cu_branches: Tensor,
    cu_prefixes: Tensor,
    max_seqlen: int,
    max_branches: int,
    max_prefix: int,
    scale: float,
    kernel: str,
) -> tuple[Any, Any, _Calls]:
    row = Row(cu_seqlens, max_seqlen, scale)
    cross = Row(cu_branches, max_branches, scale, None, False, cu_prefixes, max_prefix)
    return _forward, _backward, (KERNELS[kernel], row, cross, branches, prefixes)


_attend, _ = attention_operation(
    "attend_trees",
    "Tensor cu_seqlens, Tensor branches, Tensor prefixes, Tensor cu_branches, Tensor cu_prefixes, SymInt max_seqlen, "
    "SymInt max_branches, SymInt max_prefix, float scale, str kernel",
    _halves,
)
