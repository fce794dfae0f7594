"""How fast is a step through layers of experts? Forward and backward of packed rows on one GPU.

    python benchmarks/moe.py                          # InternVL3.5-30B-A3B's language model with 6 of its 48 layers
    python benchmarks/moe.py --device cpu --shape tiny --tokens 256 --repeats 1      # the script itself, in small

Random weights and token ids; lengths drawn from real_mix_a.csv, as many as fill a row of --tokens, without images. Ways
take turns in each repetition, the table has the median; without an optimizer, in bfloat16, gradient checkpointing off.

    loop          a loop over the experts (--experts_implementation eager)
    grouped       one grouped product (grouped_mm)
    compiled      the same with --compile
    balanced      grouped with the balance loss of the routers (--router_loss_coef)

MFU is that of internvl_pack/model/flops.py: operations of the parameters that a token meets, over the card's dense
bfloat16 peak.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Table, peak_gb, release, seconds_of, versions
from benchmarks.train_step import draw_samples
from internvl_pack.batch.collate import packed_collate_fn
from internvl_pack.batch.row import PackRow, Segment
from internvl_pack.model.attention import register_packed_attention
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.experts import choose_experts
from internvl_pack.model.flops import flop_counts, peak_flops
from internvl_pack.model.packed import PackedModel
from train.router_loss import RouterLoss

SHAPES: dict[str, dict[str, Any]] = {
    "30b6": {"vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rope_theta": 1e6},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 32}
    | {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
}
WAYS = {  # name: (experts, compiled, coefficient of the balance loss)
    "loop": ("eager", False, 0.0),
    "grouped": ("grouped_mm", False, 0.0),
    "compiled": ("grouped_mm", True, 0.0),
    "balanced": ("grouped_mm", False, 1e-3),
}


def make_model(shape: str, device: torch.device, dtype: torch.dtype) -> PackedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe", max_position_embeddings=32768, tie_word_embeddings=False, **SHAPES[shape]
    )
    torch.manual_seed(0)
    with device:
        implementation = register_packed_attention("auto", device, dtype)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
    return PackedModel(model).train()


def make_row(num_tokens: int, vocabulary: int, seed: int) -> dict[str, Any]:
    """A row of samples of the real mix without their images, the last one cut to fill it."""
    rng = np.random.default_rng(seed)
    lengths, left = [], num_tokens
    for sample in draw_samples(num_tokens * 4, num_tokens, 1 << 20, seed):
        length = min(left, max(2, sample.num_tokens))
        lengths.append(length)
        left -= length
        if left < 2:
            break
    segments = []
    for number, length in enumerate(lengths):
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        labels = np.where(np.arange(length) < length // 2, -100, ids).astype(np.int32)
        empty = np.zeros((0, 3, 448, 448), dtype=np.uint8)
        count = int((labels[1:] != -100).sum())
        segments.append(Segment(f"s/{number}", (0, 1), ids, labels, empty, (), count))
    return packed_collate_fn([PackRow(segments)])


def on(device: torch.device, row: dict[str, Any]) -> dict[str, Any]:
    """Boundaries stay on the host, as in training."""
    host = ("cu_seqlens", "pixel_values")
    return {k: v.to(device) if isinstance(v, torch.Tensor) and k not in host else v for k, v in row.items()}


def step_of(packed: PackedModel, coefficient: float) -> Callable[[dict[str, Any]], None]:
    router = RouterLoss(coefficient, processes=1) if coefficient else None
    if router is not None:
        packed.balance_routers()

    def step(row: dict[str, Any]) -> None:
        if router is not None:
            router.begin_step([row], row["num_real_tokens"])
        out = packed(**row)
        loss = out.loss if router is None else out.loss + router.of(out)
        loss.backward()
        packed.zero_grad(set_to_none=True)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="30b6", choices=SHAPES)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--tokens", type=int, default=16384, help="of a row")
    parser.add_argument("--rows", type=int, default=4, help="different rows")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(versions(device))
    rows = [on(device, make_row(args.tokens, SHAPES[args.shape]["vocab_size"], seed)) for seed in range(args.rows)]
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops(card)
    found: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    for way in args.ways:  # one after the other: a model of each would not fit beside the others
        experts, compiled, coefficient = WAYS[way]
        packed = make_model(args.shape, device, dtype)
        choose_experts(packed.language_model, experts)
        if compiled:
            compile_blocks(packed, backend="inductor" if device.type == "cuda" else "aot_eager")
        step = step_of(packed, coefficient)
        counts = flop_counts(packed.config)
        for row in rows:  # warm, and compiled for every shape
            step(row)
        peak_gb(device, reset=True)
        found[way] = [seconds_of(partial(step, row), device) for _ in range(args.repeats) for row in rows]
        memory[way] = peak_gb(device) * 1e9 / 2**30
        del packed, step
        release(device)
    operations = statistics.mean(counts.of(row) for row in rows)
    print(f"{args.shape}, rows of {args.tokens} tokens, {dtype}")
    table = Table(("way", 10), ("ms a row", 10), ("tokens/s", 10), ("MFU", 8), ("peak GiB", 8))
    for way, times in found.items():
        median = statistics.median(times)
        share = f"{100 * operations / median / peak:.1f} %" if peak else "-"
        table.row(way, f"{1000 * median:.1f}", f"{args.tokens / median:,.0f}", share, f"{memory[way]:.1f}")


if __name__ == "__main__":
    main()
