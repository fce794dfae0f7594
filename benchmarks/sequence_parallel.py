"""What does a pack cost when several GPUs share it? Speed and memory of a training step, and its rounding.

    torchrun --nproc_per_node 4 benchmarks/sequence_parallel.py              # 8B shape with 8 decoder layers
    torchrun --nproc_per_node 4 benchmarks/sequence_parallel.py --check      # bfloat16 against float32
    torchrun --nproc_per_node 2 benchmarks/sequence_parallel.py --device cpu # the script itself, in small

Random weights, pixels and token ids; lengths, tiles and labels of samples drawn from real_mix_a.csv. Forward and
backward without an optimizer and without reducing gradients over data ranks, in bfloat16, with gradient checkpointing
unless --no_checkpointing. With N processes and groups of n ranks there are N / n groups, all on the same pack. Times
are of the slowest rank, medians; host-to-device copies are part of them.

    tokens/s a GPU   real tokens of the row / (seconds * ranks that share it)
    MFU              operations of real tokens and tiles (model/flops.py) / (seconds * ranks * the card's peak)
    peak GB          allocated, of the fullest rank
    activations GB   peak less what stays: weights and gradients, which are kept from step to step

A row that would not fit is left out with a line that says so: an out-of-memory error in one rank would leave the
others of its group waiting. What it needs is estimated from the shorter rows and smaller groups before it.

--check: gradients and losses of one row in bfloat16, over a group and by one rank, against float32. The error over a
group may be at most twice that of one rank, for each part of the model. First the blocks that ring attention is made
of, of each kernel that runs here: at most twice the error of bfloat16 SDPA.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import os
import statistics
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # rows differ in size
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_check import FACTOR, run_kernel
from benchmarks.measuring import (
    Table,
    peak_gb,
    relative,
    relative_of_all,
    seconds_of,
    take_gradients,
    versions,
)
from benchmarks.train_step import (
    SHAPES,
    draw_samples,
    full_rows,
    make_model,
    to_device,
)
from internvl_pack.errors import UserError
from internvl_pack.model.attention import KERNELS, Row, register_packed_attention, select_kernel
from internvl_pack.model.attention.ring import joined, seen_parts
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.flops import flop_counts, peak_flops
from internvl_pack.model.packed import PackedModel
from internvl_pack.parallel import MODES, SequenceGroup, enable_sequence_parallel, make_groups
from internvl_pack.parallel.checks import RING_KERNELS
from internvl_pack.parallel.slices import count_slice_targets

MARGIN = 0.95  # of the card's memory that a row may be expected to need


# --- rows -----------------------------------------------------------------------------------------


def make_row(core: PackedModel, tokens: int, small: bool, seed: int, longest: int = 32768) -> dict[str, Any]:
    """One pack of about `tokens` tokens, with 3 tiles for 1,024 tokens at most; samples of up to `longest` tokens."""
    size = core.config.vision_config.image_size[0]
    pixels = torch.randint(256, (96, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    tiles = max(2, 3 * tokens // (64 if small else 1024))
    longest, scale = (tokens, 16) if small else (min(tokens, longest), 1)
    samples = draw_samples(4 * tokens, longest, min(tiles, 96), seed, scale)
    rows = sorted(full_rows(core, pixels, tokens, tiles, samples), key=lambda batch: batch["num_tiles"])
    return rows[len(rows) // 2] if rows[len(rows) // 2]["num_tiles"] else rows[-1]


def on_host(batch: dict[str, Any], group: SequenceGroup | None) -> dict[str, Any]:
    """The batch as a step takes it: its counts, and pixels left on the host where each rank takes its tiles from."""
    if group is None:
        return batch
    return batch | {"num_slice_loss_tokens": count_slice_targets(batch, group)}


def train_step(core: PackedModel, batch: dict[str, Any], device: torch.device) -> Any:
    pixels = batch["pixel_values"]
    inputs = to_device({k: v for k, v in batch.items() if k != "pixel_values"}, device) | {"pixel_values": pixels}
    outputs = core(**inputs, loss_normalizer=float(max(1, batch["num_loss_tokens"])))
    outputs.loss.backward()
    return outputs


# --- speed and memory -----------------------------------------------------------------------------


@dataclass
class Measured:
    seconds: float
    peak: float
    activations: float


def measure(core: PackedModel, batch: dict[str, Any], repeats: int, device: torch.device) -> Measured | None:
    """Median over steps, the slowest and fullest of the ranks; None if memory ran out (a rank by itself only)."""
    group = core.sequence_group
    batch = on_host(batch, group)
    times, failed = [], False
    kept = torch.cuda.memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    peak_gb(device, reset=True)
    for _ in range(repeats + 1):  # the first is to warm up
        barrier()
        try:
            times.append(seconds_of(lambda: train_step(core, batch, device), device))
        except torch.OutOfMemoryError:
            if group is not None:
                raise
            failed = True
            break
    core.zero_grad(set_to_none=False)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    peak = peak_gb(device)
    if any_rank(failed, device):
        return None
    seconds, peak, activations = worst_of_ranks([statistics.median(times[1:]), peak, peak - kept], device)
    return Measured(seconds, peak, activations)


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def worst_of_ranks(values: list[float], device: torch.device) -> list[float]:
    if not dist.is_initialized():
        return values
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.tolist()


def any_rank(flag: bool, device: torch.device) -> bool:
    return worst_of_ranks([float(flag)], device)[0] > 0


def give_gradients(core: PackedModel) -> None:
    """Gradients that stay, as a trainer's do, so that the peak over them is activations."""
    for parameter in core.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def estimate(done: dict[tuple, Measured], tokens: int, mode: str, size: int) -> float | None:
    """Activations in GB by the longest row that has run: of the same group, else of the next smaller one."""
    for known in sorted({s for _, s, m in done if s <= size and (s != size or m == mode)}, reverse=True):
        rows = {t: v for (t, s, m), v in done.items() if s == known and (s != size or m == mode)}
        longest = max(rows)
        return rows[longest].activations * tokens / longest * known / size
    return None


