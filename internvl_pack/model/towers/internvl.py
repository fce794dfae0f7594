"""InternVL: tiles of one size, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoints.lora import VISION_TARGETS
from ..attention import Kernel
from ..images import normalize_tiles
from ..parts import vision_layers
from ..vision import use_tile_attention
from .base import Features, register_tower


@register_tower("internvl")
class InternVLTower:
    """See Tower."""

    lora_targets = VISION_TARGETS
    image_token = "<IMG_CONTEXT>"
    grid_positions = False

    def __init__(self, model: Any) -> None:
        self._model, self._config = model, model.config
        vision = model.config.vision_config
        self.tile_size: tuple[int, int] = tuple(vision.image_size)

    @property
    def modules(self) -> list[nn.Module]:
        return [self._model.get_submodule(f"model.{name}") for name in ("vision_tower", "multi_modal_projector")]

    @property
    def layers(self) -> nn.ModuleList:
        return vision_layers(self.modules[0])

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.layers, self.modules[1]]

    @property
    def tokens_per_tile(self) -> int:
        vision = self._config.vision_config
        patches = (vision.image_size[0] // vision.patch_size[0]) * (vision.image_size[1] // vision.patch_size[1])
        return int(patches * self._config.downsample_ratio**2)

    @property
    def dtype(self) -> torch.dtype:
        tower: Any = self.modules[0]
        return tower.dtype

    def use_kernel(self, kernel: Kernel) -> None:
        use_tile_attention(self._model, kernel)

    def features(
        self,
        tiles: Tensor,
        grids: Sequence[tuple[int, ...]] = (),
        second_frames: Tensor | None = None,
        *,
        is_compiled: bool = False,
    ) -> Features:
        num_tiles = len(tiles)
        tiles = normalize_tiles(tiles, self.dtype)
        if is_compiled and num_tiles == 1:
            tiles = torch.cat([tiles, torch.zeros_like(tiles)])  # a batch of one is compiled apart
        features = self._model.get_image_features(
            pixel_values=tiles,
            vision_feature_layer=self._config.vision_feature_layer,
            vision_feature_select_strategy=self._config.vision_feature_select_strategy,
            return_dict=True,
        ).pooler_output
        return Features(features[:num_tiles])
