"""Attention over several sets of keys from that over each, by the log-sum-exp of their scores.

The backward half of a kernel, given out and log-sum-exp of all the sets together, gives each set's share of the
gradients (kernels/base.py): they add up.
"""

from __future__ import annotations

import torch
from torch import Tensor


def joined(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each: out (n, H, D), float32, overwritten; lse (H, n).

    The weight of the new one is exp(new_lse) / (exp(lse) + exp(new_lse)).
    """
    weight = torch.sigmoid(new_lse - lse).t().unsqueeze(-1)
    return out.lerp_(new_out.float(), weight), torch.logaddexp(lse, new_lse)