def benchmark(core: PackedModel, args: argparse.Namespace, groups: dict, device: torch.device, small: bool) -> None:
    counts = flop_counts(core.config)
    peak = None if small else peak_flops(torch.cuda.get_device_name(device))
    give_gradients(core)
    kept = sum(2 * p.numel() * p.element_size() for p in core.parameters()) / 1e9
    memory = torch.cuda.get_device_properties(device).total_memory / 1e9 if device.type == "cuda" else float("inf")
    table = Table(
        ("row", 8), ("segments", 8), ("longest", 7), ("tiles", 5), ("sp", 3), ("mode", 8), ("ms", 8),
        ("tokens/s a GPU", 14), ("peak GB", 8), ("activations GB", 14), ("MFU", 6),
    )  # fmt: skip
    done: dict[tuple, Measured] = {}
    mfu: dict[tuple, float] = {}
    for tokens in args.tokens:
        batch = make_row(core, tokens, small, args.seed)
        shown = (tokens, batch["num_segments"], batch["max_seqlen"], batch["num_tiles"])
        for (mode, size), group in groups.items():
            needed = estimate(done, tokens, mode, size)
            if needed is not None and kept + needed > MARGIN * memory:
                table.row(*shown, size, mode, f"left out: about {kept + needed:.0f} GB of {memory:.0f} GB")
                continue
            enable_sequence_parallel(core, group)
            result = measure(core, batch, args.repeats, device)
            enable_sequence_parallel(core, None)
            if result is None:
                table.row(*shown, size, mode, f"out of memory: {memory:.0f} GB are not enough")
                continue
            done[tokens, size, mode] = result
            speed = batch["num_real_tokens"] / result.seconds / size
            share = counts.of(batch) / (result.seconds * size * peak) if peak else 0.0
            mfu[tokens, size, mode] = share
            table.row(
                *shown, size, mode, f"{result.seconds * 1e3:,.0f}", f"{speed:,.0f}", f"{result.peak:.1f}",
                f"{result.activations:.2f}", f"{share:.1%}" if peak else "-",
            )  # fmt: skip
    told(done, mfu, args.tokens)


def told(done: dict[tuple, Measured], mfu: dict[tuple, float], rows: list[int]) -> None:
    """Each group against one rank on the same row, and against one rank on the shortest."""
    print()
    for (tokens, size, mode), result in done.items():
        alone, short = done.get((tokens, 1, "-")), mfu.get((rows[0], 1, "-"))
        if size == 1:
            continue
        parts = []
        if alone is not None and alone.activations > 0:
            parts.append(f"activations {result.activations / alone.activations:.2f} x one rank")
        if alone is not None:
            parts.append(f"{alone.seconds / result.seconds:.2f} x as fast as one rank")
        if short:
            parts.append(f"MFU {mfu[tokens, size, mode] / short:.2f} x one rank at {rows[0]}")
        print(f"    {tokens} tokens, {size} ranks, {mode}: " + ", ".join(parts))


# --- rounding -------------------------------------------------------------------------------------

