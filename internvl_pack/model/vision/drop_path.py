"""Stochastic depth of the vision tower: in training a tile skips a layer's attention or MLP at random.

As in InternVL's own tower: layer i of n drops with probability rate * i / (n - 1), each of its two branches for each
tile by itself, and what is kept is divided by the probability of keeping it. The native layers have a place for
dropout at the end of either branch, before the layer scale; a factor that is the same for a whole tile may stand there.
"""

from __future__ import annotations

import torch
from torch import nn

from ...errors import UserError
from ..parts import vision_layers


class DropPath(nn.Module):
    """Zero whole tiles of (tiles, tokens, width) with `probability` in training; the rest is scaled up.

    Every layer has another probability. As a tensor it is an input to the compiler, which would else compile each layer
    anew, and give up after eight of them.
    """

    keep: torch.Tensor

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.register_buffer("keep", torch.tensor(1.0 - probability), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return values
        kept = torch.rand((values.shape[0],) + (1,) * (values.dim() - 1), device=values.device) < self.keep
        return values * (kept / self.keep).to(values.dtype)


def add_drop_path(vision: nn.Module, rate: float) -> None:
    """Give every layer of the tower its share of stochastic depth.

    Raises:
        UserError: the rate is no probability, or the layers have dropout of their own.
    """
    if not 0.0 <= rate < 1.0:
        raise UserError(f"--drop_path_rate {rate}: give a probability, 0 or more and below 1")
    layers = vision_layers(vision)
    for layer, probability in zip(layers, torch.linspace(0.0, rate, len(layers)).tolist(), strict=True):
        attention = layer.get_submodule("attention")
        if getattr(layer.dropout, "p", 0.0) or getattr(attention.projection_dropout, "p", 0.0):
            raise UserError(f"--drop_path_rate {rate}: the vision tower has dropout already, use 0")
        layer.dropout = DropPath(probability)
        attention.projection_dropout = DropPath(probability)
