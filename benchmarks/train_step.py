"""How fast is a training step on packs, against padding and against packing the usual way? One process, one GPU.

    python benchmarks/train_step.py                     # the 1B shape, then the 8B shape with 8 decoder layers
    python benchmarks/train_step.py --shapes 1b --kernels flash_attn fa4 --profile
    python benchmarks/train_step.py --device cpu        # the script itself, in small

Random weights, pixels and token ids; lengths, tiles and labels of samples drawn from real_mix_a.csv. Every way
trains on the same samples, forward and backward without an optimizer, in bfloat16. Ways take turns in each
repetition; the table has the median. Host-to-device copies are part of the time, decoding is not.

    padded      micro-batches of 2 samples of like length, transformers' own model, sdpa, logits of all tokens
    reference   packed as InternVL does: boundaries found on the device in every layer, logits of all tokens
    given       boundaries given with the row, logits only where there is a label (internvl_pack)
    compiled    the same with --compile

useful tokens/s counts real tokens. MFU is that of internvl_pack/model/flops.py over the card's dense bfloat16
peak: operations of real tokens and tiles by segments, nothing for recomputation.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # rows differ in size
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import (
    Table,
    in_turns,
    kernels_here,
    pinned,
    print_kernels,
    relative_of_all,
    release,
    seconds_of,
    synchronize,
    take_gradients,
    versions,
)
from internvl_pack.batch.collate import packed_collate_fn, padded_collate_fn, to_device
from internvl_pack.batch.row import PackRow, Segment
from internvl_pack.model.attention import KERNELS, Row, register_packed_attention
from internvl_pack.model.compiled import RECOMPUTE, compile_blocks
from internvl_pack.model.flops import flop_counts, peak_flops
from internvl_pack.model.images import normalize_tiles
from internvl_pack.model.loss import select_loss_kernel
from internvl_pack.model.packed import PackedModel
from internvl_pack.model.vision import FusedTower, use_tile_attention
from internvl_pack.packing.budget import Budget
from internvl_pack.packing.packer import Packer
from internvl_pack.parallel.slices import RowSlice

LENGTHS = Path(__file__).resolve().parent / "real_mix_a.csv"
IMAGE_TOKEN = 151_671
VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
VISION |= {"image_size": [448, 448], "patch_size": [14, 14], "attention_bias": True, "use_qk_norm": False}
QWEN = {"vocab_size": 151_674, "max_position_embeddings": 32768, "rope_theta": 1e6}
SHAPES = {
    # InternVL3-1B: InternViT-300M and Qwen2.5-0.5B
    "1b": QWEN
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    # InternVL3-8B's widths (InternViT-300M and Qwen2.5-7B) with 8 of its 28 decoder layers
    "8b8": QWEN
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 8}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "tiny": {"vocab_size": 512, "max_position_embeddings": 32768, "hidden_size": 64, "intermediate_size": 128}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
}


# --- models ---------------------------------------------------------------------------------------


def internvl_config(vision: dict[str, Any], text: dict[str, Any], image_token: int) -> Any:
    """InternViT's and Qwen2's settings as one model's; a token for each square of 28 pixels."""
    from transformers import AutoConfig, InternVLConfig

    return InternVLConfig(
        vision_config=vision,
        text_config=AutoConfig.for_model("qwen2", **text),
        image_token_id=image_token,
        image_seq_length=(vision["image_size"][0] // 28) ** 2,
        downsample_ratio=0.5,
        tie_word_embeddings=text["tie_word_embeddings"],
    )


def make_model(shape: str, device: torch.device, kernel: str, dtype: torch.dtype) -> PackedModel:
    from transformers import InternVLForConditionalGeneration

    vision, image_token = dict(VISION), IMAGE_TOKEN
    if shape == "tiny":
        vision |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision["image_size"], image_token = [56, 56], 500
    config = internvl_config(vision, SHAPES[shape], image_token)
    implementations = {"text_config": register_packed_attention(kernel, device, dtype), "vision_config": "sdpa"}
    torch.manual_seed(0)
    with device:
        model = InternVLForConditionalGeneration._from_config(
            config, attn_implementation=implementations | {"": "sdpa"}, dtype=dtype
        )
    return PackedModel(model).train()


def register_reference(kernel: str) -> str:
    """Attention as InternVL's patch does it: each layer finds the boundaries in the positions, on the device."""
    from transformers import AttentionInterface

    run = KERNELS[kernel].run

    def reference(module, query, key, value, attention_mask, scaling=None, position_ids=None, **_):
        starts = (position_ids[0] == 0).nonzero().squeeze(1).int()
        cu_seqlens = torch.cat([starts, starts.new_tensor([position_ids.shape[1]])])
        max_seqlen = int(cu_seqlens.diff().max())
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        return run(q, k, v, Row(cu_seqlens, max_seqlen, scaling)).unsqueeze(0), None

    AttentionInterface.register("packed_reference", reference)
    return "packed_reference"


# --- data -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    key: tuple[int]
    num_tokens: int
    num_tiles: int
    num_loss_tokens: int
    num_unseen_pairs: int = 0
    num_tile_pairs: int = 0


def read_mix() -> list[dict[str, str]]:
    with open(LENGTHS, encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def draw_samples(total_tokens: int, max_tokens: int, max_tiles: int, seed: int, scale: int = 1) -> list[Sample]:
    """Samples of the real mix in random order until `total_tokens`; those above the smallest budget are left out."""
    rows = read_mix()
    order = np.random.default_rng(seed).permutation(len(rows))
    samples, tokens = [], 0
    for i in order.tolist():
        row = rows[i]
        n, tiles, labels = (int(row[k]) for k in ("num_tokens", "num_tiles", "num_loss_tokens"))
        if n > max_tokens or tiles > max_tiles:
            continue
        if scale > 1:  # in small: 4 tokens a tile instead of 256
            n, labels = 4 * tiles + max(2, (n - 256 * tiles) // scale), max(1, labels // scale)
        samples.append(Sample((len(samples),), n, tiles, min(labels, n - 1)))
        tokens += n
        if tokens >= total_tokens:
            break
    return samples


def make_segment(sample: Sample, core: PackedModel, pixels: torch.Tensor) -> Segment:
    rng = np.random.default_rng(sample.key[0])
    image_id = core.config.image_token_id
    ids = rng.integers(0, image_id, sample.num_tokens).astype(np.int32)
    ids[: sample.num_tiles * core.tokens_per_tile] = image_id
    labels = np.full(len(ids), -100, dtype=np.int32)
    labels[-sample.num_loss_tokens :] = ids[-sample.num_loss_tokens :]
    tiles = pixels[: sample.num_tiles].numpy()
    images = (sample.num_tiles,) if sample.num_tiles else ()
    return Segment(str(sample.key[0]), (0, 1), ids, labels, tiles, images, sample.num_loss_tokens)


def make_packs(samples: list[Sample], tokens: int, tiles: int) -> list[list[Sample]]:
    packer, packs, waiting = Packer(Budget(tokens, tiles)), [], iter(samples)
    for sample in waiting:
        packer.add(sample)
        while packer.full:
            packs.append(packer.pop()[1])
    while packer.waiting:
        packs.append(packer.pop()[1])
    return packs


def pairs_by_length(samples: list[Sample]) -> list[list[Sample]]:
    ordered = sorted(samples, key=lambda s: s.num_tokens)
    return [ordered[i : i + 2] for i in range(0, len(ordered), 2)]


def make_batches(groups: list[list[Sample]], core: PackedModel, pixels: torch.Tensor, padded: bool) -> list[dict]:
    options = {"image_token_id": core.config.image_token_id, "image_size": core.config.vision_config.image_size[0]}
    batches = []
    for group in groups:
        segments = [make_segment(s, core, pixels) for s in group]
        if padded:
            batch = padded_collate_fn([PackRow([s]) for s in segments], **options)
        else:
            batch = packed_collate_fn([PackRow(segments)], **options)
        batches.append(pinned(batch))
    return batches


# --- ways -----------------------------------------------------------------------------------------


@dataclass
class Way:
    """A row of the table."""

    name: str
    batches: list[dict]
    step: Callable[[dict], torch.Tensor]
    compiled: bool = False
    checkpointing: bool = False
    attention: str = ""
    tiles: str = "sdpa"  # attention in the vision tower
    fused: bool = True  # its layers, where they can be
    host: float = 0.0  # of the last pass, see `run_pass`


def transformers_step(core: PackedModel, batch: dict[str, Any]) -> torch.Tensor:
    """transformers' own forward: logits of all tokens."""
    pixels = batch["pixel_values"]
    inputs = {k: batch[k] for k in ("input_ids", "labels", "attention_mask", "position_ids") if k in batch}
    if "attention_mask" in inputs:
        inputs.pop("position_ids")
    if len(pixels):
        inputs["pixel_values"] = normalize_tiles(pixels, core.dtype)
    return core.model(**inputs, use_cache=False).loss


def packed_step(core: PackedModel, batch: dict[str, Any]) -> torch.Tensor:
    return core(**batch, loss_normalizer=float(max(1, batch["num_loss_tokens"]))).loss


@contextlib.contextmanager
def set_up(core: PackedModel, way: Way) -> Iterator[None]:
    core.model.set_attn_implementation({"text_config": way.attention, "vision_config": way.tiles})
    if way.checkpointing:
        core.gradient_checkpointing_enable()
    core.is_compiled = way.compiled
    core.head.loss_kernel = core.loss_kernels[way.compiled]
    tower = core.vision_modules[0].encoder.forward
    if isinstance(tower, FusedTower):
        tower.off = not (way.compiled and way.fused)
    stance = contextlib.nullcontext() if way.compiled else torch.compiler.set_stance("force_eager")
    with stance:
        yield
    if way.checkpointing:
        core.gradient_checkpointing_disable()


def run_pass(core: PackedModel, way: Way, device: torch.device) -> float:
    """Seconds of one pass over the way's batches; `way.host` is the share after which all work had been issued."""
    synchronize(device)
    started = time.perf_counter()
    for batch in way.batches:
        way.step(to_device(batch, device)).backward()
        core.zero_grad(set_to_none=True)
    issued = time.perf_counter() - started
    synchronize(device)
    whole = time.perf_counter() - started
    way.host = issued / whole
    return whole


def measure(core: PackedModel, ways: list[Way], repeats: int, device: torch.device, peak: float | None) -> dict:
    """Table of the ways; medians by name, in useful tokens/s."""
    counts = flop_counts(core.config)

    def one_pass(way: Way) -> float | None:
        with set_up(core, way):
            try:
                return run_pass(core, way, device)
            except torch.OutOfMemoryError:
                core.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                return None

    passes = {way.name: partial(one_pass, way) for way in ways}
    # Those with checkpointing are there for their memory.
    times = in_turns(passes, repeats, device, once=[way.name for way in ways if way.checkpointing])
    table = Table(
        ("way", 40), ("rows", 5), ("fill", 6), ("useful tokens/s", 16), ("spread", 7), ("peak GB", 8), ("MFU", 7),
        ("host", 6),
    )  # fmt: skip
    speeds = {}
    for way in ways:
        if way.name not in times:
            table.row(way.name, len(way.batches), "", "out of memory")
            continue
        found = times[way.name]
        real = sum(b["num_real_tokens"] for b in way.batches)
        flops = sum(counts.of(b) for b in way.batches if "sum_squared_lengths" in b)
        mfu = f"{flops / found.median / peak:.1%}" if peak else "-"
        fill = real / sum(b["num_tokens"] for b in way.batches)
        speeds[way.name] = real / found.median
        table.row(
            way.name, len(way.batches), f"{fill:.1%}", f"{speeds[way.name]:,.0f}", found.spread,
            f"{found.peak_gb:.1f}", mfu, f"{way.host:.0%}",
        )  # fmt: skip
    return speeds


def compare(core: PackedModel, eager: Way, compiled: Way, device: torch.device) -> None:
    """Loss and gradients of one row, compiled against not compiled: they should differ by rounding only."""
    results = []
    for way in (eager, compiled):
        with set_up(core, way):
            loss = way.step(to_device(compiled.batches[0], device))
            loss.backward()
        results.append((loss.item(), take_gradients(core)))
    (one, ours), (two, theirs) = results
    apart = relative_of_all(theirs, ours)
    print(f"    loss {one:.6f} uncompiled, {two:.6f} '{compiled.name}'; gradients differ by {apart:.2e}")


def full_rows(core: PackedModel, pixels: torch.Tensor, tokens: int, tiles: int, samples: list[Sample]) -> list[dict]:
    """The packs that are at least 95 % full in tokens; the fullest where there is none."""
    packs = make_packs(samples, tokens, tiles)
    sizes = [sum(s.num_tokens for s in pack) for pack in packs]
    full = [p for p, n in zip(packs, sizes, strict=True) if n >= 0.95 * tokens] or [packs[int(np.argmax(sizes))]]
    return make_batches(full, core, pixels, padded=False)


FLASH = SDPBackend.FLASH_ATTENTION


# --- the language model alone ---------------------------------------------------------------------


def language_forward(core: PackedModel, kernels: list[str], device: torch.device, length: int, repeats: int) -> None:
    """Four sequences of equal length: a batch of four against one packed row, no loss, no gradient."""
    config = core.config.text_config
    hidden = torch.randn(4, length, config.hidden_size, device=device, dtype=core.dtype)
    positions = torch.arange(length, device=device)[None]
    row = RowSlice.whole(torch.arange(0, 4 * length + 1, length, dtype=torch.int32, device=device), length)

    def padded() -> None:
        core.language_model(inputs_embeds=hidden, position_ids=positions.expand(4, -1), use_cache=False)

    def packed() -> None:
        core._decode(hidden.view(1, 4 * length, -1), positions.repeat(1, 4), row, None, None)

    print(f"\nLanguage model alone, forward, 4 sequences of {length} tokens (median of {repeats}, uncompiled)")
    table = Table(("way", 40), ("ms", 9), ("of padded", 10), ("of its flash", 12))
    runs = {"padded, sdpa": ("sdpa", padded, None), "padded, sdpa's flash": ("sdpa", padded, FLASH)}
    for kernel in kernels:
        runs[f"packed, {kernel}"] = (KERNELS[kernel].implementation, packed, None)
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for _ in range(repeats + 2):
            for name, (attention, call, backend) in runs.items():
                core.model.set_attn_implementation({"text_config": attention})
                with sdpa_kernel(backend) if backend else contextlib.nullcontext():
                    times[name].append(seconds_of(call, device))
    medians = {name: statistics.median(values[2:]) for name, values in times.items()}
    bases = list(medians.values())[:2]
    for name, median in medians.items():
        table.row(name, f"{median * 1e3:.1f}", *(f"{median / base:.3f}" for base in bases))


# --- where the time goes --------------------------------------------------------------------------


def profile(core: PackedModel, way: Way, device: torch.device) -> None:
    from torch.profiler import ProfilerActivity, profile

    batch = max(way.batches, key=lambda b: b["num_real_tokens"])
    with set_up(core, way):
        for _ in range(2):
            way.step(to_device(batch, device)).backward()
            core.zero_grad(set_to_none=True)
        synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
            started = time.perf_counter()
            way.step(to_device(batch, device)).backward()
            issued = time.perf_counter() - started
            synchronize(device)
            whole = time.perf_counter() - started
        core.zero_grad(set_to_none=True)
    print(
        f"\nOne step of '{way.name}', {batch['num_real_tokens']} tokens, {batch['num_tiles']} tiles: "
        f"{whole * 1e3:.0f} ms while recording (issued in {issued * 1e3:.0f})"
    )
    print_kernels(recorded, rows=40)


# --- main -----------------------------------------------------------------------------------------


def make_ways(core: PackedModel, args: argparse.Namespace, kernels: list[str], samples: list[Sample]) -> list[Way]:
    size = core.config.vision_config.image_size[0]
    small = size != 448
    tokens = (512, 1024, 2048) if small else (8192, 16384, 32768)
    pixels = torch.randint(256, (96, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    budgets = dict(zip(tokens, (40, 48, 96), strict=True))
    batches = {
        n: make_batches(make_packs(samples, n, tiles), core, pixels, padded=False) for n, tiles in budgets.items()
    }
    kernel = kernels[0]
    ours = {
        k: {"attention": KERNELS[k].implementation, "tiles": use_tile_attention(core.model, KERNELS[k])}
        for k in kernels
    }
    own, theirs = partial(packed_step, core), partial(transformers_step, core)
    low, middle, high = (f"{n}/{tiles}" for n, tiles in budgets.items())
    ways = []
    if "padded" in args.ways:
        pairs = make_batches(pairs_by_length(samples), core, pixels, padded=True)
        ways.append(Way("padded, micro-batch 2, by length", pairs, theirs, attention="sdpa"))
    if "reference" in args.ways:
        ways.append(Way(f"{low} reference", batches[tokens[0]], theirs, attention=register_reference(kernel)))
    if "given" in args.ways:
        ways.append(Way(f"{low} given, {kernel}", batches[tokens[0]], own, **ours[kernel]))
        ways.append(Way(f"{middle} given, {kernel}", batches[tokens[1]], own, **ours[kernel]))
    best = kernels[-1]
    if "compiled" in args.ways:
        compiled = partial(Way, step=own, compiled=True)
        ways += [compiled(f"{middle} compiled, {k}", batches[tokens[1]], **ours[k]) for k in kernels]
        if "unfused" in args.ways:
            ways.append(compiled(f"{middle} compiled, {best}, unfused", batches[tokens[1]], fused=False, **ours[best]))
        full = full_rows(core, pixels, tokens[1], budgets[tokens[1]], samples)
        ways.append(compiled(f"{middle} compiled, {best}, full rows", full, **ours[best]))
    if "checkpointed" in args.ways:
        checkpointed = partial(Way, batches=batches[tokens[2]], step=own, checkpointing=True)
        ways.append(checkpointed(f"{high} given, {kernel}, checkpointing", **ours[kernel]))
        if "compiled" in args.ways:
            ways.append(checkpointed(f"{high} compiled, {best}, checkpointing", compiled=True, **ours[best]))
    return ways


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=None)
    parser.add_argument("--kernels", nargs="+", help="the first is also the reference's; default: auto's choice")
    names = ("padded", "reference", "given", "compiled", "unfused", "checkpointed")
    parser.add_argument("--ways", nargs="+", choices=names, default=list(names))
    parser.add_argument("--tokens", type=int, default=131_072, help="of the samples drawn, about")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recompute", choices=RECOMPUTE, default="language", help="as --compile_recompute")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no_language", action="store_true", help="leave out the language model alone")
    args = parser.parse_args()
    device = torch.device(args.device)
    small = device.type != "cuda"
    dtype = torch.float32 if small else torch.bfloat16
    kernels = kernels_here(args.kernels or ["auto"], device, dtype)
    peak = None if small else peak_flops(torch.cuda.get_device_name(device))
    print(versions(device) + (f", peak {peak / 1e12:.1f} TFLOP/s" if peak else ""))
    torch.set_float32_matmul_precision("high")
    for shape in args.shapes or (["tiny"] if small else ["1b", "8b8"]):
        for kernel in kernels:
            register_packed_attention(kernel, device, dtype)
        core = make_model(shape, device, kernels[0], dtype)
        if "compiled" in args.ways:
            compile_blocks(core, recompute=args.recompute, backend="aot_eager" if small else "inductor")
        # Of uncompiled ways the one a run without --compile has.
        core.loss_kernels = {True: core.head.loss_kernel, False: select_loss_kernel("auto", device, dtype)}
        samples = draw_samples(args.tokens // (16 if small else 1), 8192, 40, args.seed, 16 if small else 1)
        print(
            f"\n{shape}: {core.num_parameters() / 1e6:,.0f} M parameters; {len(samples)} samples, "
            f"{sum(s.num_tokens for s in samples):,} tokens, {sum(s.num_tiles for s in samples)} tiles, "
            f"{sum(s.num_loss_tokens for s in samples):,} labels; median of {args.repeats}"
        )
        ways = make_ways(core, args, kernels, samples)
        for way in [w for w in ways if w.compiled and not w.checkpointing][:-1]:
            plain = Way("", way.batches, way.step, attention=way.attention, tiles=way.tiles)
            try:
                compare(core, plain, way, device)
            except torch.OutOfMemoryError:
                print("    uncompiled it is out of memory")
            core.zero_grad(set_to_none=True)
        speeds = measure(core, ways, args.repeats, device, peak)
        base = list(speeds.items())
        for name, speed in base[1:]:
            print(f"    {name}: " + ", ".join(f"{speed / s:.2f} x {n}" for n, s in base[:2] if n != name))
        if args.profile:
            profile(core, next((w for w in reversed(ways) if w.compiled and not w.checkpointing), ways[-1]), device)
        if not args.no_language:
            language_forward(core, kernels, device, 64 if small else 4096, 3 if small else 15)
        del core, ways
        torch._dynamo.reset()
        release(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