PARTS = {
    "vision tower": ("vision_tower",),
    "projector": ("multi_modal_projector",),
    "embeddings": ("embed_tokens",),
    "attention": ("self_attn",),
    "feed-forward": ("mlp",),
    "head and norms": ("",),
}


def part_of(name: str) -> str:
    return next(part for part, words in PARTS.items() if any(word in name for word in words))


def gradients_of(core: PackedModel, batch: dict[str, Any], device: torch.device) -> tuple[torch.Tensor, dict]:
    """Losses of the row's targets, in order, and all gradients in float32, summed over the group."""
    group = core.sequence_group
    outputs = train_step(core, on_host(batch, group), device)
    losses = torch.zeros(batch["num_tokens"], device=device)
    losses[outputs.target_positions] = outputs.target_losses
    gradients = take_gradients(core)
    if group is not None:
        for tensor in (losses, *gradients.values()):
            dist.all_reduce(tensor, group=group.process_group)
    return losses, gradients


def errors(got: tuple[torch.Tensor, dict], expected: tuple[torch.Tensor, dict]) -> dict[str, float]:
    """Relative norms: of the losses, and of the gradients of each part of the model."""
    found = {"losses": relative(got[0], expected[0])}
    for part in PARTS:
        own = {name: g for name, g in expected[1].items() if part_of(name) == part and g.any()}
        found[part] = relative_of_all(got[1], own) if own else 0.0  # of a row without images
    return found


def check_blocks(device: torch.device, small: bool) -> int:
    """Failures: kernels whose blocks, joined as in ring attention, are off more than FACTOR times bfloat16 SDPA."""
    print("\nBlocks of ring attention (front and back of each segment), errors against float32")
    table = Table(("heads", 9), ("kernel", 11), *((name, 18) for name in ("out", "dq", "dk", "dv")), ("", 6))
    lengths = [1, 33, 7, 64] if small else [1, 1650, 7, 640, 1, 3000]
    for heads, kv_heads, dim in ((14, 2, 64), (28, 4, 128)):
        torch.manual_seed(0)
        inputs = [
            torch.randn(2 * sum(lengths), h, dim, device=device, dtype=torch.bfloat16)
            for h in (heads, kv_heads, kv_heads)
        ]
        upstream = torch.randn(2 * sum(lengths), heads, dim, device=device, dtype=torch.bfloat16)
        whole = Row(bounds_of([2 * n for n in lengths], device), 2 * max(lengths), dim**-0.5)
        expected = run_kernel(KERNELS["sdpa"].run, [t.float() for t in inputs], upstream, whole)
        base = [
            relative(t, e)
            for t, e in zip(run_kernel(KERNELS["sdpa"].run, inputs, upstream, whole), expected, strict=True)
        ]
        table.row(f"{heads}/{kv_heads}", "bf16 sdpa", *(f"{b:.2e}" for b in base))
        for kernel in RING_KERNELS:
            if KERNELS[kernel].problem(device) is not None:
                continue
            got = halves_joined(kernel, inputs, upstream, lengths)
            found = [relative(t, e) for t, e in zip(got, expected, strict=True)]
            cells = (f"{error:.2e} ({error / b:.2f}x)" for error, b in zip(found, base, strict=True))
            ok = all(error <= FACTOR * b for error, b in zip(found, base, strict=True))
            table.row(f"{heads}/{kv_heads}", kernel, *cells, table.verdict(ok))
    return table.failures


