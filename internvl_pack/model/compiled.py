"""`--compile`: the repeated blocks of both towers through torch.compile, once for all packs.

What is compiled is a block (a vision layer, a decoder layer), not the model: all layers of a tower share
one compiled graph, so it takes the time of two layers, and what is irregular about a pack stays outside:

* attention is one operation to the compiler (attention/kernels/operation.py), which gets the row's boundaries as a
  tensor and its longest segment as a symbol: neither the number of segments nor their lengths can cause a
  recompilation. A kernel without such an operation is called between two graphs;
* tokens of a row and tiles of a batch are symbols from the first compilation on. Only a row of 1 tile (or
  1 token) is another case to the compiler: it gets a tile of zeros beside it (images.py).

Layers of the vision tower that vision/fused.py knows run as it writes them out, on a GPU; the compiled ones are for all
others, and where its kernels cannot be.

The loss of the labelled tokens (loss/head.py) and the projector are compiled likewise. Gradient
checkpointing and hooks stay around the compiled forward. The patch embedding becomes a matrix product
(vision/patches.py). Merging q, k and v, and gate and up, into one product each was tried: it took 1.5 % longer.

`--compile_recompute` says in which tower's layers the compiler computes what is cheap (norms, activation
functions) again in the backward pass instead of keeping it: its "activation memory budget" just below 1, at
which neither matrix products nor attention are computed twice.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch._functorch.config
from torch import nn

from ..errors import UserError
from .experts import expert_blocks
from .loss import fusible_loss_and_gradient, loss_and_gradient
from .parts import decoder_layers
from .vision import compile_patches, fuse_tower
from .zero3 import check_zero3_compiles, is_zero3

if TYPE_CHECKING:
    from .packed import PackedModel

logger = logging.getLogger(__name__)

# Language models whose decoder layers compile without a break outside attention.
COMPILED_FAMILIES = frozenset({"qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss"})
COMPILED_FAMILIES |= {"qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text"}

# Values of --compile_recompute: the layers that keep nothing cheap for the backward pass.
RECOMPUTE = ("none", "language", "all")

# Share of the activations a layer would keep; below 1 the compiler keeps what is dear, and 0.65 of the whole.
BELOW_ALL = 0.99

# Graphs that one block may have: with gradients or without, trained or a frozen copy, with trees or without, of few
# tokens. Beyond torch's own limit of 8 a block would run uncompiled.
MAX_GRAPHS = 32


def compile_blocks(
    packed: PackedModel,
    *,
    recompute: str = "language",
    fused_vision: bool = True,
    backend: str | Callable[..., Any] = "inductor",
) -> None:
    """Compile the repeated blocks in place; names of modules and parameters stay.

    Args:
        recompute: one of RECOMPUTE.
        fused_vision: let the vision tower's layers run as vision/fused.py writes them out, where they can be.
        backend: of torch.compile, a name or a function.

    Raises:
        UserError: a model or a kind of sharding that does not go with it, or an unknown `recompute`.
    """
    check_compilable(packed)
    if recompute not in RECOMPUTE:
        raise UserError(f"--compile_recompute {recompute}: choose from {', '.join(RECOMPUTE)}")
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    blocks = repeated_blocks(packed)
    keep_less = with_memory_budget(backend, BELOW_ALL)
    decoder = {type(layer) for layer in decoder_layers(packed.language_model)}
    compiled = {}
    for kind in set(map(type, blocks)):
        keeps_less = recompute == "all" or (recompute == "language" and kind in decoder)
        compiled[kind] = torch.compile(_raw_forward(kind), dynamic=True, backend=keep_less if keeps_less else backend)
    for block in blocks:
        block.forward = CompiledForward(block, compiled[type(block)])
    has_tiles = packed.has_vision and not packed.grid_positions
    if has_tiles:
        compile_patches(packed, backend)
    if has_tiles and fused_vision and not is_zero3(packed):  # which gathers a compiled layer at a time
        problem = fuse_tower(packed, keep_gelu=recompute != "all")
        packed.fused_vision = problem is None
        logger.info("layers of the vision tower: %s", f"compiled, since {problem}" if problem else "fused")
    if packed.head.loss_kernel is loss_and_gradient:
        packed.head.loss_kernel = torch.compile(fusible_loss_and_gradient, dynamic=True, backend=backend)
    packed.is_compiled = True
    logger.info("torch.compile: %d blocks, compiled in the first steps", len(blocks))


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
        kwargs.pop("deep_features", None)  # of the hook behind it (towers/native.py); not every row has them
        for module in self.inside:
            if module._forward_hooks:
                _remove_recording_hooks(module)
        checkpoints = _checkpoints_in_forward(type(block)) and block.gradient_checkpointing and block.training
        if checkpoints and torch.is_grad_enabled():
            checkpoint = cast(Any, block)._gradient_checkpointing_func  # set by transformers
            return checkpoint(partial(self.compiled, block, **kwargs), *args)
        return self.compiled(block, *args, **kwargs)


def with_memory_budget(backend: str | Callable[..., Any], budget: float) -> Callable[..., Any]:
    """A torch.compile backend under an activation memory budget, which PyTorch has as a global setting only.

    Another one each time, so that models do not share what is compiled: it is not compared by their modules' hooks.
    """
    inner = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend

    def compile_graph(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return inner(graph, example_inputs)

    return compile_graph


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


def repeated_blocks(packed: PackedModel) -> list[nn.Module]:
    """The blocks of the vision side, the decoder layers and the norm after them."""
    blocks: list[nn.Module] = []
    if packed.tower is not None:
        blocks += packed.tower.blocks
    decoder = packed.language_model
    return [*blocks, *decoder_layers(decoder), decoder.get_submodule("norm")]


def check_compilable(packed: PackedModel) -> None:
    """Refuse by name what does not go with compilation.

    Raises:
        UserError: a family that is not known to compile, or a config of ZeRO-3 that does not go with it.
    """
    family = packed.config.get_text_config().model_type
    if family not in COMPILED_FAMILIES:
        raise UserError(
            f"--compile with a {family!r} language model: its layers do not compile as one piece (known: "
            f"{', '.join(sorted(COMPILED_FAMILIES))}); leave --compile out"
        )
    experts = packed.config.get_text_config()._experts_implementation
    if expert_blocks(packed.language_model) and experts == "eager":
        raise UserError(
            "--compile with --experts_implementation eager: a loop over experts asks the device how many tokens each "
            "has, which breaks the layer apart; use grouped_mm"
        )
    if is_zero3(packed):
        check_zero3_compiles()
