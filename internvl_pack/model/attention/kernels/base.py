"""What an attention kernel is: a function of the row's q, k and v, and its two halves, which know the log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
FLASH_HEADS = range(8, 257, 8)  # head sizes that flash attention takes


class Row(NamedTuple):
    """Which keys each query of a row sees.

    Attributes:
        cu_seqlens: int32 (S+1,), starts at 0, strictly increasing, ends at N; on q's device.
        max_seqlen: longest segment, known on the host.
        scale: of q.k; None means D ** -0.5.
        window: keys a query sees at most, its own included; None means all before it.
        causal: a query sees the keys of its segment at or before its own place; without it (in the halves alone)
            a query sees all keys of its segment.
        key_cu_seqlens, max_key_seqlen: boundaries of the keys, if they are not those of the queries (without causality
            and window only): the keys of as many segments, from 0 to all of them, and their longest.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    scale: float | None = None
    window: int | None = None
    causal: bool = True
    key_cu_seqlens: Tensor | None = None
    max_key_seqlen: int | None = None

    @property
    def keys(self) -> tuple[Tensor, int]:
        """The boundaries of the keys and their longest segment."""
        if self.key_cu_seqlens is None or self.max_key_seqlen is None:
            return self.cu_seqlens, self.max_seqlen
        return self.key_cu_seqlens, self.max_key_seqlen

    @property
    def limit(self) -> int | None:
        """The window; None where no segment is longer."""
        return None if self.window is None or self.window >= self.max_seqlen else self.window

    @property
    def flash_window(self) -> tuple[int, int]:
        """flash-attn's window, to the left and to the right, the query's own key left out; -1 is no limit."""
        return -1 if self.limit is None else self.limit - 1, 0 if self.causal else -1

    def scale_of(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel and where it runs.

    Attributes:
        name: what `--attn_kernel` calls it.
        run: run(q, k, v, row) -> out, with its gradient; the row is causal.
        problem: of a device: None if the kernel runs there, else why not and what to do instead.
        half_only: whether q, k, v must be float16 or bfloat16.
        head_sizes: that it takes; None for all.
        forward: forward(q, k, v, row) -> out, lse, without a gradient, called outside of autocast. lse is the
            log-sum-exp of the scores, float32 (Hq, N). None where a compiled layer is to call `run` between two graphs.
        backward: backward(upstream, q, k, v, out, lse, row) -> gradients of q, k and v, in their types or float32. out
            and lse may be those of more keys than the row's: probabilities are then the row's share of them, and the
            gradients of all rows that made them add up to the exact ones (ring.py).
        tiles_forward, tiles_backward: the same without causality or boundaries, for the vision tower:
            tiles_forward(q, k, v, scale), each (T, P, H, D), and tiles_backward(upstream, q, k, v, out, logsumexp,
            scale, into), which writes the gradients into the three tensors `into`, if that is not None; None where
            SDPA is used there.
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor, Row], Tensor]
    problem: Callable[[torch.device], str | None]
    half_only: bool
    head_sizes: range | None = None
    forward: Callable[[Tensor, Tensor, Tensor, Row], tuple[Tensor, Tensor]] | None = None
    backward: Callable[..., Gradients] | None = None
    tiles_forward: Callable[..., tuple[Tensor, Tensor]] | None = None
    tiles_backward: Callable[..., Gradients] | None = None

    @property
    def implementation(self) -> str:
        """The kernel's name among transformers' attention functions.

        It must not contain "flash": transformers takes that for one of its own and swaps masks; nor "sdpa", which
        it refuses for models that have attention sinks.
        """
        return "internvl_pack_" + self.name.replace("flash_attn", "fa").replace("sdpa", "segments")


# By name. `auto` takes the first that runs on the device in the type of the run.
KERNELS: dict[str, Kernel] = {}


def run_device(device: torch.device | str | None) -> torch.device:
    """Where a model will run; None means CUDA where there is one."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def needs_ampere(device: torch.device) -> str | None:
    """Why flash attention does not run on the device, if it does not."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"needs a CUDA device, this run is on {device.type}: use --attn_kernel auto or sdpa"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 or newer (Ampere): use --attn_kernel sdpa"
    return None