def bounds_of(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def halves_joined(kernel: str, inputs: list[torch.Tensor], upstream: torch.Tensor, lengths: list[int]) -> list:
    """Causal attention over segments of twice the `lengths`, and its gradients, from the blocks of their halves."""
    device, halves = upstream.device, KERNELS[kernel]
    row = Row(bounds_of(lengths, device), max(lengths))
    starts = bounds_of([2 * n for n in lengths], device).tolist()
    front = torch.cat([torch.arange(s, s + n, device=device) for s, n in zip(starts, lengths, strict=False)])
    places = (
        front,
        front + torch.tensor(lengths, device=device).repeat_interleave(torch.tensor(lengths, device=device)),
    )
    q, k, v, do = ([t[at] for at in places] for t in (*inputs, upstream))
    results: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for mine, theirs, causal in seen_parts(0, 0):
        out, lse = halves.forward(q[mine], k[theirs], v[theirs], row._replace(causal=causal))
        results[mine] = joined(*results[mine], out, lse) if mine in results else (out.float(), lse)
    totals = [torch.zeros(t.shape, device=device) for t in (upstream, *inputs)]
    for part, (out, _) in results.items():
        totals[0][places[part]] = out
    for mine, theirs, causal in seen_parts(0, 0):
        out, lse = results[mine]
        seen = (out.to(do[mine].dtype), lse, row._replace(causal=causal))
        parts = halves.backward(do[mine], q[mine], k[theirs], v[theirs], *seen)
        for total, part, at in zip(totals[1:], parts, (places[mine], places[theirs], places[theirs]), strict=True):
            total[at] += part
    return totals


def check(core: PackedModel, args: argparse.Namespace, groups: dict, device: torch.device, small: bool) -> int:
    """Failures: parts whose error over a group is more than FACTOR times that of one rank."""
    failures = check_blocks(device, small)
    for tokens in args.tokens:
        # float32 attention has no kernel that saves memory: all scores of a segment exist at once.
        batch = make_row(core, tokens, small, args.seed, longest=2048)
        exact = copy.deepcopy(core.model).float()
        exact.set_attn_implementation({"text_config": register_packed_attention("sdpa", device, torch.float32)})
        with highest_precision():
            expected = gradients_of(PackedModel(exact).train(), batch, device)
        del exact
        print(
            f"\n{tokens} tokens, {batch['num_segments']} segments, {batch['num_tiles']} tiles: errors against float32"
        )
        table = Table(("sp", 3), ("mode", 8), ("loss", 10), *((part, 17) for part in ("losses", *PARTS)), ("", 6))
        base: dict[str, float] = {}
        for (mode, size), group in groups.items():
            enable_sequence_parallel(core, group)
            got = gradients_of(core, batch, device)
            enable_sequence_parallel(core, None)
            found = errors(got, expected)
            base = base or found
            ok = all(error <= FACTOR * base[part] for part, error in found.items())  # not so where it is NaN
            cells = (f"{error:.2e} ({error / base[part]:.2f}x)" if base[part] else "-" for part, error in found.items())
            table.row(size, mode, f"{got[0].sum() / max(1, batch['num_loss_tokens']):.6f}", *cells, table.verdict(ok))
        failures += table.failures
    return failures


@contextlib.contextmanager
def highest_precision() -> Any:
    """float32 is float32, not TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# --- main -----------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default=None)
    parser.add_argument("--layers", type=int, default=None, help="decoder layers, if not the shape's")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=None, help="of each row, about")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8], help="ranks a row; what fits the world")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no_checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--check", action="store_true", help="rounding instead of speed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if args.device == "cuda" else torch.device(args.device)
    small = device.type != "cuda"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        backend = "gloo" if small else "nccl"
        options = {} if small else {"device_id": device}
        dist.init_process_group(backend, timeout=timedelta(minutes=5), **options)
        if dist.get_rank():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        kernel = select_kernel(args.kernel, device, torch.float32 if small and not args.check else torch.bfloat16).name
        return run(args, kernel, world, device, small)
    except UserError as error:
        print(error)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(args: argparse.Namespace, kernel: str, world: int, device: torch.device, small: bool) -> int:
    shape = args.shape or ("tiny" if small else "8b8")
    if args.check:
        args.tokens = args.tokens or ([512] if small else [4096, 8192])
        args.layers = args.layers or 2
    args.tokens = args.tokens or ([512, 1024] if small else [16384, 32768, 65536, 131072])
    if args.layers:
        SHAPES[shape] |= {"num_hidden_layers": args.layers}
    dtype = torch.float32 if small and not args.check else torch.bfloat16
    core = make_model(shape, device, kernel, dtype)
    if not args.no_checkpointing and not args.check:
        core.gradient_checkpointing_enable()
    if args.compile:
        compile_blocks(core, **({"backend": "eager"} if small else {}))
    groups: dict[tuple[str, int], SequenceGroup | None] = {}
    if 1 in args.sizes or args.check:  # what the others are held against
        groups["-", 1] = None
    text = core.config.get_text_config()
    for size in sorted(set(args.sizes) - {1}):
        for mode in args.modes:
            if world % size:
                continue
            group = make_groups(world, size, mode)
            try:
                enable_sequence_parallel(core, group)
                groups[mode, size] = group
            except UserError as error:
                print(f"left out: {error}")
    enable_sequence_parallel(core, None)
    print(
        f"{versions(device)}; {world} processes, kernel {kernel}\n{shape}: {core.num_parameters() / 1e6:,.0f} M "
        f"parameters, {text.num_hidden_layers} decoder layers, {text.num_attention_heads} heads "
        f"({text.num_key_value_heads} key/value), {dtype}, {'no ' * args.no_checkpointing}checkpointing"
    )
    if args.check:
        return int(check(core, args, groups, device, small) > 0)
    benchmark(core, args, groups, device, small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
