"""DeepSpeed ZeRO-3 by layers: a whole layer's weights come and go at once.

ZeRO-3 keeps a part of each weight on each rank and gathers it where a module needs it, by default a matrix at a time:
seven times in a decoder layer. Here each repeated block (a vision layer, a decoder layer, the projector, the norm after
the decoder) is a "leaf" to it: gathered and released as one, and its gradients reduced as one. That is also what lets
these blocks be compiled: no hook of DeepSpeed's runs within them.

DeepSpeed reduces a leaf's gradients when the gradient of its input is there, and takes a leaf whose input needs none
for finished before its own gradients are made. So the input of each trained leaf is made to need one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import UserError


def zero3_is_on() -> bool:
    """Whether the run's DeepSpeed config is one of ZeRO-3."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    return is_deepspeed_zero3_enabled()


def is_zero3(model: nn.Module) -> bool:
    """Whether DeepSpeed ZeRO-3 has partitioned the model's weights, or will."""
    return any(hasattr(p, "ds_id") for p in model.parameters()) or zero3_is_on()


def save_as_loaded(model: nn.Module) -> None:
    """Let the model be saved under the names of the checkpoint it was loaded from.

    transformers undoes on saving what it renamed on loading. With ZeRO-3 it also undoes what it had tried and no name
    matched, and writes `language_model.model.model.layers...`.
    """
    tried = getattr(model, "_weight_conversions", None)
    if tried is not None:
        loaded: Any = model
        loaded._weight_conversions = [conversion for conversion in tried if conversion.was_used()]


def gather_by_layers(blocks: list[nn.Module]) -> None:
    """Declare these blocks leaves to DeepSpeed, before it wraps the model.

    Args:
        blocks: that run as one; none within another.
    """
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

    for block in blocks:
        set_z3_leaf_module(block, True)
        if any(p.requires_grad for p in block.parameters()):
            block.register_forward_pre_hook(_need_gradient)


def _need_gradient(block: nn.Module, inputs: tuple[Any, ...]) -> None:
    states = inputs[0]
    if torch.is_grad_enabled() and not states.requires_grad:
        states.requires_grad_()


def check_zero3_compiles() -> None:
    """Linear layers that DeepSpeed has replaced are compiled anew for each weight.

    Raises:
        UserError: the DeepSpeed config has `memory_efficient_linear` on, its default.
    """
    from transformers.integrations.deepspeed import deepspeed_config

    config = deepspeed_config()
    if config is not None and config.get("zero_optimization", {}).get("memory_efficient_linear", True):
        raise UserError(
            "--compile with ZeRO-3: set zero_optimization.memory_efficient_linear to false in the DeepSpeed config, as "
            "zero_stage3 has it: DeepSpeed's linear layers are compiled anew for each weight"
        )
