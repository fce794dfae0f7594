"""Parts of a model by their place in it.

`nn.Module` says of an attribute only that it is a tensor or a module; a place that is looked up here is a module, or
fails by its name.
"""

from __future__ import annotations

from torch import nn


def vision_layers(tower: nn.Module) -> nn.ModuleList:
    """The layers of an InternVL vision tower, in order.

    Raises:
        AttributeError: another kind of model.
    """
    layers = tower.get_submodule("encoder.layer")
    assert isinstance(layers, nn.ModuleList)
    return layers


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """The layers of a language model without its head.

    Raises:
        AttributeError: its layers have another name.
    """
    layers = decoder.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return layers
