"""`--compile`: the repeated blocks of both towers through torch.compile, once for all packs.

What is compiled is a block (a vision layer, a decoder layer), not the model: all layers of a tower share
one compiled graph, so it takes the time of two layers, and what is irregular about a pack stays outside:

* attention is one operation to the compiler (attention_op.py), which gets the row's boundaries as a tensor
  and its longest segment as a symbol: neither the number of segments nor their lengths can cause a
  recompilation. A kernel without such an operation is called between two graphs;
* tokens of a row and tiles of a batch are symbols from the first compilation on. Only a row of 1 tile (or
  1 token) is another case to the compiler: it gets a tile of zeros beside it (images.py).

The loss of the labelled tokens (head.py) and the projector are compiled in the same way. Gradient
checkpointing and hooks stay around the compiled forward.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UserError
from .head import fusible_loss_and_gradient

if TYPE_CHECKING:
    from .packed import PackedModel

logger = logging.getLogger(__name__)

#: Language models whose decoder layers compile without a break outside attention.
COMPILED_FAMILIES = frozenset({"qwen2", "qwen3", "llama"})


def compile_blocks(packed: PackedModel, **options: Any) -> int:
    """Compile the repeated blocks in place; names of modules and parameters stay.

    Args:
        options: for torch.compile, such as `backend` or `mode`.

    Returns:
        how many modules are compiled.

    Raises:
        UserError: a model or a way of sharding that does not go with it.
    """
    check_compilable(packed)
    blocks = compiled_modules(packed)
    compiled = {kind: torch.compile(_raw_forward(kind), dynamic=True, **options) for kind in set(map(type, blocks))}
    for block in blocks:
        block.forward = CompiledForward(block, compiled[type(block)])
    packed.head.loss_kernel = torch.compile(fusible_loss_and_gradient, dynamic=True, **options)
    packed.is_compiled = True
    logger.info("torch.compile: %d blocks, compiled in the first steps", len(blocks))
    return len(blocks)


class CompiledForward:
    """Stands in the place of one block's `forward`.

    transformers checkpoints a layer around `forward` in some versions and inside it in others; here it is
    always around, so that a compiled graph is what is computed again. It also hangs hooks into the layers
    that record attention weights when they are asked for. No kernel here makes such weights, and each hook
    would break the graph in two: they are taken off inside the block.
    """

    def __init__(self, block: nn.Module, compiled: Callable[..., Any]) -> None:
        self.block = block
        self.compiled = compiled
        self.inside = [module for module in block.modules() if module is not block]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        for module in self.inside:
            if module._forward_hooks:
                _remove_recording_hooks(module)
        checkpoints = _checkpoints_in_forward(type(block)) and block.gradient_checkpointing and block.training
        if checkpoints and torch.is_grad_enabled():
            return block._gradient_checkpointing_func(partial(self.compiled, block, **kwargs), *args)
        return self.compiled(block, *args, **kwargs)


def _remove_recording_hooks(module: nn.Module) -> None:
    for key, hook in list(module._forward_hooks.items()):
        if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
            del module._forward_hooks[key]


def _checkpoints_in_forward(kind: type[nn.Module]) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return issubclass(kind, GradientCheckpointingLayer) and "__call__" not in vars(GradientCheckpointingLayer)


def _raw_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """The layer's own forward, without transformers' wrapper that checkpoints it."""
    return inspect.unwrap(kind.forward) if _checkpoints_in_forward(kind) else kind.forward


def compiled_modules(packed: PackedModel) -> list[nn.Module]:
    """The layers of the vision tower, the projector, the decoder layers and the norm after them."""
    blocks: list[nn.Module] = []
    if packed.has_vision:
        tower, projector = packed.vision_modules
        blocks += [*tower.encoder.layer, projector]
    return [*blocks, *packed.language_model.layers, packed.language_model.norm]


def check_compilable(packed: PackedModel) -> None:
    """Refuse by name what does not go with compilation.

    Raises:
        UserError: ZeRO-3, a family that is not known to compile, or no compiler for the device.
    """
    family = packed.config.get_text_config().model_type
    if family not in COMPILED_FAMILIES:
        raise UserError(
            f"--compile with a {family!r} language model: its layers do not compile as one piece (known: "
            f"{', '.join(sorted(COMPILED_FAMILIES))}); leave --compile out"
        )
    if is_zero3(packed):
        raise UserError(
            "--compile with ZeRO-3: its parameters come and go inside the compiled layers; use --deepspeed zero_stage1 "
            "or zero_stage2, or leave --compile out"
        )


def is_zero3(model: nn.Module) -> bool:
    """Whether DeepSpeed ZeRO-3 has partitioned the model's weights, or will."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    return any(hasattr(p, "ds_id") for p in model.parameters()) or is_deepspeed_zero3_enabled()
