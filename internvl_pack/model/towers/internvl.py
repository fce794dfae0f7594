"""InternVL: tiles of one size, each by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..images import normalize_tiles
from .base import register_tower


@register_tower("internvl")
class InternVLTower:
    """See Tower."""

    def __init__(self, model: Any) -> None:
        self._model, self._config = model, model.config
        vision = model.config.vision_config
        self.tile_size: tuple[int, int] = tuple(vision.image_size)

    @property
    def modules(self) -> list[nn.Module]:
        return [self._model.get_submodule(f"model.{name}") for name in ("vision_tower", "multi_modal_projector")]

    @property
    def tokens_per_tile(self) -> int:
        vision = self._config.vision_config
        patches = (vision.image_size[0] // vision.patch_size[0]) * (vision.image_size[1] // vision.patch_size[1])
        return int(patches * self._config.downsample_ratio**2)

    @property
    def dtype(self) -> torch.dtype:
        tower: Any = self.modules[0]
        return tower.dtype

    def features(self, tiles: Tensor, *, is_compiled: bool = False) -> Tensor:
        num_tiles = len(tiles)
        tiles = normalize_tiles(tiles, self.dtype)
        if is_compiled and num_tiles == 1:
            tiles = torch.cat([tiles, torch.zeros_like(tiles)])  # a batch of one is compiled apart
        return self._model.get_image_features(
            pixel_values=tiles,
            vision_feature_layer=self._config.vision_feature_layer,
            vision_feature_select_strategy=self._config.vision_feature_select_strategy,
            return_dict=True,
        ).pooler_output[:num_tiles]
