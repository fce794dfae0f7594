"""The two collectives of sequence parallelism, with their gradients.

Nothing is divided by the number of ranks anywhere: the ranks' losses add up to the row's, so gradients do too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has other names for them, and warns of those that 2.11 knows.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def exchange(blocks: Tensor, process_group: Any) -> Tensor:
    """All-to-all: block r of (size, ...) goes to rank r; block r of the result came from rank r."""
    return _Exchange.apply(blocks, process_group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: Tensor, process_group: Any) -> Tensor:
        ctx.process_group = process_group
        return _exchanged(blocks, process_group)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return _exchanged(upstream, ctx.process_group), None  # what came from rank r goes back to it


def _exchanged(blocks: Tensor, process_group: Any) -> Tensor:
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=process_group)
    return received


def gather(rows: Tensor, process_group: Any) -> Tensor:
    """Everybody's `rows` (k, ...), equally many, one rank's after the other's: (size * k, ...).

    The gradient of a rank's rows is the sum of what all ranks give for them: one reduce-scatter.
    """
    return _Gather.apply(rows, process_group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, process_group: Any) -> Tensor:
        ctx.process_group = process_group
        rows = rows.contiguous()
        gathered = rows.new_empty((dist.get_world_size(process_group) * len(rows), *rows.shape[1:]))
        _all_gather(gathered, rows, group=process_group)
        return gathered

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        upstream = upstream.contiguous()
        size = dist.get_world_size(ctx.process_group)
        own = upstream.new_empty((len(upstream) // size, *upstream.shape[1:]))
        _reduce_scatter(own, upstream, group=ctx.process_group)
        return own, None


def summed(values: Tensor, process_group: Any) -> Tensor:
    """The sum of everybody's `values`, on every rank.

    Each rank's own share keeps its gradient as it is: every rank goes on with the same sum, and makes the gradients of
    its own slice.
    """
    return _Summed.apply(values, process_group)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, process_group: Any) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=process_group)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None
