"""InternVL: a picture is up to `max_dynamic_patch` large tiles of its shape, and a thumbnail (tiles.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..tiles import ONE_TILE, TileGrid, max_tiles_per_image, plan_grid
from .base import Bordered, register_family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..config import EncodeConfig


@register_family("internvl")
class InternVLPictures(Bordered):
    """See PictureFamily."""

    unused_options = frozenset(
        {"family", "min_pixels", "max_pixels", "video_max_pixels", "takes_videos", "positions_per_second"}
    )

    def __init__(self, config: EncodeConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer, "<img>", "<IMG_CONTEXT>", "</img>")
        self._config = config

    def plan(self, size: tuple[int, int], num_images: int, max_dynamic_patch: int) -> TileGrid:
        config = self._config
        if not config.dynamic_image_size:
            return ONE_TILE
        return plan_grid(
            *size,
            min_tiles=config.min_dynamic_patch,
            max_tiles=max_tiles_per_image(max_dynamic_patch, num_images),
            image_size=config.image_size,
            use_thumbnail=config.use_thumbnail,
        )
