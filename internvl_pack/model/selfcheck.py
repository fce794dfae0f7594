"""Isolation, checked on the model that will train: two segments, one of them changed.

Every token and pixel of one segment is replaced; the other's hidden states and logits must not move,
in both directions. If one moves, the first module in the order of the forward pass where it does is
named. Then the same of a prefix tree, if the model takes them: a changed branch may move neither the other branch nor
the prefix, and a changed prefix must move both. Takes seven forward passes of a few dozen tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
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
    row = _Row(core, call, segments, device)
    for changed, watched in ((0, 1), (1, 0)):
        where = "after" if watched < changed else "before"
        row.check(changed, {watched: "a segment"}, f"the one {where} it")
    if core.tree_problem is not None:
        return
    prefix, *branches = segments[0], *({"ids": _segment(core, seed)["ids"][:TOKENS_OF_TEXT]} for seed in (2, 3))
    row = _Row(core, call, [prefix, *branches], device, prefix_of=[-1, 0, 0])
    row.check(1, {0: "a tree's prefix", 2: "a branch"}, "the branch before it")
    row.check(2, {0: "a tree's prefix", 1: "a branch"}, "the branch after it")
    row.check_seen(0, (1, 2))


class _Row:
    """Segments in a row, what they give, and what that becomes when one of them changes."""

    def __init__(
        self,
        core: PackedModel,
        call: Callable[..., Any],
        segments: Sequence[dict[str, Tensor]],
        device: torch.device | str,
        prefix_of: Sequence[int] | None = None,
    ) -> None:
        self._core, self._call, self._segments, self._device = core, call, segments, device
        self._prefix_of = prefix_of
        self._bounds = [0, *accumulate(len(s["ids"]) for s in segments)]
        self._reference = self._run(segments)

    def check(self, changed: int, watched: Mapping[int, str], what: str) -> None:
        """Check that a changed segment leaves the watched ones as they are; `what` says where it is to each of these.

        Raises:
            IsolationError: it does not.
        """
        tolerance = TOLERANCE_ULP * _rounding(self._core, self._reference)
        for name, values in self._with(changed).items():
            for segment, said in watched.items():
                if name in VISION and "tile" not in self._segments[segment]:
                    continue
                before, after = (self._part(v, name, segment) for v in (self._reference[name], values))
                scale = before.abs().max().item()
                moved = (after - before).abs().max().item()
                if not moved <= tolerance * scale:
                    detail = f"{said}'s values move by {moved:.2g} of {scale:.2g} when {what} changes"
                    raise IsolationError(name, detail)

    def check_seen(self, changed: int, watched: Sequence[int]) -> None:
        """Check that every token of the watched segments sees the changed one.

        Raises:
            UserError: it does not.
        """
        name = "the output head"
        values = self._with(changed)[name]
        for segment in watched:
            before, after = (self._part(v, name, segment) for v in (self._reference[name], values))
            if not (after != before).any(-1).all():
                raise UserError("prefix trees: a branch does not see its prefix in this model")

    def _with(self, changed: int) -> dict[str, Tensor]:
        variant = list(self._segments)
        variant[changed] = _changed(self._core, variant[changed])
        return self._run(variant)

    def _part(self, values: Tensor, name: str, segment: int) -> Tensor:
        """What belongs to a segment: its tile's values, or its tokens'."""
        if name in VISION:
            return values[sum("tile" in s for s in self._segments[:segment])]
        return values[0, self._bounds[segment] : self._bounds[segment + 1]]

    def _run(self, segments: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The row's logits and what each component gave, in order."""
        core, device = self._core, self._device
        lengths = [len(s["ids"]) for s in segments]
        begun = [0 if at < 0 else lengths[at] for at in self._prefix_of or [-1] * len(segments)]
        positions = torch.cat([torch.arange(first, first + n) for first, n in zip(begun, lengths, strict=True)])[None]
        native = core.grid_positions  # a picture of one token has a text's positions
        tiles = [s["tile"] for s in segments if "tile" in s]
        batch = {
            "input_ids": torch.cat([s["ids"] for s in segments])[None].to(device),
            "position_ids": (positions.expand(3, 1, -1) if native else positions).to(device),
            "cu_seqlens": torch.tensor(self._bounds, dtype=torch.int32),
            "max_seqlen": max(lengths),
            "pixel_values": torch.cat(tiles).to(device) if core.has_vision else None,
            "image_grids": [(1, 1)] * len(tiles) if native else [],
        }
        if self._prefix_of is not None:
            batch["prefix_of"] = torch.tensor(self._prefix_of, dtype=torch.int32)
        with _recording(core) as seen:
            logits = self._call(**batch)["logits"]
        seen = {name: _of_row(core, name, values, batch) for name, values in seen.items()}
        return seen | {"the output head": logits}


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
    text = core.as_text(text)
    size = core.tower.tile_size
    image = torch.full((core.tokens_per_tile,), core.config.image_token_id)
    return {
        "ids": torch.cat([text[:TOKENS_OF_TEXT], image, text[TOKENS_OF_TEXT:]]),
        "tile": torch.randint(256, (1, 3, *size), dtype=torch.uint8, generator=generator),
    }


def _changed(core: PackedModel, segment: dict[str, Tensor]) -> dict[str, Tensor]:
    """Another token at every place of text, and the negative of the tile."""
    vocabulary = core.config.get_text_config().vocab_size
    other = (segment["ids"] + vocabulary // 2) % vocabulary
    if core.tower is None:
        return {"ids": other}
    ids = torch.where(core.is_picture(segment["ids"]), segment["ids"], core.as_text(other))
    return {"ids": ids} | ({"tile": 255 - segment["tile"]} if "tile" in segment else {})


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
        if hasattr(layer, "linear_attn"):
            named.append((f"linear attention of decoder layer {i}", layer.linear_attn))
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


def _packed_model(model: nn.Module) -> PackedModel:
    while not isinstance(model, PackedModel):
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            raise TypeError(f"{type(model).__name__} neither is nor wraps a PackedModel")
        model = inner
    return model
