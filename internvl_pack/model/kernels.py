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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import UserError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

KernelFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float | None, int | None], torch.Tensor
]
AUTO_ORDER = ("fa4", "flash_attn", "varlen", "sdpa")
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel and where it runs.

    Attributes:
        name: what `--attn_kernel` calls it.
        run: the function, by the contract above.
        problem: of a device: None if the kernel runs there, else why not and what to do instead.
        half_only: whether q, k, v must be float16 or bfloat16.
        forward, backward: the two halves of `run`, for a compiled layer (attention_op.py); None where `run`
            is called between two graphs instead. forward gives (out, logsumexp of the scores as float32
            (Hq, N)); backward(upstream, q, k, v, out, logsumexp, cu_seqlens, max_seqlen, scale, window)
            gives the gradients of q, k and v.
        tiles_forward, tiles_backward: the same without causality or boundaries, for the vision tower
            (tile_attention.py): tiles_forward(q, k, v, scale), each (T, P, H, D), and tiles_backward(upstream, q, k,
            v, out, logsumexp, scale, into), which writes the gradients into the three tensors `into`, if that is not
            None; None where SDPA is used there.
    """

    name: str
    run: KernelFunction
    problem: Callable[[torch.device], str | None]
    half_only: bool
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
    tiles_forward: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    tiles_backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None

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


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """PyTorch's SDPA on each segment by itself; any dtype, any device, forward and backward.

    The row is split once rather than sliced per segment: the gradient of S slices of an N-token row
    costs S * N, that of one split costs N.
    """
    lengths = segment_lengths(cu_seqlens)
    grouped = q.shape[1] != k.shape[1]
    outputs = []
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        mask = None if window is None or window >= len(qs) else _window_mask(len(qs), window, q.device)
        qs, ks, vs = (t.transpose(0, 1).unsqueeze(0) for t in (qs, ks, vs))
        out = F.scaled_dot_product_attention(
            qs, ks, vs, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def sdpa_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch gives no logsumexp: the gradient computes again."""
    out = sdpa(q, k, v, cu_seqlens, max_seqlen, scale, window)
    return out, q.new_zeros((q.shape[1], q.shape[0]), dtype=torch.float32)


