"""Are the attention kernels right on this machine? Forward and backward, alone, with sinks, and inside a model.

    python benchmarks/gpu_check.py                       # every kernel that runs here
    python benchmarks/gpu_check.py --kernels flash_attn varlen
    python benchmarks/gpu_check.py --device cpu          # the script itself, in small

Errors are relative norms against float32, a sample at a time. A kernel passes if its error is at most twice
that of bfloat16 SDPA, also a sample at a time: the tolerance is the reference's own rounding, not a number
picked by hand. Each segment of a row is looked at by itself too, so that a short one cannot hide a leak.
Ends with exit code 1 if anything fails.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.measuring import Table, kernels_here, relative, versions
from internvl_pack.batch.collate import packed_collate_fn
from internvl_pack.batch.row import PackRow, Segment
from internvl_pack.model.attention import KERNELS, Row, register_packed_attention, select_kernel
from internvl_pack.model.attention.sinks import attend_with_sinks, masked_attention_with_sinks
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.images import normalize_tiles
from internvl_pack.model.packed import PackedModel
from internvl_pack.model.selfcheck import check_isolation
from internvl_pack.model.vision import use_tile_attention
from internvl_pack.testing.tiny import tiny_internvl, tiny_tokenizer

FACTOR = 2.0  # times the error of bfloat16 SDPA, a sample at a time
SEGMENT_ERROR = 0.05  # of the row's mean size, for each segment by itself: a leak is of order 1
TENSORS = ("out", "dq", "dk", "dv")
PARTS = ("kernels", "sinks", "model")

# Heads of query and key-value, head size: the language models of InternVL3-1B and -8B.
SHAPES = {"1B": (14, 2, 64), "8B": (28, 4, 128), "Llama-8B": (32, 8, 128)}
LENGTHS = [1, 3300, 7, 64, 1203, 1, 2049, 129, 300, 128, 577, 2]
SMALL_LENGTHS = [1, 33, 7, 64, 20, 1, 2]


def worst_segment(got: torch.Tensor, expected: torch.Tensor, lengths: list[int]) -> float:
    """The largest error of a segment, in units of the row's root mean square."""
    size = expected.square().mean().sqrt()
    errors = (got.float() - expected).split(lengths)
    return max((e.square().mean().sqrt() / size).item() for e in errors)


# --- kernels by themselves ------------------------------------------------------------------------


def run_kernel(run: Callable, inputs: list[torch.Tensor], upstream: torch.Tensor, row: Row) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = run(*leaves, row)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def check_kernels(kernels: list[str], device: torch.device, small: bool) -> int:
    lengths = SMALL_LENGTHS if small else LENGTHS
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    print(f"\nKernels on a row of {sum(lengths)} tokens, {len(lengths)} segments of {min(lengths)} to {max(lengths)}")
    table = Table(("shape", 9), ("window", 7), ("kernel", 11), *((t, 19) for t in TENSORS), ("segment", 8), ("", 6))
    for shape, (heads, kv_heads, dim) in SHAPES.items():
        for window in (None, 16 if small else 256):
            torch.manual_seed(0)
            inputs = [
                torch.randn(sum(lengths), h, dim, device=device, dtype=torch.bfloat16)
                for h in (heads, kv_heads, kv_heads)
            ]
            upstream = torch.randn(sum(lengths), heads, dim, device=device, dtype=torch.bfloat16)
            row = Row(cu_seqlens, max(lengths), dim**-0.5, window)
            with sdpa_kernel(SDPBackend.MATH):
                expected = run_kernel(KERNELS["sdpa"].run, [t.float() for t in inputs], upstream, row)
            by_sample = run_kernel(KERNELS["sdpa"].run, inputs, upstream, row)
            base = [relative(g, e) for g, e in zip(by_sample, expected, strict=True)]
            table.row(shape, window or "-", "bf16 sdpa", *(f"{b:.2e}" for b in base))
            for name in kernels:
                got = run_kernel(KERNELS[name].run, inputs, upstream, row)
                errors = [relative(g, e) for g, e in zip(got, expected, strict=True)]
                segment = max(worst_segment(g, e, lengths) for g, e in zip(got, expected, strict=True))
                ok = all(e <= FACTOR * b for e, b in zip(errors, base, strict=True)) and segment <= SEGMENT_ERROR
                cells = (f"{e:.2e} ({e / b:.2f}x)" for e, b in zip(errors, base, strict=True))
                table.row(shape, window or "-", name, *cells, f"{segment:.1e}", table.verdict(ok))
    return table.failures


# --- attention sinks ------------------------------------------------------------------------------

GPT_OSS = (64, 8, 64, 128)  # heads of query and key-value, head size, window of every other layer
SINK_TENSORS = (*TENSORS, "dsinks")


