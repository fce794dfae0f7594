"""A model made to fit other tiles or another tokenizer than it was saved with, as InternVL's training scripts do.

Position embeddings of the vision tower are interpolated (bicubic, the class token's left as it is). The vocabulary of
a bare language model becomes the tokenizer's: the head's rows of new tokens begin as the mean of the others, so that
no token begins favoured; their embeddings are the spare rows that the model has, else the mean too.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.internvl_format import loaded_from, remember
from ..errors import UserError

logger = logging.getLogger(__name__)


def resize_positions(model: Any, image_size: int) -> None:
    """Interpolate the tower's position embeddings for tiles of `image_size` pixels; nothing where that is its size.

    Raises:
        UserError: it is no whole number of patches, or the tower has none to interpolate.
    """
    config = model.config
    vision = config.vision_config
    old, patch = vision.image_size[0], vision.patch_size[0]
    if set(vision.image_size) == {image_size}:
        return
    if len({*vision.image_size}) > 1 or image_size % patch:
        raise UserError(
            f"--force_image_size {image_size}: the model's tiles are {'x'.join(map(str, vision.image_size))} pixels in "
            f"patches of {patch}; give a multiple of {patch}"
        )
    embeddings = model.get_submodule("model.vision_tower.embeddings")
    if embeddings.position_embeddings is None:
        raise UserError(f"--force_image_size {image_size}: the model's tiles are {old} pixels, use that")
    with _gathered(embeddings.position_embeddings):
        positions = interpolated(embeddings.position_embeddings.detach(), image_size // patch)
    embeddings.position_embeddings = nn.Parameter(positions, embeddings.position_embeddings.requires_grad)
    side = image_size // patch
    for part in (vision, embeddings, embeddings.patch_embeddings, getattr(model.model.vision_tower, "config", vision)):
        part.image_size = [image_size, image_size]
    embeddings.patch_embeddings.num_patches, embeddings.patch_embeddings.patch_shape = side * side, (side, side)
    config.image_seq_length = int(side**2 * config.downsample_ratio**2)
    if (known := loaded_from(config)) is not None:
        tower = known["vision_config"] | {"image_size": image_size}
        remember(config, force_image_size=image_size, vision_config=tower)
    logger.info("position embeddings resized from tiles of %d to %d pixels", old, image_size)


def interpolated(positions: Tensor, side: int) -> Tensor:
    """Position embeddings (1, 1 + s * s, H), the class token's first, for `side` x `side` patches."""
    grid = positions[:, 1:].transpose(1, 2).unflatten(2, (round((positions.shape[1] - 1) ** 0.5), -1))
    resized = nn.functional.interpolate(grid.float(), size=(side, side), mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :1], resized.to(positions.dtype).flatten(2).transpose(1, 2)], dim=1)


def fit_vocabulary(language: Any, tokenizer: Any, num_new: int) -> None:
    """Give a causal language model the tokenizer's vocabulary; rows of its last `num_new` tokens begin as the mean."""
    before = language.config.vocab_size
    size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))  # ids may have gaps
    if not num_new and size <= before:
        return
    num_new = max(num_new, size - before)
    language.resize_token_embeddings(size, mean_resizing=False)
    head, embeddings = language.get_output_embeddings().weight, language.get_input_embeddings().weight
    grown = max(0, size - before)
    with torch.no_grad():
        _mean_rows(head, num_new)
        if grown and embeddings is not head:
            _mean_rows(embeddings, grown)
    logger.info(
        "vocabulary of the language model: %d rows, now %d, those of %d new tokens %s",
        *(before, size, num_new, "the mean of the others (the head's; embeddings where there were none)"),
    )


def _mean_rows(weight: Tensor, count: int) -> None:
    with _gathered(weight, modified=True):
        if weight.numel():  # under ZeRO-3 rank 0 alone changes it
            weight[-count:] = weight[:-count].float().mean(dim=0).to(weight.dtype)


def _gathered(weight: Tensor, modified: bool = False) -> Any:
    """The whole of a parameter that ZeRO-3 has partitioned."""
    if not hasattr(weight, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=0 if modified else None)
