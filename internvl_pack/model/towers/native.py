"""Qwen2.5-VL, Qwen3-VL, Qwen3.5 and GLM-4V: pictures of any size in one row of patches.

Each patch sees its own picture, or its window.

The tower is transformers' own. What it would ask the device for, layer by layer, is made on the host from the grids:
boundaries, positions, windows, places in the table of positions. Its attention is one call a layer: transformers gives
boundaries to functions with "flash" in their name, and loops over pictures with others.

Deepstack (Qwen3-VL): features of earlier layers are added to the hidden states of the first decoder layers. The model
finds their places by a mask, for which it waits for the device; here hooks of these layers add them at known places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import vision_utils

from ...encode.families.native import CLIP, HALVES
from ..attention import KERNELS, Kernel
from ..images import normalize_tiles
from ..vision import register_picture_attention, use_patch_products
from .base import Features, register_tower


class NativeTower:
    """See Tower. A tile is the square of pixels that becomes one token; those of a picture lie in reading order."""

    STATISTICS = CLIP  # mean and standard deviation of the three colours
    lora_targets: tuple[str, ...] = ("qkv", "proj", "gate_proj", "up_proj", "down_proj")
    image_token = "<|image_pad|>"
    projector = ("merger", "deepstack_merger_list")  # modules after the tower's own
    tokens_per_tile = 1
    grid_positions = True

    def __init__(self, model: Any) -> None:
        self._model = model
        vision = model.config.vision_config
        self._merge, self._patch = int(vision.spatial_merge_size), int(vision.patch_size)
        self._frames = int(vision.temporal_patch_size)
        side = self._merge * self._patch
        self.tile_size: tuple[int, int] = (side, side)
        self.use_kernel(KERNELS["sdpa"])
        use_patch_products(self._visual)
        decoder = model.get_submodule("model.language_model").layers
        for number in range(len(getattr(vision, "deepstack_visual_indexes", ()))):
            if not any(isinstance(hook, _AddDeepFeatures) for hook in decoder[number]._forward_hooks.values()):
                decoder[number].register_forward_hook(_AddDeepFeatures(number), with_kwargs=True)

    @property
    def _visual(self) -> Any:
        return self._model.get_submodule("model.visual")

    @property
    def modules(self) -> list[nn.Module]:
        visual = self._visual
        projector = {name: part for name, part in visual.named_children() if name in self.projector}
        tower = {name: part for name, part in visual.named_children() if name not in projector}
        return [nn.ModuleDict(tower), nn.ModuleDict(projector)]

    @property
    def layers(self) -> nn.ModuleList:
        return self._visual.blocks

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    @property
    def dtype(self) -> torch.dtype:
        return self._visual.dtype

    def use_kernel(self, kernel: Kernel) -> None:
        """Attention of the tower through `kernel`, or one that takes its heads."""
        vision = self._visual.config
        vision._attn_implementation = register_picture_attention(kernel, vision.hidden_size // vision.num_heads)

    def features(
        self,
        tiles: Tensor,
        grids: Sequence[tuple[int, ...]] = (),
        second_frames: Tensor | None = None,
        *,
        is_compiled: bool = False,
    ) -> Features:
        inputs = {
            name: value.to(tiles.device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in self.host_inputs(grids).items()
        }
        tiles = second = normalize_tiles(tiles, self.dtype, self.STATISTICS)
        places = _paired_tiles(grids)
        if len(places) != (given := 0 if second_frames is None else len(second_frames)):
            raise ValueError(f"second_frames has {given} tiles, the pairs of frames in image_grids have {len(places)}")
        if second_frames is not None:
            added = normalize_tiles(second_frames, self.dtype, self.STATISTICS)
            second = tiles.index_copy(0, places.to(tiles.device, non_blocking=True), added)
        patches = self._patches(tiles, second)
        out = self._visual(patches, return_dict=True, **inputs)
        deep = getattr(out, "deepstack_features", None) or ()
        return Features(out.pooler_output.unsqueeze(1), tuple(deep))

    def host_inputs(self, grids: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        """All that the tower's forward takes beside pixels, made on the host from the pictures' rows and columns.

        Each pair of a video's frames is a picture to it.

        Raises:
            ValueError: there are no grids.
        """
        if not grids:
            raise ValueError("image_grids is missing: pictures of native resolution need the rows and columns of each")
        visual, merge = self._visual, self._merge
        grid_thw = torch.tensor([(1, rows * merge, columns * merge) for rows, columns, _ in _pictures(grids)])
        boundaries = vision_utils.get_vision_cu_seqlens(grid_thw)
        inputs = {
            "grid_thw": grid_thw,
            "cu_seqlens": boundaries,
            "max_seqlen": int(boundaries.diff().max()),
            "position_ids": vision_utils.get_vision_position_ids(grid_thw, merge),
        }
        if hasattr(visual, "window_size"):
            index, windows = vision_utils.get_vision_window_index(grid_thw, merge, visual.window_size, self._patch)
            inputs |= {"window_index": index, "cu_window_seqlens": windows}
            inputs["max_window_seqlen"] = int(windows.diff().max())
        if hasattr(visual, "num_grid_per_side"):
            places = vision_utils.get_vision_interpolation_indices_and_weights(
                grid_thw,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            inputs |= {"interp_indices": places[0], "interp_weights": places[1]}
        return inputs

    def _patches(self, *frames: Tensor) -> Tensor:
        """Tiles of each frame (T, 3, S, S) to patches (T * merge^2, 3 * frames * p * p)."""
        merge, size = self._merge, self._patch
        patches = [f.unflatten(3, (merge, size)).unflatten(2, (merge, size)).permute(0, 2, 4, 1, 3, 5) for f in frames]
        return torch.stack(patches, dim=4).reshape(len(frames[0]) * merge**2, -1)


def _pictures(grids: Sequence[tuple[int, ...]]) -> list[tuple[int, int, bool]]:
    """(rows, columns, whether it is a pair of frames) of each picture of a row, see `packed_collate_fn`."""
    return [(rows, columns, bool(times)) for rows, columns, *times in grids for _ in times or [0]]


def _paired_tiles(grids: Sequence[tuple[int, ...]]) -> Tensor:
    """Which tiles are of pairs of frames, int64."""
    pictures = _pictures(grids)
    paired = torch.tensor([is_pair for *_, is_pair in pictures])
    return paired.repeat_interleave(torch.tensor([rows * columns for rows, columns, _ in pictures])).nonzero()[:, 0]


class _AddDeepFeatures:
    """A decoder layer's forward hook: adds what the layer's argument `deep_features` holds for it.

    As an argument it is there again when the layer is computed again in the backward pass.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], hidden: Tensor) -> Tensor | None:
        given = kwargs.get("deep_features")
        if given is None:
            return None
        positions, features = given
        flat = hidden.reshape(-1, hidden.shape[-1])
        return flat.index_add(0, positions, features[self._number].to(hidden.dtype)).view_as(hidden)


@register_tower("glm4v")
class Glm4vTower(NativeTower):
    """Positions by a table that is resampled on the device."""

    image_token = "<|image|>"
    projector = ("downsample", "merger")


@register_tower("qwen2_5_vl")
class Qwen25Tower(NativeTower):
    """Most layers attend within windows of 112 x 112 pixels."""


@register_tower("qwen3_5_moe")
@register_tower("qwen3_5")
@register_tower("qwen3_vl_moe")
@register_tower("qwen3_vl")
class Qwen3Tower(NativeTower):
    """With deepstack, but Qwen3.5."""

    STATISTICS = HALVES
    lora_targets = ("qkv", "proj", "linear_fc1", "linear_fc2")
