"""Attention kernels behind one signature.

    kernel(q, k, v, cu_seqlens, max_seqlen, scale, window) -> out

    q, out      (N, Hq, D)      the row's tokens, heads, head size
    k, v        (N, Hkv, D)     Hq is a multiple of Hkv; heads are grouped, never expanded here
    cu_seqlens  int32 (S+1,)    starts at 0, strictly increasing, ends at N; on q's device
    max_seqlen  int             longest segment, known on the host
    scale       float | None    of q.k; None means D ** -0.5
    window      int | None      keys a query sees at most, its own included; None means all before it

Each query sees the keys of its own segment at or before its own place (window 2 on the right):

    a a a b b         a a a b b
    x . . . .         x . . . .
    x x . . .         x x . . .
    x x x . .         . x x . .
    . . . x .         . . . x .
    . . . x x         . . . x x

A kernel is added with one function and one `register_kernel` line; `auto` takes the first of `AUTO_ORDER`
that the device can run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import UserError

KernelFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float | None, int | None], torch.Tensor
]
AUTO_ORDER = ("flash_attn", "varlen", "sdpa")
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel and where it runs.

    Attributes:
        name: what `--attn_kernel` calls it.
        run: the function, by the contract above.
        problem: of a device: None if the kernel runs there, else why not and what to do instead.
        half_only: whether q, k, v must be float16 or bfloat16.
    """

    name: str
    run: KernelFunction
    problem: Callable[[torch.device], str | None]
    half_only: bool

    @property
    def implementation(self) -> str:
        """The kernel's name among transformers' attention functions.

        It must not contain "flash": transformers takes that for one of its own and swaps masks.
        """
        return "internvl_pack_" + self.name.replace("flash_attn", "fa")


KERNELS: dict[str, Kernel] = {}


def register_kernel(kernel: Kernel) -> Kernel:
    KERNELS[kernel.name] = kernel
    return kernel


def select_kernel(
    name: str = "auto", device: torch.device | str | None = None, compute_dtype: torch.dtype = torch.bfloat16
) -> Kernel:
    """The kernel called `name`, or with `auto` the first of AUTO_ORDER that runs on `device`.

    Args:
        device: where the model will run; None means CUDA where there is one.
        compute_dtype: of q, k and v in training, so under autocast that of the autocast.

    Raises:
        UserError: an unknown name, or a kernel that was asked for and cannot run so.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if name == "auto":
        return next(KERNELS[n] for n in AUTO_ORDER if _problem(KERNELS[n], device, compute_dtype) is None)
    if name not in KERNELS:
        raise UserError(f"--attn_kernel {name!r} is unknown: use auto, {', '.join(KERNELS)}")
    if problem := _problem(KERNELS[name], device, compute_dtype):
        raise UserError(f"--attn_kernel {name} {problem}")
    return KERNELS[name]


def _problem(kernel: Kernel, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    if problem := kernel.problem(device):
        return problem
    if kernel.half_only and compute_dtype not in HALF:
        return f"computes in bfloat16 or float16, this run in {compute_dtype}: set --bf16, or --attn_kernel sdpa"
    return None


# --- SDPA, a segment at a time: the reference, and the CPU's kernel ------------------------------


def sdpa(q, k, v, cu_seqlens, max_seqlen, scale, window):
    """PyTorch's SDPA on each segment by itself; any dtype, any device, forward and backward.

    The row is split once rather than sliced per segment: the gradient of S slices of an N-token row
    costs S * N, that of one split costs N.
    """
    lengths = _segment_lengths(cu_seqlens)
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    outputs = []
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        masking = {"is_causal": True}
        if window is not None and window < len(qs):
            masking = {"attn_mask": _window_mask(len(qs), window, q.device)}
        qs, ks, vs = (t.transpose(0, 1).unsqueeze(0) for t in (qs, ks, vs))
        out = F.scaled_dot_product_attention(qs, ks, vs, scale=scale, **masking, **grouped)
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


_lengths_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _segment_lengths(cu_seqlens: torch.Tensor) -> list[int]:
    """Host lengths of the segments; asked of the device once a row, not once a layer."""
    if cu_seqlens.device.type == "cpu":
        return cu_seqlens.diff().tolist()
    if cu_seqlens not in _lengths_of:
        _lengths_of[cu_seqlens] = cu_seqlens.diff().tolist()
    return _lengths_of[cu_seqlens]


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """(length, length) bool: True where query i sees key j, i - window < j <= i."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


# --- flash-attn 2 ---------------------------------------------------------------------------------


@functools.cache
def _flash_attn_varlen_func() -> Callable | None:
    try:  # FlashAttention 4 shares the package's name, and a wheel for another torch fails only here
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError, RuntimeError):
        return None
    return flash_attn_varlen_func


def flash_attn(q, k, v, cu_seqlens, max_seqlen, scale, window):
    """flash-attn 2's `flash_attn_varlen_func`."""
    return _flash_attn_varlen_func()(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=True,
        window_size=(_left(window, max_seqlen), 0),
    )


# --- torch's own ----------------------------------------------------------------------------------


@functools.cache
def _varlen_attn() -> tuple[Callable, bool] | None:
    """torch's function, and whether grouped heads must be announced (torch 2.13; 2.11 just takes them)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen(q, k, v, cu_seqlens, max_seqlen, scale, window):
    """torch.nn.attention.varlen: the flash-attn 2 kernel inside torch; causal is a window of (-1, 0)."""
    attend, announce = _varlen_attn()
    grouped = {"enable_gqa": True} if announce and q.shape[1] != k.shape[1] else {}
    window_size = (_left(window, max_seqlen), 0)
    return attend(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=window_size, **grouped
    )


def _left(window: int | None, max_seqlen: int) -> int:
    """flash-attn's left window, which leaves the query's own key out; -1 is no limit."""
    return -1 if window is None or window >= max_seqlen else window - 1


# --- where they run -------------------------------------------------------------------------------


def _needs_ampere(device: torch.device) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"needs a CUDA device, this run is on {device.type}: use --attn_kernel auto or sdpa"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 or newer (Ampere): use --attn_kernel sdpa"
    return None


def _flash_attn_problem(device: torch.device) -> str | None:
    if problem := _needs_ampere(device):
        return problem
    if _flash_attn_varlen_func() is None:
        return "needs flash-attn 2: pip install 'internvl-pack[flash]', or use --attn_kernel auto or varlen"
    return None


def _varlen_problem(device: torch.device) -> str | None:
    if problem := _needs_ampere(device):
        return problem
    if _varlen_attn() is None:
        return "needs torch.nn.attention.varlen (torch 2.10 or newer): upgrade torch, or use --attn_kernel auto"
    return None


register_kernel(Kernel(name="flash_attn", run=flash_attn, problem=_flash_attn_problem, half_only=True))
register_kernel(Kernel(name="varlen", run=varlen, problem=_varlen_problem, half_only=True))
register_kernel(Kernel(name="sdpa", run=sdpa, problem=lambda device: None, half_only=False))
