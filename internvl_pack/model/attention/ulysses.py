"""Attention with the heads spread over the ranks: an all-to-all before it, another after it.

    q, k, v  (n, heads, D) of this rank's tokens  ->  (N, heads / size, D) of the row's
    any kernel, with the row's own boundaries
    out      (N, heads / size, D)  ->  (n, heads, D)

Rank r has query heads [r * Hq / size, ...) and the key/value heads they read. Where there are fewer of these than
ranks they are repeated, each copy in its head's place, which keeps groups of query heads together. q, k and v travel
in one collective.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...parallel.checks import kv_copies
from ...parallel.collectives import exchange
from ...parallel.group import SequenceGroup
from .kernels import Row


def ulysses_attention(
    attend: Callable[[Tensor, Tensor, Tensor, Row], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: Row,
    group: SequenceGroup,
) -> Tensor:
    """The kernel contract on a slice of the row: q (n, Hq, D), k and v (n, Hkv, D) to (n, Hq, D).

    Args:
        attend: attend(q, k, v, row) -> out, a kernel's `run` or another attention over the whole row.
        row: the whole row, which has n tokens a rank.
    """
    size = group.size
    copies = kv_copies(q.shape[1], k.shape[1], size)
    if copies > 1:
        k, v = (t.repeat_interleave(copies, 1) for t in (k, v))
    heads = [t.shape[1] // size for t in (q, k, v)]
    # (size, n, heads, D), a block for each rank
    blocks = torch.cat([t.unflatten(1, (size, -1)).transpose(0, 1) for t in (q, k, v)], 2)
    q, k, v = exchange(blocks, group.process_group).flatten(0, 1).split(heads, 1)
    out = attend(q, k, v, row)
    blocks = exchange(out.unflatten(0, (size, -1)), group.process_group)  # (size, n, heads / size, D)
    return blocks.transpose(0, 1).flatten(1, 2)
