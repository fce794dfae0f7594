"""Isolation, checked on the model that will train: two segments, one of them changed.

Every token and pixel of one segment is replaced; the other's hidden states and logits must not move,
in both directions. If one moves, the first module in the order of the forward pass where it does is
named. Takes three forward passes of a few dozen tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..parallel.slices import gather_row, gather_tiles, own_tiles
from .packed import PackedModel

TOKENS_OF_TEXT = 12  # before and after the image of each segment

# A changed neighbour may not move a value by more than this many units in the last place of the largest:
# the same rows in the same shapes give the same bits almost everywhere, a leak moves the leading digits.
TOLERANCE_ULP = 4
VISION = ("the vision tower", "the projector")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class IsolationError(UserError):
    """A segment saw its neighbour; `component` is where."""

    def __init__(self, component: str, detail: str) -> None:
        super().__init__(f"packed segments are not isolated: {component} leaks, {detail}")
        self.component = component


def check_isolation(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Raise IsolationError if a segment's outputs depend on its neighbour.

    Args:
        model: a PackedModel, or what wraps it (DDP, a DeepSpeed engine); with ZeRO-3 every rank must call.
        device: where the inputs go, if not where the model's weights are.
    """
    core = _packed_model(model)
    training = core.training
    core.eval()
    try:
        # Compiled blocks run uncompiled here: what is recorded inside them would be compiled in.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            _check(core, model, device or core.device)
    finally:
        core.train(training)


def _check(core: PackedModel, call: Callable[..., Any], device: torch.device | str) -> None:
    segments = [_segment(core, seed) for seed in (0, 1)]
    reference = _run(core, call, segments, device)
    tolerance = TOLERANCE_ULP * _rounding(core, reference)
    for changed, watched in ((0, 1), (1, 0)):
        variant = list(segments)
        variant[changed] = _changed(core, segments[changed])
        outputs = _run(core, call, variant, device)
        for name, values in outputs.items():
            before, after = (_part(v, name, watched) for v in (reference[name], values))
            scale = before.abs().max().item()
            moved = (after - before).abs().max().item()
            if not moved <= tolerance * scale:
                where = "after" if watched < changed else "before"
                raise IsolationError(
                    name, f"a segment's values move by {moved:.2g} of {scale:.2g} when the one {where} it changes"
                )


def _rounding(core: PackedModel, outputs: dict[str, Tensor]) -> float:
    """Unit in the last place: of the logits, or with experts of the least precise component.

    How many tokens an expert gets depends on the whole row, so its matrix products may be rounded differently.
    """
    text_config = core.config.get_text_config()
    experts = any(getattr(text_config, name, None) for name in EXPERTS)
    types = {t.dtype for t in outputs.values()} if experts else {outputs["the output head"].dtype}
    return max(torch.finfo(dtype).eps for dtype in types)


def _segment(core: PackedModel, seed: int) -> dict[str, Tensor]:
    """Random text around one random tile."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = core.config.get_text_config().vocab_size
    text = torch.randint(vocabulary, (2 * TOKENS_OF_TEXT,), generator=generator)
    if core.tower is None:
        return {"ids": text}
    image_id = core.config.image_token_id
    text[text == image_id] = (image_id + 1) % vocabulary
    size = core.tower.tile_size
    image = torch.full((core.tokens_per_tile,), image_id)
    return {
        "ids": torch.cat([text[:TOKENS_OF_TEXT], image, text[TOKENS_OF_TEXT:]]),
        "tile": torch.randint(256, (1, 3, *size), dtype=torch.uint8, generator=generator),
    }


def _changed(core: PackedModel, segment: dict[str, Tensor]) -> dict[str, Tensor]:
    """Another token at every place of text, and the negative of the tile."""
    vocabulary = core.config.get_text_config().vocab_size
    other = (segment["ids"] + vocabulary // 2) % vocabulary
    if "tile" not in segment:
        return {"ids": other}
    image_id = core.config.image_token_id
    other[other == image_id] = (image_id + 1) % vocabulary
    return {"ids": torch.where(segment["ids"] == image_id, image_id, other), "tile": 255 - segment["tile"]}


def _run(
    core: PackedModel, call: Callable[..., Any], segments: Sequence[dict[str, Tensor]], device: torch.device | str
) -> dict[str, Tensor]:
    """The row's logits and what each component gave, in order."""
    lengths = [len(s["ids"]) for s in segments]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    native = core.tower is not None and core.tower.grid_positions  # a picture of one token has a text's positions
    batch = {
        "input_ids": torch.cat([s["ids"] for s in segments])[None].to(device),
        "position_ids": (positions.expand(3, 1, -1) if native else positions).to(device),
        "cu_seqlens": torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32),
        "max_seqlen": max(lengths),
        "pixel_values": torch.cat([s["tile"] for s in segments]).to(device) if core.has_vision else None,
        "image_grids": [(1, 1)] * len(segments) if native else [],
    }
    with _recording(core) as seen:
        logits = call(**batch)["logits"]
    seen = {name: _of_row(core, name, values, batch) for name, values in seen.items()}
    return seen | {"the output head": logits}


def _of_row(core: PackedModel, name: str, values: Tensor, batch: dict[str, Any]) -> Tensor:
    """A component's values for the whole row: each rank of a sequence group has recorded those of its share."""
    group = core.sequence_group
    if name not in VISION:
        return gather_row(values, batch["cu_seqlens"], group)[:, : batch["input_ids"].shape[1]]  # fp8 adds tokens
    num_tiles = len(batch["pixel_values"])
    mine = max(len(own_tiles(batch["pixel_values"], group)), 1)  # a compiled tower has another beside a single one
    return gather_tiles(values[:mine], num_tiles, group)


@contextlib.contextmanager
def _recording(core: PackedModel) -> Iterator[dict[str, Tensor]]:
    """Outputs of the components by a readable name."""
    text_config = core.config.get_text_config()
    named = list(zip(VISION, core.vision_modules, strict=False))
    for i, layer in enumerate(getattr(core.language_model, "layers", [])):
        attention = getattr(layer, "self_attn", None)
        if attention is not None:
            named.append((f"attention of decoder layer {i} ({text_config._attn_implementation})", attention))
        named.append((f"decoder layer {i} ({type(layer).__name__})", layer))
    named.append(("the language model", core.language_model))
    seen: dict[str, Tensor] = {}
    handles = [m.register_forward_hook(lambda _m, _i, out, n=n: seen.__setitem__(n, _tensor(out))) for n, m in named]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output["last_hidden_state"] if isinstance(output, dict) else output[0]


def _part(values: Tensor, name: str, segment: int) -> Tensor:
    """What belongs to one of the two equally long segments: its tile's or its tokens' values."""
    if name in VISION:
        return values[segment]
    return values[0].chunk(2)[segment]


def _packed_model(model: nn.Module) -> PackedModel:
    while not isinstance(model, PackedModel):
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            raise TypeError(f"{type(model).__name__} neither is nor wraps a PackedModel")
        model = inner
    return model
