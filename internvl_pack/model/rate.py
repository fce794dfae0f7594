"""How fast forward and backward are on the device at hand, before there is a checkpoint: `estimate --measure`.

A model of the config's widths with random weights and few layers trains on a row of samples. All layers of a tower take
the same time (or all pairs, where layers with a window and without take turns), so some of them are taken away and the
rest is timed again:

    seconds of a row = rest + vision layers * a vision layer + decoder layers * a decoder layer

On a GPU the row is a full one, or the largest of its half, half of that and so on that fits its memory. On a CPU it is
as large as can be timed in SECONDS.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batch.loss_weights import IGNORE_INDEX
from ..checkpoints.internvl_format import is_internvl_format, native_config
from ..errors import UserError
from ..packing.cost import CostModel
from .attention import register_packed_attention, run_device, select_kernel
from .compiled import compile_blocks
from .loss import select_loss_kernel
from .packed import PackedModel
from .parts import decoder_layers, vision_layers
from .vision import use_tile_attention

VISION_LAYERS, DECODER_LAYERS = 2, 3  # of the model that is timed; one and two of them are taken away
REPEATS = 5  # on a GPU
SETTLE = 3.0  # seconds of work before them
SECONDS = 30.0  # that a CPU may take
SMALLEST = 512  # tokens of a row


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What was measured.

    Attributes:
        device: its name.
        tokens, tiles: of the row.
        seconds: forward and backward of the row by the whole model.
        operations_per_second: that is, by the cost model.
        compiled: whether layers were.
    """

    device: str
    tokens: int
    tiles: int
    seconds: float
    operations_per_second: float
    compiled: bool


def measure_rate(
    settings: Mapping[str, Any],
    samples: Sequence[tuple[int, int]],
    budget: tuple[int, int],
    *,
    checkpointed: bool = False,
    compiled: bool = False,
) -> Rate:
    """Time a row on the GPU, or on the CPU where there is none.

    Args:
        settings: of the model: a `config.json` of an InternVL, or an entry of `packing.cost.SIZES`.
        samples: (tokens, tiles) of samples like those that will be trained on, in random order, enough for a row.
        budget: (tokens, tiles) of a full row.
        checkpointed: layers compute their activations again in the backward pass.
        compiled: layers are compiled; left out on a CPU.

    Raises:
        UserError: a config that cannot be built, no samples, or not even the smallest row fits the memory.
    """
    device = run_device(None)
    on_gpu = device.type == "cuda"
    compiled = compiled and on_gpu
    config = full_config(settings)
    depths = config.vision_config.num_hidden_layers, config.get_text_config().num_hidden_layers

    def packed_model() -> PackedModel:
        packed = _few_layers(full_config(settings), device)
        if checkpointed:
            packed.gradient_checkpointing_enable()
        if compiled:
            compile_blocks(packed)
        return packed

    packed = packed_model()
    rows = rows_of(samples, budget, packed.tokens_per_tile)
    if not on_gpu:
        affordable = SECONDS / (2 * 3 * _seconds(packed, rows[-1], repeats=0))
        rows = rows[-max(1, int(affordable).bit_length()) :]
    for row in rows:
        seconds = None
        with contextlib.suppress(torch.OutOfMemoryError):
            seconds = _whole_row(packed, row, depths)
        if seconds is None:
            del packed
            torch.cuda.empty_cache()
            packed = packed_model()
            continue
        operations = CostModel.from_config(settings).of_pack(row)
        return Rate(
            device=torch.cuda.get_device_name(device) if on_gpu else "CPU",
            tokens=sum(tokens for tokens, _ in row),
            tiles=sum(tiles for _, tiles in row),
            seconds=seconds,
            operations_per_second=operations / seconds,
            compiled=compiled,
        )
    raise UserError(f"--measure: a row of {SMALLEST} tokens does not fit the memory of {device}")