def sdpa_backward(
    upstream: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient written out, a segment at a time: inside an operation there is no autograd."""
    lengths = segment_lengths(cu_seqlens)
    group = q.shape[1] // k.shape[1]
    parts = [t.float().split(lengths) for t in (upstream, q, k, v, out)]
    gradients = []
    for do, qs, ks, vs, o in zip(*parts, strict=True):
        do, qs, o = (t.transpose(0, 1) for t in (do, qs, o))  # (Hq, n, D)
        ks, vs = (t.transpose(0, 1).repeat_interleave(group, 0) for t in (ks, vs))
        seen = _window_mask(qs.shape[1], window or qs.shape[1], q.device)
        p = (qs @ ks.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)
        ds = p * (do @ vs.mT - (do * o).sum(-1, keepdim=True)) * scale
        per_head = (ds @ ks, ds.mT @ qs, p.mT @ do)
        dq, dk, dv = (g.transpose(0, 1) for g in per_head)
        gradients.append((dq, dk.unflatten(1, (-1, group)).sum(2), dv.unflatten(1, (-1, group)).sum(2)))
    dq, dk, dv = (torch.cat(g).to(q.dtype) for g in zip(*gradients, strict=True))
    return dq, dk, dv


_lengths_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def segment_lengths(cu_seqlens: torch.Tensor) -> list[int]:
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


def flash_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """flash-attn 2's `flash_attn_varlen_func`."""
    run = _flash_attn_varlen_func()
    assert run is not None, "checked by _flash_attn_problem"
    return run(
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


def flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_forward

    row = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    settings = {"causal": True, "window_size_left": _left(window, max_seqlen), "window_size_right": 0}
    out, lse, *_ = _wrapped_flash_attn_varlen_forward(q, k, v, *row, 0.0, scale, **settings)
    return out, lse


def flash_attn_backward(
    upstream: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_backward

    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    row = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    settings = (0.0, scale, True, _left(window, max_seqlen), 0, 0.0, None, False)
    _wrapped_flash_attn_varlen_backward(upstream, q, k, v, out, lse, dq, dk, dv, *row, *settings)
    return dq, dk, dv


# --- FlashAttention 4 and 3 -----------------------------------------------------------------------


@functools.cache
def _fa4_varlen_func() -> Callable | None:
    try:  # its compiler's libraries are found, or not, only when it is imported
        from flash_attn.cute import flash_attn_varlen_func
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    return flash_attn_varlen_func


def fa4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """FlashAttention 4 (`flash-attn-4`, compiled at first use): Hopper and Blackwell.

    Without a window `None` is what it takes for no limit; a limit beyond the longest segment is none.
    """
    limit = None if window is None or window >= max_seqlen else window
    run = _fa4_varlen_func()
    assert run is not None, "checked by _fa4_problem"
    out = run(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=True,
        window_size=(None, None) if limit is None else (limit - 1, 0),
    )
    return out[0] if isinstance(out, tuple) else out


def fa4_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(
        q, k, v, softmax_scale=scale, return_lse=True, **_fa4_row(cu_seqlens, max_seqlen, window)
    )
    return out, lse


def fa4_backward(
    upstream: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    row = _fa4_row(cu_seqlens, max_seqlen, window)
    return _flash_attn_bwd(q, k, v, out, upstream, lse, softmax_scale=scale, **row)[:3]


def fa4_tiles_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=False, return_lse=True)
    return out, lse


def fa4_tiles_backward(
    upstream: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    into: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv = into or (None, None, None)
    return _flash_attn_bwd(q, k, v, out, upstream, lse, softmax_scale=scale, causal=False, dq=dq, dk=dk, dv=dv)[:3]


def _fa4_row(cu_seqlens: torch.Tensor, max_seqlen: int, window: int | None) -> dict[str, Any]:
    limit = None if window is None or window >= max_seqlen else window
    return {
        "causal": True,
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "window_size_left": None if limit is None else limit - 1,
        "window_size_right": None if limit is None else 0,
    }


@functools.cache
def _fa3_varlen_func() -> Callable | None:
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except (ImportError, OSError, RuntimeError):
        return None
    return flash_attn_varlen_func


def fa3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """FlashAttention 3 (`flash_attn_interface`, built from flash-attention's `hopper` folder): Hopper."""
    run = _fa3_varlen_func()
    assert run is not None, "checked by _fa3_problem"
    out = run(
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
    return out[0] if isinstance(out, tuple) else out


# --- flex_attention -------------------------------------------------------------------------------


def flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """torch's flex_attention under a block mask of the segments; compiled on a GPU, forward only on a CPU."""
    mask = _block_mask(cu_seqlens, len(q), window)
    attend = _flex_attention(q.device.type)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    return attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]).squeeze(0).transpose(0, 1)


@functools.cache
def _flex_attention(device_type: str) -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    if device_type == "cuda":
        return torch.compile(flex_attention, dynamic=True)
    return flex_attention


_masks_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _block_mask(cu_seqlens: torch.Tensor, num_tokens: int, window: int | None) -> BlockMask:
    """The row's mask, made once for all its layers."""
    masks = _masks_of.setdefault(cu_seqlens, {})
    if window not in masks:
        from torch.nn.attention.flex_attention import create_block_mask

        places = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        segment = torch.searchsorted(cu_seqlens, places, right=True)

        def sees(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            seen = (segment[query] == segment[key]) & (key <= query)
            return seen if window is None else seen & (query - key < window)

        masks[window] = create_block_mask(sees, None, None, num_tokens, num_tokens, device=cu_seqlens.device)
    return masks[window]


# --- torch's own ----------------------------------------------------------------------------------


@functools.cache
def _varlen_attn() -> tuple[Callable, bool] | None:
    """torch's function, and whether grouped heads must be announced (torch 2.13; 2.11 just takes them)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
    implementation: str | None = None,
) -> torch.Tensor:
    """torch.nn.attention.varlen: the flash-attn 2 kernel inside torch; causal is a window of (-1, 0).

    With an `implementation`, "FA3" or "FA4", over FlashAttention 3 or 4 instead. PyTorch keeps one choice for the whole
    process, so SDPA's flash backend follows it.
    """
    _use_flash_attention(implementation)
    found = _varlen_attn()
    assert found is not None, "checked by _varlen_problem"
    attend, announce = found
    grouped = {"enable_gqa": True} if announce and q.shape[1] != k.shape[1] else {}
    window_size = (_left(window, max_seqlen), 0)
    return attend(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=window_size, **grouped
    )


_flash_attention_in_use: list[str] = []  # at most one: what was activated here


def _use_flash_attention(implementation: str | None) -> None:
    """Activate FlashAttention 3 or 4 under torch's operations, or with None take back what was activated here."""
    if _flash_attention_in_use == ([implementation] if implementation else []):
        return
    import torch.nn.attention

    if implementation is None:
        torch.nn.attention.restore_flash_attention_impl()
        _flash_attention_in_use.clear()
    else:
        torch.nn.attention.activate_flash_attention_impl(implementation)
        _flash_attention_in_use[:] = [implementation]


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


def _fa4_problem(device: torch.device) -> str | None:
    if problem := _needs_ampere(device):
        return problem
    if torch.cuda.get_device_capability(device)[0] not in (9, 10, 11):
        return "needs a Hopper or Blackwell GPU: use --attn_kernel auto"
    if _fa4_varlen_func() is None:
        return "needs FlashAttention 4: pip install --pre flash-attn-4, or use --attn_kernel auto"
    return None


def _fa3_problem(device: torch.device) -> str | None:
    if problem := _needs_ampere(device):
        return problem
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "needs a Hopper GPU: use --attn_kernel auto"
    if _fa3_varlen_func() is None:
        return "needs FlashAttention 3, built from flash-attention's hopper folder; or use --attn_kernel auto"
    return None


def _varlen_over_problem(
    implementation: str, of_it: Callable[[torch.device], str | None], device: torch.device
) -> str | None:
    if problem := _varlen_problem(device) or of_it(device):
        return problem
    try:
        from torch.nn.attention import list_flash_attention_impls
    except ImportError:
        return "needs torch.nn.attention.activate_flash_attention_impl (torch 2.11 or newer): upgrade torch"
    if implementation not in list_flash_attention_impls():
        return f"needs a PyTorch that knows {implementation}: upgrade torch, or use --attn_kernel auto"
    return _trial_of_varlen_over(implementation, device)


@functools.cache
def _trial_of_varlen_over(implementation: str, device: torch.device) -> str | None:
    """Forward and backward of two short segments: versions of torch and of the implementation may not go together."""
    try:
        q = torch.zeros(24, 2, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        boundaries = torch.tensor([0, 16, 24], dtype=torch.int32, device=device)
        varlen(q, q, q, boundaries, 16, None, None, implementation).sum().backward()
    except Exception as error:  # whatever a mismatch leads to
        return (
            f"does not run with this torch and {implementation} ({type(error).__name__}: {str(error)[:80]}): "
            f"use --attn_kernel {implementation.lower()}"
        )
    finally:
        _use_flash_attention(None)
    return None


def _flex_problem(device: torch.device) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"has a backward pass on CUDA only, this run is on {device.type}: use --attn_kernel auto or sdpa"
    return None


register_kernel(
    Kernel(
        name="flash_attn",
        run=flash_attn,
        problem=_flash_attn_problem,
        half_only=True,
        forward=flash_attn_forward,
        backward=flash_attn_backward,
    )
)
register_kernel(Kernel(name="varlen", run=varlen, problem=_varlen_problem, half_only=True))
register_kernel(
    Kernel(
        name="sdpa",
        run=sdpa,
        problem=lambda device: None,
        half_only=False,
        forward=sdpa_forward,
        backward=sdpa_backward,
    )
)
register_kernel(
    Kernel(
        name="fa4",
        run=fa4,
        problem=_fa4_problem,
        half_only=True,
        forward=fa4_forward,
        backward=fa4_backward,
        tiles_forward=fa4_tiles_forward,
        tiles_backward=fa4_tiles_backward,
    )
)
register_kernel(Kernel(name="fa3", run=fa3, problem=_fa3_problem, half_only=True))
for _name, _problem_of in (("fa3", _fa3_problem), ("fa4", _fa4_problem)):
    register_kernel(
        Kernel(
            name=f"varlen_{_name}",
            run=functools.partial(varlen, implementation=_name.upper()),
            problem=functools.partial(_varlen_over_problem, _name.upper(), _problem_of),
            half_only=True,
        )
    )
register_kernel(Kernel(name="flex", run=flex, problem=_flex_problem, half_only=False))
