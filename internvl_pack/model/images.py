"""Tiles to features to embeddings: normalisation on the device, and rows without an image."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# ImageNet statistics, as InternVL's image processor uses them.
IMAGE_MEAN = (0.485, 0.456, 0.406)
IMAGE_STD = (0.229, 0.224, 0.225)
Colours = tuple[float, float, float]


def normalize_tiles(
    tiles: Tensor, dtype: torch.dtype, statistics: tuple[Colours, Colours] = (IMAGE_MEAN, IMAGE_STD)
) -> Tensor:
    """uint8 tiles to the vision tower's input: (x / 255 - mean) / std, computed in float32.

    Args:
        tiles: (T, 3, S, S) uint8; a floating type is taken as normalised already.
        dtype: of the result.
        statistics: mean and std of red, green and blue.

    Raises:
        ValueError: another shape or type.
    """
    if tiles.ndim != 4 or tiles.shape[1] != 3:
        raise ValueError(f"pixel_values must be (tiles, 3, S, S), is {tuple(tiles.shape)}")
    if tiles.is_floating_point():
        return tiles.to(dtype)
    if tiles.dtype != torch.uint8:
        raise ValueError(f"pixel_values must be uint8 tiles (or normalised floats), is {tiles.dtype}")
    mean, std = _statistics(statistics, tiles.device)
    apart = tiles.to(torch.float32, memory_format=torch.contiguous_format)  # loaders keep a pixel's colours together
    return apart.div_(255.0).sub_(mean).div_(std).to(dtype)


@functools.cache
def _statistics(statistics: tuple[Colours, Colours], device: torch.device) -> tuple[Tensor, Tensor]:
    """(3, 1, 1) mean and std; kept, since copying constants to a device waits for it."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in statistics)
    return mean, std


def zero_tile(image_size: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """One tile of zeros for a row without an image, so that the vision side takes part in every step.

    ZeRO-3 gathers, and DDP and ZeRO reduce, parameters where their modules run: a rank that skipped the
    vision tower would leave the others waiting.
    """
    return torch.zeros((1, 3, *image_size), dtype=dtype, device=device)


def place_features(embeddings: Tensor, features: Tensor, positions: Tensor, some_elsewhere: bool = False) -> Tensor:
    """Embeddings with the features in the image tokens' places, in order; out of place, both differentiable.

    Args:
        embeddings: (B, N, H); features: (M, H) of any floating type; positions: (M,) of the B * N tokens.
        some_elsewhere: the embeddings are a part of a row, (1, n, H): features at position n are of other parts.
    """
    if some_elsewhere:  # they all go to one place after the part, which is cut off again
        beyond = torch.cat([embeddings, embeddings.new_zeros((1, 1, embeddings.shape[-1]))], 1)
        placed = place_features(beyond, features, positions)[:, :-1]
        return placed.clone(memory_format=torch.contiguous_format)  # no view, as below
    if len(embeddings) == 1:  # no view: a compiled first layer would differ from the others by it
        return embeddings.index_copy(1, positions, features.to(embeddings.dtype).unsqueeze(0))
    flat = embeddings.reshape(-1, embeddings.shape[-1])
    return flat.index_copy(0, positions, features.to(flat.dtype)).view_as(embeddings)


def join_without_images(embeddings: Tensor, features: Tensor) -> Tensor:
    """Embeddings, unchanged, that carry a zero gradient to everything behind `features`.

    The sum of no element is exactly 0 whatever the features hold; 0 * sum would be NaN where one of
    them overflows.
    """
    return embeddings + features.reshape(-1)[:0].sum().to(embeddings.dtype)