def full_config(settings: Mapping[str, Any]) -> Any:
    """The `InternVLConfig` of a `config.json` or of an entry of `packing.cost.SIZES`.

    Raises:
        UserError: it cannot be made.
    """
    from transformers import AutoConfig, InternVLConfig

    settings = dict(settings)
    if is_internvl_format(settings):
        return native_config(settings, image_token_id=0)
    text, vision = dict(settings["text_config"]), dict(settings["vision_config"])
    if "spatial_merge_size" in vision:
        raise UserError(
            f"--measure with a {settings.get('model_type')!r} model: rows of native resolution are not timed yet; "
            "leave it out, and give --mfu"
        )
    if "model_type" not in text:  # of SIZES
        text["model_type"] = _family(text)
        vision |= {
            "num_attention_heads": max(1, vision["hidden_size"] // (64 if vision["hidden_size"] < 2048 else 128))
        }
        vision["attention_bias"] = True
    for name in ("image_size", "patch_size"):
        if not isinstance(vision[name], (list, tuple)):
            vision[name] = [vision[name]] * 2
    try:
        return InternVLConfig(
            text_config=AutoConfig.for_model(**text),
            vision_config=vision,
            image_token_id=0,
            downsample_ratio=settings.get("downsample_ratio", 0.5),
        )
    except Exception as error:  # validators of configs have exceptions of their own
        raise UserError(f"the model's config: {' '.join(str(error).split())}") from error


def _family(text: Mapping[str, Any]) -> str:
    if "num_local_experts" in text:
        return "gpt_oss"
    if "num_experts" in text:
        return "qwen3_moe"
    return "qwen3" if "head_dim" in text else "qwen2"


def rows_of(
    samples: Sequence[tuple[int, int]], budget: tuple[int, int], tokens_per_tile: int
) -> list[list[tuple[int, int]]]:
    """A row that these samples fill, its first half, half of that and so on; the last sample of each is cut to fit.

    Raises:
        UserError: there are no samples.
    """
    if not samples:
        raise UserError("--measure: there are no samples")
    rows: list[list[tuple[int, int]]] = []
    max_tokens, max_tiles = budget
    while not rows or max_tokens >= SMALLEST:
        row, tokens, tiles = [], max_tokens, max_tiles
        for sample_tokens, sample_tiles in samples:
            length = min(sample_tokens, tokens)
            if length < 2:
                break
            held = min(sample_tiles, tiles, (length - 1) // tokens_per_tile)
            row.append((length, held))
            tokens, tiles = tokens - length, tiles - held
        rows.append(row)
        max_tokens, max_tiles = max_tokens // 2, max_tiles // 2
    return rows


def _few_layers(config: Any, device: torch.device) -> PackedModel:
    from transformers import InternVLForConditionalGeneration

    text, vision = config.get_text_config(), config.vision_config
    text.num_hidden_layers = min(DECODER_LAYERS, text.num_hidden_layers)
    vision.num_hidden_layers = min(VISION_LAYERS, vision.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    parts = {"text_config": register_packed_attention("auto", device, dtype), "vision_config": "sdpa", "": "sdpa"}
    with device:
        model = InternVLForConditionalGeneration._from_config(config, attn_implementation=parts, dtype=dtype)
    use_tile_attention(model, select_kernel("auto", device, dtype))
    packed = PackedModel(model).train()
    packed.head.loss_kernel = select_loss_kernel("auto", device, dtype)
    return packed


def _whole_row(packed: PackedModel, row: list[tuple[int, int]], depths: tuple[int, int]) -> float:
    """Seconds of the row by a model of these depths, vision and decoder; takes layers of `packed` away."""
    vision, decoder = vision_layers(packed.vision_modules[0]), decoder_layers(packed.language_model)
    seconds = before = _seconds(packed, row)
    for layers, depth, taken in ((vision, depths[0], 1), (decoder, depths[1], 2)):
        missing, taken = depth - len(layers), min(taken, len(layers) - 1)
        if missing:
            del layers[-taken:]
            after = _seconds(packed, row)
            seconds += missing * max(0.0, before - after) / taken
            before = after
    return seconds


def _seconds(packed: PackedModel, row: list[tuple[int, int]], repeats: int = 1) -> float:
    """Of forward and backward.

    On a GPU the median of REPEATS, once SETTLE seconds of the same have brought its clock down to what its power
    allows; on a CPU the fastest of a first and `repeats` more.
    """
    batch = _batch(packed, row)
    on_gpu = batch["input_ids"].is_cuda

    def timed() -> float:
        begun = time.perf_counter()
        packed(**batch).loss.backward()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        packed.zero_grad(set_to_none=True)
        return seconds

    first = timed()  # compiles
    if not on_gpu:
        return min([first, *(timed() for _ in range(repeats))])
    settled = time.perf_counter() + SETTLE
    while time.perf_counter() < settled:
        timed()
    return statistics.median(timed() for _ in range(REPEATS))


def _batch(packed: PackedModel, row: list[tuple[int, int]]) -> dict[str, Any]:
    """The row as a loader would give it: of each sample its tiles' tokens, then text, half of it labelled."""
    device = next(packed.parameters()).device
    generator = torch.Generator().manual_seed(0)
    image_id, vocabulary = packed.config.image_token_id, packed.config.get_text_config().vocab_size
    lengths = [tokens for tokens, _ in row]
    ids = torch.randint(1, vocabulary, (1, sum(lengths)), generator=generator)  # the image token is 0
    labels = torch.full_like(ids, IGNORE_INDEX)
    start = num_labels = 0
    for tokens, tiles in row:
        places = tiles * packed.tokens_per_tile
        ids[0, start : start + places] = image_id
        text = slice(start + places + (tokens - places + 1) // 2, start + tokens)
        labels[0, text] = ids[0, text]
        num_labels += text.stop - text.start
        start += tokens
    num_tiles, (side, _) = sum(tiles for _, tiles in row), packed.config.vision_config.image_size
    pixels = torch.randint(256, (num_tiles, 3, side, side), dtype=torch.uint8, generator=generator)
    return {
        "input_ids": ids.to(device),
        "labels": labels.to(device),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "max_seqlen": max(lengths),
        "pixel_values": pixels.to(device),
        "num_loss_tokens": num_labels,
        "num_image_tokens": num_tiles * packed.tokens_per_tile,
    }
