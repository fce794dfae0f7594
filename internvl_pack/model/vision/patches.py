"""The vision tower's patch embedding as a matrix product: of tiles with `--compile`, of native resolution always.

A convolution whose kernel is as large as its stride reads every pixel once: it is a linear layer over flattened
patches. cuDNN has no tensor-core kernel for 3 channels and 14 x 14 patches in bfloat16 and takes eight times as
long for it, forward and for the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..packed import PackedModel

ALIGNMENT = 8  # columns of bfloat16 that tensor cores want together: 3 * 14 * 14 = 588 becomes 592


def compile_patches(packed: PackedModel, backend: str | Callable[..., Any]) -> None:
    """Let the vision tower's patch embedding, where it can be one, be a compiled matrix product."""
    for module in packed.vision_modules[0].modules():
        if is_patch_projection(module):
            product = torch.compile(project_patches, dynamic=True, backend=backend)
            module.forward = PatchProjection(cast(nn.Conv2d, module), product)


def is_patch_projection(module: nn.Module, kind: type[nn.Conv2d | nn.Conv3d] = nn.Conv2d) -> bool:
    """Whether a module is a convolution over patches that do not overlap."""
    return (
        isinstance(module, kind)
        and tuple(module.stride) == tuple(module.kernel_size)
        and (module.padding == "valid" or not any(module.padding))
        and all(each == 1 for each in module.dilation)
        and module.groups == 1
    )


def project_patches(tiles: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What F.conv2d with a stride of the kernel's size gives.

    Args:
        tiles: (T, C, S, R), S and R multiples of the kernel's height and width; weight: (H, C, p, q); bias: (H,).

    Returns:
        (T, H, S / p, R / q).
    """
    _, channels, p, q = weight.shape
    rows, columns = tiles.shape[2] // p, tiles.shape[3] // q
    patches = (
        tiles.reshape(len(tiles), channels, rows, p, columns, q).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    )
    pad = (0, -patches.shape[-1] % ALIGNMENT)
    features = F.linear(F.pad(patches, pad), F.pad(weight.flatten(1), pad), bias)
    return features.transpose(1, 2).unflatten(2, (rows, columns))


class PatchProjection:
    """Stands in the place of a patch convolution's `forward`."""

    def __init__(self, convolution: nn.Conv2d, compiled: Callable[..., Any] = project_patches) -> None:
        self.convolution = convolution
        self.compiled = compiled

    def __call__(self, tiles: Tensor) -> Tensor:
        height, width = self.convolution.kernel_size
        if tiles.shape[2] % height or tiles.shape[3] % width:  # a convolution leaves out what is over
            return nn.Conv2d.forward(self.convolution, tiles)
        return self.compiled(tiles, self.convolution.weight, self.convolution.bias)


class WholePatches:
    """Stands in the place of a convolution's `forward` over patches (N, C, T, p, p) that its kernel covers whole."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        self.convolution = convolution

    def __call__(self, patches: Tensor) -> Tensor:
        weight = self.convolution.weight
        if patches.shape[1:] != weight.shape[1:]:
            return nn.Conv3d.forward(self.convolution, patches)
        return F.linear(patches.flatten(1), weight.flatten(1), self.convolution.bias)[..., None, None, None]


def use_patch_products(tower: nn.Module) -> None:
    """Let a tower of native resolution, which is given its patches cut, embed them by a matrix product."""
    for module in tower.modules():
        if is_patch_projection(module, nn.Conv3d):
            module.forward = WholePatches(cast(nn.Conv3d, module))
