"""The vision tower's memory-bound operations as Triton kernels; what each computes says fused_ops.py.

Every kernel reads each of its inputs once. Sums over rows (gradients of biases and norms) are made in that pass: each
program adds up its own rows in float32 and stores one partial sum, and a second, small step adds those. No atomics, so
the same machine gives the same bits again.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

# Measured on an H100 at 48 tiles and 1,024 wide; a half to twice of each costs up to a tenth of the kernel's time.
NORM_PROGRAMS_A_PROCESSOR, NORM_WARPS = 12, 2  # the norm's gradient; each program takes a run of rows
SUM_PROGRAMS_A_PROCESSOR, SUM_WARPS = 16, 4  # GELU's gradient and sums; each takes a run of rows of some columns
SUM_ROWS, SUM_COLUMNS = 32, 128  # at a time
STAGES = tl.constexpr(3)  # loads in flight at once


@triton.jit
def _add_norm(
    x, y, bias, weight, norm_bias, total, normed, means, scales, width, epsilon,
    ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    at = row.to(tl.int64) * width + columns
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            values += tl.load(bias + columns, mask=inside, other=0.0)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    mean = tl.sum(values, 0) / width
    centred = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + epsilon)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(norm_bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (centred * scale * w + b).to(normed.dtype.element_ty), mask=inside)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@triton.jit
def _add_norm_backward(
    normed_grad, total_grad, total, means, scales, weight, grad, sums, rows, width, run,
    HAS_TOTAL: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((WIDTH,), tl.float32)
    bias_sum = tl.zeros((WIDTH,), tl.float32)
    grad_sum = tl.zeros((WIDTH,), tl.float32)
    first = program.to(tl.int64) * run  # int64 here only: elements of all tiles may be more than 2^31
    normed_grad += first * width
    total_grad += first * width
    total += first * width
    grad += first * width
    for row in tl.range(0, tl.minimum(run, rows - first).to(tl.int32), num_stages=STAGES):
        at = row * width + columns
        g = tl.load(normed_grad + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + first + row)
        x = tl.where(inside, (x - tl.load(means + first + row)) * scale, 0.0)
        weight_sum += g * x
        bias_sum += g
        g *= w
        g = scale * (g - tl.sum(g, 0) / width - x * (tl.sum(g * x, 0) / width))
        if HAS_TOTAL:
            g += tl.load(total_grad + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad + at, g.to(grad.dtype.element_ty), mask=inside)
        grad_sum += tl.where(inside, g, 0.0)
    mine = sums + program.to(tl.int64) * 3 * width + columns
    tl.store(mine, weight_sum, mask=inside)
    tl.store(mine + width, bias_sum, mask=inside)
    tl.store(mine + 2 * width, grad_sum, mask=inside)


@triton.jit
def _gelu_backward(
    upstream, inputs, grad, again, sums, rows, width, run,
    AGAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(1)
    first = program.to(tl.int64) * run
    count = tl.minimum(run, rows - first).to(tl.int32)
    upstream += first * width
    inputs += first * width
    grad += first * width
    again += first * width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, count, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (columns < width)[None, :]
        at = row[:, None] * width + columns[None, :]
        x = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(upstream + at, mask=inside, other=0.0).to(tl.float32)
        below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        g *= below + x * density
        tl.store(grad + at, g.to(grad.dtype.element_ty), mask=inside)
        if AGAIN:
            tl.store(again + at, (x * below).to(again.dtype.element_ty), mask=inside)
        total += g
    tl.store(sums + program.to(tl.int64) * width + columns, tl.sum(total, 0), mask=columns < width)


@triton.jit
def _column_sums(values, sums, rows, width, run, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(1)
    first = program.to(tl.int64) * run
    count = tl.minimum(run, rows - first).to(tl.int32)
    values += first * width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, count, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (columns < width)[None, :]
        at = row[:, None] * width + columns[None, :]
        total += tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + program.to(tl.int64) * width + columns, tl.sum(total, 0), mask=columns < width)


@triton.jit
def _fold(weight, bias, scale, folded, folded_bias, width, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    at = row.to(tl.int64) * width + columns
    s = tl.load(scale + row).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(folded + at, (w * s).to(folded.dtype.element_ty), mask=inside)
    tl.store(folded_bias + row, tl.load(bias + row).to(tl.float32) * s)


@triton.jit
def _fold_backward(
    folded_grad, sums, weight, bias, scale, weight_grad, bias_grad, scale_grad, width, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    at = row.to(tl.int64) * width + columns
    s = tl.load(scale + row).to(tl.float32)
    g = tl.load(folded_grad + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(weight_grad + at, (g * s).to(weight_grad.dtype.element_ty), mask=inside)
    b, b_grad = tl.load(bias + row).to(tl.float32), tl.load(sums + row)
    tl.store(bias_grad + row, (b_grad * s).to(bias_grad.dtype.element_ty))
    tl.store(scale_grad + row, (tl.sum(g * w, 0) + b_grad * b).to(scale_grad.dtype.element_ty))


def add_norm(
    x: Tensor, y: Tensor | None, bias: Tensor | None, weight: Tensor, norm_bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, width = x.shape
    total = x if y is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    means, scales = x.new_empty((2, rows), dtype=torch.float32)
    _add_norm[(rows,)](
        x, x if y is None else y, weight if bias is None else bias, weight, norm_bias, total, normed, means, scales,
        width, epsilon, ADDS=y is not None, HAS_BIAS=bias is not None, WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return total, normed, means, scales


def add_norm_backward(
    normed_grad: Tensor, total_grad: Tensor | None, total: Tensor, means: Tensor, scales: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    rows, width = total.shape
    programs, run = _runs(rows, NORM_PROGRAMS_A_PROCESSOR * _processors(total.device), 1)
    grad = torch.empty_like(total)
    sums = total.new_empty((programs, 3, width), dtype=torch.float32)
    _add_norm_backward[(programs,)](
        normed_grad, normed_grad if total_grad is None else total_grad, total, means, scales, weight, grad, sums,
        rows, width, run, HAS_TOTAL=total_grad is not None, WIDTH=triton.next_power_of_2(width), num_warps=NORM_WARPS,
    )  # fmt: skip
    return grad, sums.sum(0)


def gelu_backward(upstream: Tensor, inputs: Tensor, again: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    rows, width = inputs.shape
    blocks = triton.cdiv(width, SUM_COLUMNS)
    programs, run = _runs(rows, SUM_PROGRAMS_A_PROCESSOR * _processors(inputs.device) // blocks, SUM_ROWS)
    outputs = torch.empty_like(inputs) if again else None
    sums = inputs.new_empty((programs, width), dtype=torch.float32)
    _gelu_backward[(blocks, programs)](
        upstream, inputs, upstream, upstream if outputs is None else outputs, sums, rows, width, run,
        AGAIN=again, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=SUM_WARPS,
    )  # fmt: skip
    return upstream, outputs, sums.sum(0)


def column_sums(values: Tensor) -> Tensor:
    rows, width = values.shape
    blocks = triton.cdiv(width, SUM_COLUMNS)
    programs, run = _runs(rows, SUM_PROGRAMS_A_PROCESSOR * _processors(values.device) // blocks, SUM_ROWS)
    sums = values.new_empty((programs, width), dtype=torch.float32)
    _column_sums[(blocks, programs)](
        values, sums, rows, width, run, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=SUM_WARPS
    )  # fmt: skip
    return sums.sum(0)


def fold(weight: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = weight.shape
    folded, folded_bias = torch.empty_like(weight), weight.new_empty((rows,), dtype=torch.float32)
    _fold[(rows,)](
        weight, bias, scale, folded, folded_bias, width, WIDTH=triton.next_power_of_2(width), num_warps=4
    )  # fmt: skip
    return folded, folded_bias


def fold_backward(
    folded_grad: Tensor, sums: Tensor, weight: Tensor, bias: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = weight.shape
    grads = torch.empty_like(weight), torch.empty_like(bias), torch.empty_like(scale)
    _fold_backward[(rows,)](
        folded_grad, sums, weight, bias, scale, *grads, width, WIDTH=triton.next_power_of_2(width), num_warps=4
    )  # fmt: skip
    return grads


def _runs(rows: int, programs: int, step: int) -> tuple[int, int]:
    """How many programs share the rows, and how many rows, a multiple of `step`, each takes."""
    run = triton.cdiv(triton.cdiv(rows, max(1, programs)), step) * step
    return triton.cdiv(rows, run), run


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
