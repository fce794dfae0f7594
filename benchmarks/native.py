"""Families of native resolution on a GPU: how fast, how exact, what bounds them. One process, one GPU.

    python benchmarks/native.py                                    # Qwen3-VL-2B and Qwen2.5-VL-3B, all parts
    python benchmarks/native.py --shapes qwen3_vl --parts speed --profile
    python benchmarks/native.py --shapes qwen3_5 --kernel varlen   # fast with flash-linear-attention
    python benchmarks/native.py --device cpu                       # the script itself, in small

Random weights, pixels and token ids. Samples are drawn from real_mix_a.csv: its text and labels, and of each of its
pictures of c x r tiles one of 448 c x 448 r pixels, at the size that the family's own rule gives it. A part or a way
that fails is a line, and the next one runs.

    kernels     attention of both towers by each kernel that runs here, against float32 a segment at a time: a build
                that leaves out the size of their heads can give other results without a word
    errors      one row in bfloat16 against float32 a sample at a time by transformers' own model, as a multiple of that
                model's own error in bfloat16 a sample at a time: hidden states that predict a label, and gradients
    isolation   one sample of a row changed: what that does to the hidden states of the others
    speed       forward and backward without an optimizer, of ways that take turns on the same samples:
        packed          rows of this package; compiled: with --compile
        padded          micro-batches of 2 samples of like length, transformers' own forward, logits of all tokens
        flattened       the same rows through transformers' own flash attention, by positions that restart

A way that runs out of memory runs again with gradient checkpointing. useful tokens/s and MFU are as in train_step.py.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # rows differ in size
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_check import FACTOR, run_kernel
from benchmarks.measuring import KINDS, Table, peak_gb, relative, synchronize, versions
from benchmarks.train_step import Sample as TileSample
from benchmarks.train_step import make_packs, pairs_by_length, read_mix
from internvl_pack.batch.collate import packed_collate_fn, padded_collate_fn, to_device
from internvl_pack.batch.row import PackRow, Segment
from internvl_pack.encode.families.base import FAMILIES
from internvl_pack.encode.families.native import fitted_grid
from internvl_pack.model.attention import (
    KERNELS,
    Row,
    attend_row,
    linear,
    linear_layers,
    register_packed_attention,
    select_kernel,
)
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.flops import flop_counts, peak_flops
from internvl_pack.model.images import normalize_tiles
from internvl_pack.model.loss import select_loss_kernel
from internvl_pack.model.packed import PackedModel
from internvl_pack.model.parity import own_inputs
from internvl_pack.model.vision.picture_attention import PREFIX
from internvl_pack.testing.tiny import tiny_native_config, tiny_tokenizer

PARTS = ("kernels", "errors", "isolation", "speed")
WAYS = ("compiled", "packed", "padded", "padded_flash", "flattened")
QWEN = {"image_token_id": 151_655, "video_token_id": 151_656, "vision_start_token_id": 151_652}
QWEN |= {"vision_end_token_id": 151_653, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    # Qwen3-VL-2B
    "qwen3_vl": QWEN
    | {
        "text_config": {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}},
        "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
        | {"patch_size": 16, "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17]},
    },
    # Qwen2.5-VL-3B
    "qwen2_5_vl": QWEN
    | {
        "text_config": {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "num_hidden_layers": 36,
        }
        | {"num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
        | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": 2048},
    },
    # Qwen3.5's kinds of layers in a size of about 2B
    "qwen3_5": {
        "image_token_id": 248_056,
        "video_token_id": 248_057,
        "vision_start_token_id": 248_053,
        "vision_end_token_id": 248_054,
        "tie_word_embeddings": True,
        "text_config": {"vocab_size": 248_320, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "tie_word_embeddings": True}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
            | {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
        },
        "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
        | {"patch_size": 16, "out_hidden_size": 2048},
    },
}
TILE = 448  # pixels along a side of the mix's tiles
ATTEND = ("internvl_pack::attend", "internvl_pack::attend_backward")  # operations of the profile
PLAIN_TOKENS = 256  # ids of made-up text are below it
ERROR_TOKENS = 6144  # of the row whose errors are measured
SMALLER = 16  # in small: by what texts are divided


# --- models and data ------------------------------------------------------------------------------


def make_model(family: str, device: torch.device, small: bool) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    if small:
        config = tiny_native_config(tiny_tokenizer(["bytes are enough here"], 400, family), family)
    else:
        config = AutoConfig.for_model(family, **SHAPES[family])
    torch.manual_seed(0)
    with device:
        return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


@dataclass(frozen=True)
class Sample(TileSample):
    """Attributes: grids: rows and columns of tokens of each of its pictures, which come before its text."""

    grids: tuple[tuple[int, int], ...] = ()


def grids_of(num_images: int, num_tiles: int, rule: tuple[int, int, int]) -> tuple[tuple[int, int], ...]:
    """Of the mix's pictures, a thumbnail among the tiles of each that has several."""
    grids = []
    for i in range(num_images):
        tiles = num_tiles // num_images + (i < num_tiles % num_images)
        tiles -= tiles > 1
        short = max(n for n in range(1, int(tiles**0.5) + 1) if tiles % n == 0)
        grid = fitted_grid(TILE * (tiles // short), TILE * short, *rule)
        grids.append((grid.rows, grid.columns))
    return tuple(grids)


def draw_samples(core: PackedModel, total: int, budget: tuple[int, int], seed: int, small: bool) -> list[Sample]:
    """In random order until `total` tokens; those of more than half of a row are left out."""
    family: Any = FAMILIES[core.config.model_type]
    side = core.tower.tile_size[0]
    bounds = (4 * side**2, 12 * side**2) if small else (family.MIN_PIXELS, family.MAX_PIXELS)
    rows = read_mix()
    samples: list[Sample] = []
    for i in np.random.default_rng(seed).permutation(len(rows)).tolist():
        text, labels, images, tiles = (
            int(rows[i][name]) for name in ("num_text_tokens", "num_loss_tokens", "num_images", "num_tiles")
        )
        if small:
            text, labels = text // SMALLER, labels // SMALLER
        text = max(3, text)
        grids = grids_of(images, tiles, (side, *bounds))
        squares = [rows * columns for rows, columns in grids]
        tokens = text + sum(squares) + 2 * len(grids)
        if tokens > budget[0] // 2 or sum(squares) > budget[1]:
            continue
        samples.append(Sample((len(samples),), tokens, sum(squares), min(max(1, labels), text - 1), grids=grids))
        if sum(s.num_tokens for s in samples) >= total:
            break
    return samples


def make_segment(sample: Sample, core: PackedModel, pixels: np.ndarray, seed: int = 0) -> Segment:
    rng = np.random.default_rng((seed, sample.key[0]))
    config = core.config
    ids: list[int] = []
    for rows, columns in sample.grids:
        ids += [config.vision_start_token_id, *[config.image_token_id] * (rows * columns), config.vision_end_token_id]
    ids += rng.integers(0, PLAIN_TOKENS, sample.num_tokens - len(ids)).tolist()
    input_ids = np.array(ids, dtype=np.int32)
    labels = np.full(len(ids), -100, dtype=np.int32)
    labels[-sample.num_loss_tokens :] = input_ids[-sample.num_loss_tokens :]
    return Segment(
        sample_id=str(sample.key[0]),
        fragment=(0, 1),
        input_ids=input_ids,
        labels=labels,
        tiles=pixels[: sample.num_tiles] ^ np.uint8(seed),
        tiles_per_image=tuple(rows * columns for rows, columns in sample.grids),
        num_loss_tokens=sample.num_loss_tokens,
        image_grids=sample.grids,
    )


def make_pixels(core: PackedModel, number: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (number, 3, *core.tower.tile_size), dtype=np.uint8)


def collate(core: PackedModel, segments: list[Segment], padded: bool = False) -> dict[str, Any]:
    options = {"image_token_id": core.picture_token_ids, "image_size": core.tower.tile_size[0], "grid_positions": True}
    if padded:
        return padded_collate_fn([PackRow([s]) for s in segments], **options)
    return packed_collate_fn([PackRow(segments)], **options)


# --- how a row runs -------------------------------------------------------------------------------


@dataclass
class Way:
    """A row of the table; `attention` is of both towers of transformers' own model, None that of this package."""

    name: str
    step: Callable[[PackedModel, dict[str, Any]], torch.Tensor]
    attention: str | None = None
    compiled: bool = False
    checkpointing: bool = False
    batches: Sequence[dict[str, Any]] = ()


@contextlib.contextmanager
def set_up(core: PackedModel, kernel: str, way: Way) -> Iterator[None]:
    if way.attention is None:
        core.model.set_attn_implementation({"text_config": KERNELS[kernel].implementation})
        core.tower.use_kernel(KERNELS[kernel])
    else:
        core.model.set_attn_implementation({"text_config": way.attention, "vision_config": way.attention})
    core.is_compiled = way.compiled
    core.head.loss_kernel = core.loss_kernels[way.compiled]
    if way.checkpointing:
        core.gradient_checkpointing_enable()
    try:
        with contextlib.nullcontext() if way.compiled else torch.compiler.set_stance("force_eager"):
            yield
    finally:
        core.zero_grad(set_to_none=True)
        if way.checkpointing:
            core.gradient_checkpointing_disable()


def packed_step(core: PackedModel, batch: dict[str, Any]) -> torch.Tensor:
    return core(**batch, loss_normalizer=float(max(1, batch["num_loss_tokens"]))).loss


def own_pictures(core: PackedModel, tiles: torch.Tensor, grids: Any) -> dict[str, torch.Tensor]:
    """What the family's processor makes of pictures, from their tiles; nothing of none."""
    if not len(tiles):
        return {}
    normal = normalize_tiles(tiles, core.tower.dtype, core.tower.STATISTICS)
    shapes = [(1, 2 * rows, 2 * columns) for rows, columns in grids]
    return {
        "pixel_values": core.tower._patches(normal, normal),
        "image_grid_thw": torch.tensor(shapes, device=tiles.device),
    }


def own_step(core: PackedModel, batch: dict[str, Any]) -> torch.Tensor:
    """transformers' own forward of a padded batch, or of a row whose text positions restart with each sample."""
    inputs = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    if "attention_mask" in batch:
        inputs["attention_mask"] = batch["attention_mask"]
    else:
        bounds = batch["cu_seqlens"].long()
        restarting = torch.arange(batch["num_tokens"]) - bounds[:-1].repeat_interleave(bounds.diff())
        restarting = restarting.to(batch["input_ids"].device).expand(1, 1, -1)
        inputs["position_ids"] = torch.cat([restarting, batch["position_ids"]])  # of text, time, height and width
    return core.model(**inputs, **own_pictures(core, batch["pixel_values"], batch["image_grids"]), use_cache=False).loss


PACKED = Way("packed", packed_step)
COMPILED = Way("packed, compiled", packed_step, compiled=True)
FLATTENED = Way("flattened, flash_attention_2", own_step, "flash_attention_2")


# --- attention by itself --------------------------------------------------------------------------


def check_kernels(core: PackedModel, device: torch.device, samples: list[Sample]) -> int:
    vision, text = core.config.vision_config, core.config.get_text_config()
    few = samples[:8]
    pictures = [4 * rows * columns for s in few for rows, columns in s.grids][:12]
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    own = vision.num_heads, vision.num_heads, vision.hidden_size // vision.num_heads
    failures = check_heads("tower", own, pictures, False, device)
    own = text.num_attention_heads, text.num_key_value_heads, size
    failures += check_heads("text", own, [s.num_tokens for s in few], True, device)
    core.tower.use_kernel(core.attn_kernel)
    name = core.config.vision_config._attn_implementation.removeprefix(PREFIX)
    print(f"    this run's: {name} in the tower, {core.attn_kernel.name} in the text", flush=True)
    return failures


def check_heads(what: str, own: tuple[int, int, int], lengths: list[int], causal: bool, device: torch.device) -> int:
    """`own` is heads of query and of key-value, head size."""
    heads, kv_heads, size = own
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    row = Row(cu_seqlens, max(lengths), size**-0.5, causal=causal)
    torch.manual_seed(0)
    inputs = [
        torch.randn(sum(lengths), h, size, device=device, dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads)
    ]
    upstream = torch.randn(sum(lengths), heads, size, device=device, dtype=torch.bfloat16)

    def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: Row) -> torch.Tensor:
        parts = zip(*(t.transpose(0, 1).split(lengths, 1) for t in (q, k, v)), strict=True)
        settings: dict[str, Any] = {"is_causal": causal, "enable_gqa": heads != kv_heads}
        outs = [F.scaled_dot_product_attention(*(t[None] for t in part), **settings)[0] for part in parts]
        return torch.cat(outs, 1).transpose(0, 1)

    def by_kernel(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: Row) -> torch.Tensor:
        return attend_row(KERNELS[name], q, k, v, row)[0]

    expected = run_kernel(one_by_one, [t.float() for t in inputs], upstream, row)
    base = [relative(g, e) for g, e in zip(run_kernel(one_by_one, inputs, upstream, row), expected, strict=True)]
    print(f"\n  kernels, {what}: {heads}/{kv_heads} heads of {size}, {sum(lengths)} in {len(lengths)} segments")
    table = Table(("  kernel", 20), *((t, 19) for t in ("out", "dq", "dk", "dv")), ("ms", 8), ("", 6))
    table.row("  bf16 sdpa", *(f"{b:.2e}" for b in base))
    for name, kernel in KERNELS.items():
        if kernel.forward is None or kernel.problem(device):
            continue
        run = partial(by_kernel, name)

        def errors_and_time(run: Any = run) -> tuple[list[float], float]:
            errors = [relative(g, e) for g, e in zip(run_kernel(run, inputs, upstream, row), expected, strict=True)]
            synchronize(device)
            started = time.perf_counter()
            for _ in range(3):
                run_kernel(run, inputs, upstream, row)
            synchronize(device)
            return errors, (time.perf_counter() - started) / 3

        if (found := attempt(f"  {name}", errors_and_time)) is not None:
            errors, seconds = found
            ok = all(e <= FACTOR * b for e, b in zip(errors, base, strict=True))
            cells = (f"{e:.2e} ({e / b:.2f}x)" for e, b in zip(errors, base, strict=True))
            table.row(f"  {name}", *cells, f"{seconds * 1e3:.1f}", table.verdict(ok))
    return table.failures


# --- errors ---------------------------------------------------------------------------------------


def watched_parameters(model: Any) -> dict[str, list[str]]:
    """Names by part: of the first, the middle and the last layers of both towers, the projector and the embeddings."""
    names: dict[str, list[str]] = {"tower": [], "projector": [], "decoder": [], "embeddings": []}
    visual, decoder = model.get_submodule("model.visual"), model.get_submodule("model.language_model")
    for part, prefix, layers in (
        ("tower", "model.visual.blocks", visual.blocks),
        ("decoder", "model.language_model.layers", decoder.layers),
    ):
        for number in sorted({0, len(layers) // 2, len(layers) - 1}):
            names[part] += [f"{prefix}.{number}.{name}" for name, _ in layers[number].named_parameters()]
    names["projector"] = [
        name for name, _ in model.named_parameters() if ".merger" in name or "deepstack_merger" in name
    ]
    names["embeddings"] = ["model.language_model.embed_tokens.weight"]
    return names


def watch_hidden(model: Any, into: list[torch.Tensor]) -> Any:
    """A hook that keeps the hidden states (N, H) of each forward of the decoder."""
    decoder = model.get_submodule("model.language_model")
    return decoder.register_forward_hook(lambda _m, _i, out: into.append(out.last_hidden_state[0]))


def predicting(segments: list[Segment], device: torch.device) -> list[torch.Tensor]:
    """Places in each sample whose next token has a label."""
    return [torch.from_numpy(np.flatnonzero(s.labels[1:] != -100)).to(device) for s in segments]


@dataclass
class Found:
    hidden: torch.Tensor
    gradients: dict[str, torch.Tensor]


def one_by_one(core: PackedModel, model: Any, segments: list[Segment], device: torch.device) -> Found:
    """transformers' own model with its own positions, a sample at a time; gradients are summed in float32."""
    watched = [name for names in watched_parameters(model).values() for name in names]
    parameters = dict(model.named_parameters())
    count = sum(len(places) for places in predicting(segments, device))
    hidden, gradients = [], {name: torch.zeros_like(parameters[name], dtype=torch.float32) for name in watched}
    for segment, places in zip(segments, predicting(segments, device), strict=True):

        def process(s: Segment) -> dict[str, torch.Tensor]:
            pictures = own_pictures(core, torch.from_numpy(s.tiles).to(device), s.image_grids)
            return {n: v.to(model.dtype) if v.is_floating_point() else v for n, v in pictures.items()}

        inputs = {name: value.to(device) for name, value in own_inputs(model, segment, process).items()}
        found = model.model(**inputs, use_cache=False).last_hidden_state[0, places]
        targets = torch.from_numpy(segment.labels).long().to(device)[1:][places]
        loss = F.cross_entropy(model.lm_head(found).float(), targets, reduction="sum") / count
        model.zero_grad(set_to_none=True)
        loss.backward()
        hidden.append(found.detach().float())
        for name in watched:
            if parameters[name].grad is not None:
                gradients[name] += parameters[name].grad.float()
    model.zero_grad(set_to_none=True)
    return Found(torch.cat(hidden), gradients)


def as_a_row(core: PackedModel, kernel: str, segments: list[Segment], device: torch.device, way: Way) -> Found:
    parameters = dict(core.model.named_parameters())
    seen: list[torch.Tensor] = []
    starts = accumulate((len(s.input_ids) for s in segments), initial=0)
    places = torch.cat([p + start for p, start in zip(predicting(segments, device), starts, strict=False)])
    hook = watch_hidden(core.model, seen)
    try:
        with set_up(core, kernel, way):
            way.step(core, to_device(collate(core, segments), device)).backward()
            watched = [name for names in watched_parameters(core.model).values() for name in names]
            gradients = {name: parameters[name].grad.float() for name in watched}
    finally:
        hook.remove()
    return Found(seen[0][places].detach().float(), gradients)


def errors_of(found: Found, expected: Found, parts: dict[str, list[str]]) -> list[float]:
    errors = [relative(found.hidden, expected.hidden)]
    for names in parts.values():
        errors.append(relative(*(torch.cat([f.gradients[n].flatten() for n in names]) for f in (found, expected))))
    return errors


class Errors:
    """The reference and its own error, and rows that are compared with them."""

    def __init__(self, core: PackedModel, kernel: str, segments: list[Segment], device: torch.device) -> None:
        self.core, self.kernel, self.segments, self.device = core, kernel, segments, device
        self.parts = watched_parameters(core.model)
        core.model.set_attn_implementation({"text_config": "sdpa", "vision_config": "sdpa"})
        with torch.compiler.set_stance("force_eager"):
            own = one_by_one(core, core.model, segments, device)
            exact = copy.deepcopy(core.model).float()
            self.expected = one_by_one(core, exact, segments, device)
        del exact
        self.base = errors_of(own, self.expected, self.parts)
        tokens, tiles = sum(len(s.input_ids) for s in segments), sum(len(s.tiles) for s in segments)
        print(f"\n  errors: {len(segments)} samples, {tokens} tokens, {tiles} of them of pictures; gradients by part")
        self.table = Table(("  row", 30), *((name, 19) for name in ("hidden states", *self.parts)), ("", 6))
        self.table.row("  bf16 one by one", *(f"{b:.2e}" for b in self.base))

    def check(self, way: Way) -> None:
        found = as_a_row(self.core, self.kernel, self.segments, self.device, way)
        errors = errors_of(found, self.expected, self.parts)
        ok = all(e <= FACTOR * b for e, b in zip(errors, self.base, strict=True))
        cells = (f"{e:.2e} ({e / b:.2f}x)" for e, b in zip(errors, self.base, strict=True))
        # What transformers' own forward makes of a row is for comparison.
        self.table.row(f"  {way.name}", *cells, self.table.verdict(ok) if way.attention is None else "")


# --- isolation ------------------------------------------------------------------------------------


def check_isolation_of(core: PackedModel, kernel: str, samples: list[Sample], pixels: np.ndarray, device: Any) -> int:
    """Each sample of the row changed in turn, tokens and pixels; the others should stay as they are."""
    segments = [make_segment(s, core, pixels) for s in samples]
    bounds = [0, *accumulate(len(s.input_ids) for s in segments)]

    def hidden_of(row: list[Segment]) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        hook = watch_hidden(core.model, seen)
        try:
            with torch.no_grad(), set_up(core, kernel, PACKED):
                packed_step(core, to_device(collate(core, row), device))
        finally:
            hook.remove()
        return [seen[0][start:stop].float() for start, stop in pairwise(bounds)]

    before = hidden_of(segments)
    again = hidden_of(segments)
    same, moved, changed_by = 0, 0.0, []
    numbers = sorted({0, len(segments) // 2, len(segments) - 1})
    for changed in numbers:
        row = list(segments)
        row[changed] = make_segment(samples[changed], core, pixels, seed=1)
        after = hidden_of(row)
        changed_by.append(relative(after[changed], before[changed]))
        for i, (b, a) in enumerate(zip(before, after, strict=True)):
            if i != changed:
                same += bool(torch.equal(a, b))
                moved = max(moved, relative(a, b))
    others = len(numbers) * (len(segments) - 1)
    noise = max(relative(a, b) for a, b in zip(again, before, strict=True))
    ok = moved <= max(2 * torch.finfo(torch.bfloat16).eps, 2 * noise)
    print(
        f"\n  isolation: {len(numbers)} of {len(segments)} samples changed in turn, which moves them by "
        f"{min(changed_by):.2f} of their size at least; of the others {same} of {others} stay bit for bit, the largest "
        f"move is {moved:.1e} (the same row twice: {noise:.1e}): {'ok' if ok else 'FAILED'}",
        flush=True,
    )
    return int(not ok)


# --- speed ----------------------------------------------------------------------------------------


def make_ways(core: PackedModel, args: argparse.Namespace, samples: list[Sample], pixels: np.ndarray) -> list[Way]:
    def batches(groups: list[list[Sample]], padded: bool) -> list[dict[str, Any]]:
        made = [collate(core, [make_segment(s, core, pixels) for s in group], padded) for group in groups]
        if torch.cuda.is_available():
            made = [{k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in b.items()} for b in made]
        return made

    rows, pairs = batches(make_packs(samples, *args.budget), False), batches(pairs_by_length(samples), True)
    ways = {
        "compiled": replace(COMPILED, batches=rows),
        "packed": replace(PACKED, batches=rows),
        "padded": Way("padded, sdpa", own_step, "sdpa", batches=pairs),
        "padded_flash": Way("padded, flash_attention_2", own_step, "flash_attention_2", batches=pairs),
        "flattened": replace(FLATTENED, batches=rows),
    }
    return [ways[name] for name in args.ways]


def run_pass(core: PackedModel, kernel: str, way: Way, device: torch.device) -> float:
    with set_up(core, kernel, way):
        synchronize(device)
        started = time.perf_counter()
        for batch in way.batches:
            way.step(core, to_device(batch, device)).backward()
            core.zero_grad(set_to_none=True)
        synchronize(device)
        return time.perf_counter() - started


def measure(core: PackedModel, kernel: str, ways: list[Way], args: argparse.Namespace, device: torch.device) -> None:
    counts = flop_counts(core.config)
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    left = list(ways)
    for repeat in range(args.repeats + 1):  # the first is to warm up
        for i, way in enumerate(left):
            peak_gb(device, reset=True)
            try:
                spent = run_pass(core, kernel, way, device)
            except torch.OutOfMemoryError:
                spent = None
            except Exception as error:
                report(f"    {way.name}", error)
                way.batches = ()
                continue
            if spent is None and not way.checkpointing:
                release()
                print(f"    {way.name}: out of memory, now with gradient checkpointing", flush=True)
                left[i] = way = replace(way, name=f"{way.name}, checkpointing", checkpointing=True)
                spent = attempt(f"    {way.name}", partial(run_pass, core, kernel, way, device))
            if spent is None:
                way.batches = ()
                continue
            print(f"    {way.name}: pass {repeat} {spent:.2f} s", flush=True)
            peaks[way.name] = max(peaks.get(way.name, 0.0), peak_gb(device))
            if repeat:
                seconds.setdefault(way.name, []).append(spent)
        left = [way for way in left if way.batches]
        release()
    table = Table(
        *(("  way", 44), ("rows", 5), ("fill", 6), ("useful tokens/s", 16), ("spread", 7), ("peak GB", 8), ("MFU", 6))
    )
    for way in left:
        real = sum(b["num_real_tokens"] for b in way.batches)
        median = statistics.median(seconds[way.name])
        spread = (max(seconds[way.name]) - min(seconds[way.name])) / median
        fill = real / sum(b["num_tokens"] for b in way.batches)
        mfu = f"{sum(counts.of(b) for b in way.batches) / median / peak:.1%}" if peak else "-"
        cells = (f"{fill:.1%}", f"{real / median:,.0f}", f"{spread:.1%}", f"{peaks[way.name]:.1f}", mfu)
        table.row(f"  {way.name}", len(way.batches), *cells)


def profile(core: PackedModel, kernel: str, way: Way, device: torch.device, rows: int = 25) -> None:
    """Kernels of a step by kind; the tower's attention is known by its heads' size."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    on_cuda = device.type == "cuda"
    batch = max(way.batches, key=lambda b: b["num_real_tokens"])
    with set_up(core, kernel, way):
        for _ in range(2):
            way.step(core, to_device(batch, device)).backward()
            core.zero_grad(set_to_none=True)
        synchronize(device)
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda]
        with profiled(activities=activities, record_shapes=True) as recorded:
            started = time.perf_counter()
            way.step(core, to_device(batch, device)).backward()
            synchronize(device)
            whole = time.perf_counter() - started
    events = recorded.key_averages(group_by_input_shape=True)
    of_device = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    own = (lambda e: e.self_device_time_total) if on_cuda else (lambda e: e.self_cpu_time_total)
    kernels = [e for e in events if e.device_type == of_device]
    kinds: dict[str, float] = {}
    for e in kernels:
        kind = next((k for k, words in KINDS.items() if any(w.lower() in e.key.lower() for w in words)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + own(e)
    vision = core.config.vision_config
    size = vision.hidden_size // vision.num_heads  # which the text's heads have not
    tower = sum(
        e.device_time_total if on_cuda else e.cpu_time_total
        for e in events
        if e.key in ATTEND and e.device_type == torch.autograd.DeviceType.CPU and e.input_shapes[0][-1] == size
    )
    kinds["attention of the tower"] = tower
    kinds["attention of the text"] = max(0.0, kinds.pop("attention", 0.0) - tower)  # no kernel tells them apart
    print(
        f"\n  one step of '{way.name}', {batch['num_real_tokens']} tokens, {batch['num_tiles']} of them of pictures: "
        f"{whole * 1e3:.0f} ms while recording, kernels {sum(map(own, kernels)) / 1e3:.0f} ms"
    )
    for kind, microseconds in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"    {microseconds / 1e3:8.1f} ms  {kind}")
    for e in sorted(kernels, key=own, reverse=True)[:rows]:
        print(f"    {own(e) / 1e3:8.2f} ms {e.count:5d} x  {e.key[:110]}", flush=True)


# --- main -----------------------------------------------------------------------------------------


NOT_RUN: list[str] = []  # parts and ways that failed


def report(title: str, error: BaseException) -> None:
    said = str(error).strip().splitlines() or [""]
    print(f"{title}: {type(error).__name__}: {said[0][:300]}", flush=True)
    NOT_RUN.append(title.strip())


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def attempt(title: str, call: Callable[[], Any]) -> Any:
    """What `call` gives; where it fails, None and a line that says why."""
    try:
        return call()
    except Exception as error:
        report(title, error)
    release()
    return None


def compile_layers(core: PackedModel, device: torch.device) -> Any:
    """As --compile does; returns the loss's kernel, which is compiled too."""
    core.head.loss_kernel = select_loss_kernel("torch", device, torch.bfloat16)
    compile_blocks(core, backend="inductor" if device.type == "cuda" else "aot_eager")
    return core.head.loss_kernel


def run_shape(shape: str, args: argparse.Namespace, device: torch.device) -> int:
    small = device.type != "cuda"
    model = make_model(shape, device, small)
    kernel = select_kernel(args.kernel, device).name
    model.set_attn_implementation({"text_config": register_packed_attention(kernel, device)})
    core = PackedModel(model).train()
    core.tower.use_kernel(KERNELS[kernel])
    samples = draw_samples(core, args.tokens, args.budget, args.seed, small)
    pixels = make_pixels(core, args.budget[1])
    print(
        f"\n{shape}: {core.num_parameters() / 1e6:,.0f} M parameters, attention by {kernel}; {len(samples)} samples, "
        f"{sum(s.num_tokens for s in samples):,} tokens, {sum(s.num_tiles for s in samples):,} of them of "
        f"{sum(len(s.grids) for s in samples)} pictures, {sum(s.num_loss_tokens for s in samples):,} labels; rows of "
        f"{args.budget[0]:,} tokens, {args.budget[1]:,} of pictures",
        flush=True,
    )
    if linear_layers(core.language_model):
        missing = linear.missing_kernel()
        print(f"  linear attention: {f'{missing} is not installed' if missing else 'whole rows'}", flush=True)
    failures = 0
    if "kernels" in args.parts:
        failures += attempt("  kernels", partial(check_kernels, core, device, samples)) or 0
    few = [s for i, s in enumerate(samples) if sum(t.num_tokens for t in samples[: i + 1]) <= args.error_tokens]
    few = few or samples[:2]
    errors = None
    eager_loss = select_loss_kernel("auto", device, torch.bfloat16)
    core.loss_kernels = {False: eager_loss, True: eager_loss}
    if "errors" in args.parts:
        segments = [make_segment(s, core, pixels) for s in few]
        errors = attempt("  errors", partial(Errors, core, kernel, segments, device))
        release()
        if errors is not None:
            ways = (PACKED, FLATTENED) if "flattened" in args.ways else (PACKED,)
            for way in ways:
                attempt(f"  {way.name}", partial(errors.check, way))
    if "isolation" in args.parts:
        failures += attempt("  isolation", partial(check_isolation_of, core, kernel, few, pixels, device)) or 0
    if "compiled" in args.ways:
        compiled_loss = attempt("  compiled", partial(compile_layers, core, device))
        if compiled_loss is None:
            args.ways = [name for name in args.ways if name != "compiled"]
        else:
            core.loss_kernels[True] = compiled_loss
        if errors is not None and "compiled" in args.ways:
            attempt(f"  {COMPILED.name}", partial(errors.check, COMPILED))
    failures += errors.table.failures if errors is not None else 0
    del errors
    release()
    if "speed" in args.parts or args.profile:
        ways = make_ways(core, args, samples, pixels)
        if "speed" in args.parts:
            print(f"\n  speed, median of {args.repeats}", flush=True)
            attempt("  speed", partial(measure, core, kernel, ways, args, device))
        if args.profile:
            attempt("  profile", partial(profile, core, kernel, ways[0], device))
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3_vl", "qwen2_5_vl"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of the part speed")
    parser.add_argument("--kernel", default="auto", help="as --attn_kernel")
    parser.add_argument("--budget", type=int, nargs=2, metavar=("TOKENS", "PICTURES"), help="of a row; 16384 12288")
    parser.add_argument("--tokens", type=int, help="of the samples drawn, about; 32,000")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="of the first of the ways")
    args = parser.parse_args()
    device = torch.device(args.device)
    small = device.type != "cuda"
    args.budget = tuple(args.budget or ((512, 384) if small else (16384, 12288)))
    args.tokens = args.tokens or (1200 if small else 32_000)
    args.error_tokens = ERROR_TOKENS // SMALLER if small else ERROR_TOKENS
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(versions(device), flush=True)
    ways, failures = args.ways, 0
    for shape in args.shapes:
        args.ways, started = list(ways), time.perf_counter()
        failures += attempt(shape, partial(run_shape, shape, args, device)) or 0
        torch._dynamo.reset()
        release()
        print(f"  {shape}: {time.perf_counter() - started:.0f} s in all", flush=True)
    print(f"\n{failures} checks failed; not run: {', '.join(NOT_RUN) or 'nothing'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