def sinks_one_by_one(lengths: list[int], window: int | None) -> Callable:
    """Attention written out with one more logit, a sample at a time."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, row: Row) -> torch.Tensor:
        parts = [
            [t.transpose(0, 1)[None] for t in parts]
            for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        ]
        outs = [masked_attention_with_sinks(*part, sinks, None, row.scale_of(q), window)[0] for part in parts]
        return torch.cat(outs)

    return run


def check_sinks(kernels: list[str], device: torch.device, small: bool) -> int:
    """GPT-OSS-20B's heads on a row: each kernel's log-sum-exp with sinks, forward and backward."""
    lengths = SMALL_LENGTHS if small else [n for n in LENGTHS if n <= 2049]  # scores are written out
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    heads, kv_heads, dim, sliding = (4, 2, 16, 16) if small else GPT_OSS
    print(f"\nAttention sinks, {heads} heads of {dim}, {sum(lengths)} tokens in {len(lengths)} segments")
    table = Table(("window", 7), ("kernel", 16), *((t, 19) for t in SINK_TENSORS), ("segment", 8), ("", 6))
    for window in (None, sliding):
        torch.manual_seed(0)
        inputs = [
            torch.randn(sum(lengths), h, dim, device=device, dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads)
        ]
        inputs.append(torch.linspace(-4, 8, heads, device=device, dtype=torch.bfloat16))
        upstream = torch.randn(sum(lengths), heads, dim, device=device, dtype=torch.bfloat16)
        row = Row(cu_seqlens, max(lengths), dim**-0.5, window)
        by_sample = sinks_one_by_one(lengths, window)
        expected = run_kernel(by_sample, [t.float() for t in inputs], upstream, row)
        base = [relative(g, e) for g, e in zip(run_kernel(by_sample, inputs, upstream, row), expected, strict=True)]
        table.row(window or "-", "bf16 one by one", *(f"{b:.2e}" for b in base))
        for name in kernels:
            got = run_kernel(partial(attend_with_sinks, KERNELS[name]), inputs, upstream, row)
            errors = [relative(g, e) for g, e in zip(got, expected, strict=True)]
            segment = max(worst_segment(g, e, lengths) for g, e in zip(got[:4], expected[:4], strict=True))
            ok = all(e <= FACTOR * b for e, b in zip(errors, base, strict=True)) and segment <= SEGMENT_ERROR
            cells = (f"{e:.2e} ({e / b:.2f}x)" for e, b in zip(errors, base, strict=True))
            table.row(window or "-", name, *cells, f"{segment:.1e}", table.verdict(ok))
    return table.failures


# --- inside a model -------------------------------------------------------------------------------


def make_model(small: bool):
    """InternVL3-1B's heads and tiles with fewer layers, random weights."""
    tokenizer = tiny_tokenizer(["a tokenizer of bytes is enough here"], vocab_size=512)
    if small:
        return tokenizer, tiny_internvl(tokenizer, "qwen2")
    model = tiny_internvl(
        tokenizer,
        "qwen2",
        image_size=448,
        vision_hidden_size=256,
        num_vision_layers=4,
        hidden_size=896,
        num_layers=6,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=2432,
        initializer_range=0.02,
    )
    return tokenizer, model


def make_samples(tokenizer, model, small: bool) -> list[Segment]:
    """Several images, one image, text only, a one-token answer: in lengths of a few to a few hundred tokens."""
    rng = np.random.default_rng(0)
    size = model.config.vision_config.image_size[0]
    tokens_per_tile = model.config.image_seq_length
    factor = 1 if small else 12
    plans = [(2, 20, 9), (0, 30, 40), (1, 7, 1), (3, 15, 25), (0, 1, 1), (1, 4, 33), (0, 60, 5), (2, 3, 12)]
    samples = []
    for i, (tiles, asked, answered) in enumerate(plans):
        asked, answered = (max(1, n * factor - i) if n > 1 else n for n in (asked, answered))
        image = np.full(tiles * tokens_per_tile, model.config.image_token_id)
        text = rng.integers(0, 256, asked + answered)
        ids = np.concatenate([image, text]).astype(np.int32)
        labels = np.full(len(ids), -100, dtype=np.int32)
        labels[len(image) + asked :] = text[asked:]
        pixels = rng.integers(0, 256, (tiles, 3, size, size), dtype=np.uint8)
        samples.append(Segment(f"sample/{i}", (0, 1), ids, labels, pixels, (tiles,) if tiles else (), answered))
    return samples


