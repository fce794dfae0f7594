"""Attention on packed rows against dense attention of the same operations, and the vision tower's attention.

    python benchmarks/attention.py
    python benchmarks/attention.py --device cpu          # the script itself, in small

First table: the varlen kernels on rows of many segments, and on a batch of equal sequences with as many
operations, there beside PyTorch's dense causal SDPA. TFLOP/s count 2 n^2 Hq D a causal segment forward,
2.5 times that backward. Second table: rotary embedding, attention and the whole decoder layer over the
number of segments of a row: what does not depend on lengths must be flat. Third: a tile's attention.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Table, kernels_here, seconds_of, versions
from internvl_pack.model.attention import KERNELS, Row

# query heads, key-value heads, head size: InternVL3-1B, InternVL3-8B
SHAPES = {"1B": (14, 2, 64), "8B": (28, 4, 128)}


def timed(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds."""
    return statistics.median([seconds_of(call, device) for _ in range(repeats + 2)][2:])


def forward_and_backward(attend: Callable, inputs: list[torch.Tensor]) -> tuple[Callable, Callable]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    upstream = torch.randn_like(attend(*inputs))

    def forward() -> object:
        with torch.no_grad():
            return attend(*inputs)

    return forward, lambda: torch.autograd.grad(attend(*leaves), leaves, upstream)


def rates(attend: Callable, inputs: list[torch.Tensor], flops: float, device, repeats: int) -> tuple[str, str, str]:
    try:
        forward, both = forward_and_backward(attend, inputs)
        one, two = timed(forward, device, repeats), timed(both, device, repeats)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        return "-", "-", str(error).splitlines()[0][:60]
    return f"{flops / one / 1e12:.0f}", f"{3.5 * flops / two / 1e12:.0f}", f"{two * 1e3:.2f}"


def lengths_of(total: int, low: int, high: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while total - sum(lengths) > high:
        lengths.append(int(rng.integers(low, high + 1)))
    return [*lengths, total - sum(lengths)]


def language(kernels: list[str], device: torch.device, dtype: torch.dtype, small: bool, repeats: int) -> None:
    total = 1024 if small else 16384
    rows = {"one sample's mix": lengths_of(total, total // 54, total // 5), "4 equal": [total // 4] * 4}
    table = Table(("shape", 6), ("row", 18), ("kernel", 16), ("forward", 9), ("fwd + bwd", 9), ("ms", 8))
    print(f"\nCausal attention, {total} tokens a row, TFLOP/s")
    for shape, (heads, kv_heads, dim) in SHAPES.items():
        for name, lengths in rows.items():
            flops = sum(n * n for n in lengths) * 2.0 * heads * dim
            inputs = [torch.randn(total, h, dim, device=device, dtype=dtype) for h in (heads, kv_heads, kv_heads)]
            cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
            row = Row(cu_seqlens, max(lengths), dim**-0.5)
            for kernel in kernels:

                def packed(q, k, v, run=KERNELS[kernel].run, row=row):
                    return run(q, k, v, row)

                table.row(shape, name, kernel, *rates(packed, inputs, flops, device, repeats))
            if name != "4 equal":
                continue

            def dense(q, k, v, size=lengths[0]):
                q, k, v = (t.view(4, size, t.shape[1], -1).transpose(1, 2) for t in (q, k, v))
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                with sdpa_kernel(backend):
                    label = f"dense {backend.name.split('_')[0].lower()}"
                    table.row(shape, name, label, *rates(dense, inputs, flops, device, repeats))


def segments(kernels: list[str], device: torch.device, dtype: torch.dtype, small: bool, repeats: int) -> None:
    """Cost of a decoder layer's parts over the number of segments of a row, milliseconds forward."""
    from transformers import AutoConfig
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

    total = 512 if small else 16384
    config = AutoConfig.for_model("qwen2", hidden_size=896, num_attention_heads=14, num_key_value_heads=2)
    rotary = Qwen2RotaryEmbedding(config).to(device)
    q, k, v = (torch.randn(1, h, total, 64, device=device, dtype=dtype) for h in (14, 2, 2))
    print(f"\nA row of {total} tokens in S equal segments, ms forward")
    table = Table(("segments", 9), ("rotary table", 13), ("apply it", 9), *((f"attention {k}", 22) for k in kernels))
    for count in (1, 4, 16, 64, 256):
        size = total // count
        positions = torch.arange(size, device=device).repeat(count)[None]
        cu_seqlens = torch.arange(0, total + 1, size, dtype=torch.int32, device=device)
        cos, sin = rotary(v, positions)
        cells = [timed(lambda p=positions: rotary(v, p), device, repeats)]
        cells.append(timed(lambda c=cos, s=sin: apply_rotary_pos_emb(q, k, c, s), device, repeats))
        flat = [t[0].transpose(0, 1) for t in (q, k, v)]
        row = Row(cu_seqlens, size)
        for kernel in kernels:
            run = KERNELS[kernel].run
            cells.append(timed(lambda r=run, a=(*flat, row): r(*a), device, repeats))
        table.row(count, *(f"{c * 1e3:.3f}" for c in cells))


def vision(device: torch.device, dtype: torch.dtype, small: bool, repeats: int) -> None:
    tiles, patches = (2, 17) if small else (48, 1025)
    inputs = [torch.randn(tiles, patches, 16, 64, device=device, dtype=dtype) for _ in range(3)]
    flops = 4.0 * tiles * patches**2 * 16 * 64
    print(f"\nA tower's layer: {tiles} tiles of {patches} patches, 16 heads of 64, not causal, TFLOP/s")
    table = Table(("kernel", 22), ("forward", 9), ("fwd + bwd", 9), ("ms", 8))

    def dense(q, k, v):
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return out.transpose(1, 2)

    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, None):
        if backend is None:
            table.row("sdpa's own choice", *rates(dense, inputs, flops, device, repeats))
            continue
        with sdpa_kernel(backend):
            table.row(backend.name.lower(), *rates(dense, inputs, flops, device, repeats))
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        flash_attn_varlen_func = None
    cu_seqlens = torch.arange(0, tiles * patches + 1, patches, dtype=torch.int32, device=device)
    if flash_attn_varlen_func is not None:

        def flash2(q, k, v):
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, patches, patches)

        table.row("flash-attn 2 varlen", *rates(flash2, inputs, flops, device, repeats))
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return

    def flash4(q, k, v):
        out = flash_attn_func(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    table.row("FlashAttention 4", *rates(flash4, inputs, flops, device, repeats))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", nargs="+", help="default: every kernel that runs on the device")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    device = torch.device(args.device)
    small = device.type != "cuda"
    dtype = torch.float32 if small else torch.bfloat16
    kernels = kernels_here(args.kernels, device, dtype)
    repeats = 2 if small else args.repeats
    print(versions(device))
    language(kernels, device, dtype, small, repeats)
    segments([k for k in kernels if k != "sdpa"] or kernels, device, dtype, small, repeats)
    vision(device, dtype, small, repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
