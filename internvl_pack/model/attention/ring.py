"""Attention with keys and values going round the ranks, for more ranks than heads.

Every rank keeps its queries. Keys and values travel from rank to rank, N - 1 times, the next ones in transit while
the present ones are attended to. By the zigzag slicing (parallel/slices.py) each rank has a front and a back part of
every segment, and of another rank's keys

    my own           front sees front (causal); back sees front, and back (causal)
    an earlier rank  front and back see its front; its back comes after both
    a later rank     back sees its front and back; both come after my front

so every step but the first is two whole blocks, on every rank. What the blocks give is joined by their log-sum-exp in
float32. In the backward pass keys and values go round again, followed by their gradients (float32), which arrive at
their own rank after N steps. Kept for it: q, k, v, out and the log-sum-exp of this rank's tokens.

The scheme is that of zigzag ring attention (Liu et al. 2023; Zhu's ring-flash-attention).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.group import SequenceGroup
from .kernels import Kernel, Row


def ring_attention(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, row: Row, group: SequenceGroup) -> Tensor:
    """q (n, Hq, D), k and v (n, Hkv, D) of this rank's tokens, fronts then backs, to out (n, Hq, D).

    Args:
        kernel: whose halves to use, one of parallel.checks.RING_KERNELS.
        row: of the fronts, int32 boundaries (S+1,) from 0 to n / 2; the backs have the same.

    Raises:
        ValueError: a row with a sliding window, which cuts each block differently.
    """
    if row.window is not None:
        raise ValueError(
            f"ring attention has no sliding windows, the layer has one of {row.window} tokens: use ulysses"
        )
    with torch.autocast(q.device.type, enabled=False):
        return _Ring.apply(q, k, v, row, group, kernel)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, row: Row, group: SequenceGroup, kernel: Kernel) -> Tensor:
        assert kernel.forward is not None, "checked by check_kernel"
        q, kv = q.contiguous(), torch.stack([k, v])
        travelling = kv
        queries = q.chunk(2)
        outs: dict[int, Tensor] = {}  # of my front and back, float32
        lses: dict[int, Tensor] = {}
        for step in range(group.size):
            arriving = _Arriving(travelling, group) if step + 1 < group.size else None
            keys, values = (t.chunk(2) for t in travelling)
            for mine, theirs, causal in seen_parts(step, group.rank):
                block = row._replace(causal=causal)
                out, lse = kernel.forward(queries[mine], keys[theirs], values[theirs], block)
                if mine not in outs:
                    outs[mine], lses[mine] = out.float(), lse
                else:
                    outs[mine], lses[mine] = joined(outs[mine], lses[mine], out, lse)
            if arriving is not None:
                travelling = arriving.wait()
        out = torch.cat([outs[part].to(q.dtype) for part in (0, 1)])
        ctx.save_for_backward(q, kv, out, lses[0], lses[1])
        ctx.rest = (row, group, kernel)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, *lses = ctx.saved_tensors
        row, group, kernel = ctx.rest
        queries, outs, upstreams = (t.chunk(2) for t in (q, out, upstream.contiguous()))
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        travelling = kv
        following: _Arriving | None = None  # gradients of the keys and values at hand, by the ranks they have been to
        for step in range(group.size):
            arriving = _Arriving(travelling, group) if step + 1 < group.size else None
            keys, values = (t.chunk(2) for t in travelling)
            own = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
            for mine, theirs, causal in seen_parts(step, group.rank):
                seen = (outs[mine], lses[mine], row._replace(causal=causal))
                parts = kernel.backward(upstreams[mine], queries[mine], keys[theirs], values[theirs], *seen)
                totals = (dq.chunk(2)[mine], own[0].chunk(2)[theirs], own[1].chunk(2)[theirs])
                for total, part in zip(totals, parts, strict=True):
                    total.add_(part)
            following = _Arriving(own if following is None else own.add_(following.wait()), group)
            if arriving is not None:
                travelling = arriving.wait()
        assert following is not None, "a group has ranks"
        dk, dv = following.wait().to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


def joined(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each: out (n, H, D), float32, overwritten; lse (H, n).

    The weight of the new one is exp(new_lse) / (exp(lse) + exp(new_lse)). A kernel's backward half, given out and lse
    of all the sets together, gives each set's share of the gradients (kernels/base.py): they add up.
    """
    weight = torch.sigmoid(new_lse - lse).t().unsqueeze(-1)
    return out.lerp_(new_out.float(), weight), torch.logaddexp(lse, new_lse)


def seen_parts(step: int, rank: int) -> tuple[tuple[int, int, bool], ...]:
    """(my part, part of the keys, causal) of each block; 0 is the front. At `step` the keys are rank - step's."""
    if step == 0:
        return (0, 0, True), (1, 1, True), (1, 0, False)
    if step <= rank:
        return (0, 0, False), (1, 0, False)
    return (1, 0, False), (1, 1, False)


class _Arriving:
    """A tensor sent to the next rank, and the previous rank's to be received."""

    def __init__(self, tensor: Tensor, group: SequenceGroup) -> None:
        self.sent = tensor  # must not change or go before it has left
        self.received = torch.empty_like(tensor)
        following, previous = (group.ranks[(group.rank + d) % group.size] for d in (1, -1))
        send = dist.P2POp(dist.isend, tensor, following, group.process_group)
        receive = dist.P2POp(dist.irecv, self.received, previous, group.process_group)
        # Even ranks send first: a backend that takes one at a time then meets a receiver.
        self.works = dist.batch_isend_irecv([send, receive] if group.rank % 2 == 0 else [receive, send])

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received