def run_one_by_one(model, samples: list[Segment], device, dtype) -> tuple[torch.Tensor, float, dict]:
    """transformers' own model and attention: logits of all tokens, the loss, gradients summed in float32."""
    model = copy.deepcopy(model).to(device, dtype)
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "sdpa", "": "sdpa"})
    count = sum(s.num_loss_tokens for s in samples)
    logits, loss, grads = [], 0.0, {}
    for sample in samples:
        ids, labels = (torch.from_numpy(a).long().to(device) for a in (sample.input_ids, sample.labels))
        pixels = normalize_tiles(torch.from_numpy(sample.tiles).to(device), dtype) if len(sample.tiles) else None
        out = model(input_ids=ids[None], pixel_values=pixels, use_cache=False).logits[0]
        ce = F.cross_entropy(out[:-1].float(), labels[1:], ignore_index=-100, reduction="sum") / count
        model.zero_grad()
        ce.backward()
        loss += ce.item()
        logits.append(out.detach().float())
        for name, p in model.named_parameters():
            if p.grad is not None:
                grads[name] = grads.get(name, 0.0) + p.grad.float()
    return torch.cat(logits), loss, grads


def run_packed(model, kernel: str, samples: list[Segment], device, checkpointing: bool, compiled: bool):
    """The same as one row; and how often a forward pass waited for the device."""
    model = copy.deepcopy(model).to(device, torch.bfloat16)
    model.set_attn_implementation({"text_config": register_packed_attention(kernel, device)})
    use_tile_attention(model, KERNELS[kernel])
    packed = PackedModel(model).train()
    check_isolation(packed)
    if checkpointing:
        packed.gradient_checkpointing_enable()
    if compiled:
        torch._dynamo.reset()
        compile_blocks(packed, backend="aot_eager" if device.type == "cpu" else "inductor")
    batch = packed_collate_fn([PackRow(list(samples))], image_size=model.config.vision_config.image_size[0])
    batch["num_image_tokens"] = sum(len(s.tiles) for s in samples) * packed.tokens_per_tile
    batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    logits = packed(**batch, return_logits=True).logits[0].detach().float()
    waits = 0
    if device.type == "cuda":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            packed(**batch, loss_normalizer=1.0)
            torch.cuda.set_sync_debug_mode("default")
        waits = sum("synchroniz" in str(w.message) for w in caught)
    loss = packed(**batch).loss
    loss.backward()
    return logits, loss.item(), {n: p.grad.float() for n, p in model.named_parameters()}, waits


GROUPS = ("model.vision_tower", "model.multi_modal_projector", "model.language_model", "lm_head")


def group_errors(got: dict, expected: dict) -> list[float]:
    errors = []
    for group in GROUPS:
        names = [n for n in expected if n.startswith(group)]
        errors.append(relative(*(torch.cat([g[n].flatten() for n in names]) for g in (got, expected))))
    return errors


def check_model(kernels: list[str], device: torch.device, small: bool) -> int:
    tokenizer, model = make_model(small)
    samples = make_samples(tokenizer, model, small)
    lengths = [len(s.input_ids) for s in samples]
    expected_logits, expected_loss, expected = run_one_by_one(model, samples, device, torch.float32)
    base_logits, base_loss, base_grads = run_one_by_one(model, samples, device, torch.bfloat16)
    base = [relative(base_logits, expected_logits), *group_errors(base_grads, expected)]
    print(
        f"\nInside a model: {len(samples)} samples, {sum(lengths)} tokens, {sum(len(s.tiles) for s in samples)} tiles;"
    )
    print(f"gradients by part; loss in float32 {expected_loss:.6f}")
    names = ("logits", "vision tower", "projector", "language model", "head")
    table = Table(("", 27), *((n, 19) for n in names), ("segment", 8), ("loss", 9), ("waits", 6), ("", 6))
    table.row("bf16 one by one", *(f"{b:.2e}" for b in base), "", f"{base_loss:.6f}")
    for name in kernels:
        for checkpointing, compiled in ((False, False), (True, False), (False, True), (True, True)):
            logits, loss, grads, waits = run_packed(model, name, samples, device, checkpointing, compiled)
            errors = [relative(logits, expected_logits), *group_errors(grads, expected)]
            segment = worst_segment(logits, expected_logits, lengths)
            ok = all(e <= FACTOR * b for e, b in zip(errors, base, strict=True))
            ok &= segment <= max(SEGMENT_ERROR, FACTOR * worst_segment(base_logits, expected_logits, lengths))
            label = name + " + ckpt" * checkpointing + " + compile" * compiled
            cells = (f"{e:.2e} ({e / b:.2f}x)" for e, b in zip(errors, base, strict=True))
            table.row(label, *cells, f"{segment:.1e}", f"{loss:.6f}", waits, table.verdict(ok))
    return table.failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", nargs="+", help="default: every kernel that runs on the device")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    device = torch.device(args.device)
    small = device.type != "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kernels = kernels_here(args.kernels, device)
    print(
        f"{versions(device)}\nkernels: {', '.join(kernels)}; --attn_kernel auto is {select_kernel('auto', device).name}"
    )
    failures = check_kernels(kernels, device, small) if "kernels" in args.parts else 0
    failures += check_sinks(kernels, device, small) if "sinks" in args.parts else 0
    failures += check_model(kernels, device, small) if "model" in args.parts else 0
    print(f"\n{failures} of the rows failed" if failures else "\nall rows passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
