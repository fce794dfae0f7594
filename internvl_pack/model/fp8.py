"""`--fp8`: the matrix products of the decoder layers in 8-bit floating point, by torchao.

Three products belong to a linear layer: its output, the gradient of its input and the gradient of its weight. With
`rowwise` both factors of each are rounded to e4m3 just before it, with a scale for each row of the one and each column
of the other; sums are bfloat16's. With `rowwise_with_gw_hp` the gradient of the weight stays in bfloat16, and for that
of the input the weight has one scale. Either way a token's output and gradient depend on its own scale and the weight's
alone, so samples of a pack stay apart. One scale for all tokens would couple them: an outlier in one sample would round
its neighbours. It is not offered.

The weights stay what they are: optimizer, ZeRO and checkpoints see ordinary parameters under their names. The head, the
vision tower, the projector and LoRA's own matrices are left alone.

The gradient of a weight is a product over the tokens of a row, whose number the hardware wants as a multiple of 16:
fill_row.py adds what is missing.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UserError
from .attention import linear_layers, run_device
from .experts import expert_blocks
from .parts import decoder_layers

if TYPE_CHECKING:
    from .packed import PackedModel

logger = logging.getLogger(__name__)

RECIPES = ("rowwise", "rowwise_with_gw_hp")  # torchao's names

MULTIPLE = 16  # of both sizes of a weight, and of the tokens of a row
CAPABILITY = (8, 9)  # of the first GPUs with products in 8 bit
WORTHWHILE_WIDTH = 2048  # of the language model; below, casts take longer than products save


def check_fp8(recipe: str, device: torch.device | str | None, compute_dtype: torch.dtype) -> None:
    """Refuse what cannot be run so, before a model is loaded.

    Args:
        device: where it will train, see `run_device`. On a CPU products are emulated in float32.
        compute_dtype: of the other products in training.

    Raises:
        UserError: an unknown recipe, no torchao, or a GPU or precision that does not go with it.
    """
    if recipe not in RECIPES:
        raise UserError(f"--fp8 {recipe} is unknown: use {' or '.join(RECIPES)}, or leave it out")
    _torchao()
    device = run_device(device)
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        raise UserError(
            f"--fp8 {recipe} needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or later (Ada, Hopper, "
            f"Blackwell), {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: leave it out"
        )
    if compute_dtype != torch.bfloat16:
        raise UserError(f"--fp8 {recipe} goes with bfloat16, this run is in {compute_dtype}: set --bf16 True")


def use_fp8(packed: PackedModel, recipe: str, device: torch.device | str | None = None) -> None:
    """Let the linear layers of the decoder multiply in fp8, in place; before they are compiled, after LoRA is put in.

    Args:
        recipe: one of RECIPES.
        device: as of check_fp8.

    Raises:
        UserError: a mixture of experts, linear attention, or no layer that can be taken.
    """
    if expert_blocks(packed.language_model):
        raise UserError(
            f"--fp8 {recipe} with a {packed.config.get_text_config().model_type!r} language model: experts are no "
            "linear layers, and most of its operations; leave it out"
        )
    if linear_layers(packed.language_model):
        raise UserError(
            f"--fp8 {recipe} with a {packed.config.get_text_config().model_type!r} language model: its linear layers "
            "run over segments of any length, not over filled rows; leave it out"
        )
    layers = decoder_layers(packed.language_model)
    suitable = [name for name, module in layers.named_modules() if _is_suitable(module, name)]
    if not suitable:
        raise UserError(
            f"--fp8 {recipe}: no linear layer of the decoder has both sizes a multiple of {MULTIPLE}; leave it out"
        )
    emulated = run_device(device).type != "cuda"
    float8 = _torchao()
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulated)
    float8.convert_to_float8_training(layers, config=config, module_filter_fn=_is_suitable)
    packed.fp8 = recipe
    logger.info("fp8 (%s): %d linear layers of the decoder", recipe, len(suitable))


def why_slower(packed: PackedModel, device: torch.device | str | None = None) -> str | None:
    """A line where fp8 is no faster than bfloat16, else None; of the model as it will train."""
    width = packed.config.get_text_config().hidden_size
    if run_device(device).type != "cuda":
        return f"--fp8 {packed.fp8}: on a CPU products are emulated, for trying it out; they are slower than without"
    if width < WORTHWHILE_WIDTH:
        return (
            f"--fp8 {packed.fp8} does not pay for a language model of width {width}: below {WORTHWHILE_WIDTH} rounding "
            "takes longer than products save; leave it out"
        )
    if not packed.is_compiled:
        return f"--fp8 {packed.fp8} without --compile: rounding takes longer than products save; set --compile True"
    return None


def _is_suitable(module: nn.Module, name: str) -> bool:
    """Whether it is a layer of the model itself, not of LoRA, of sizes that the hardware multiplies."""
    if not isinstance(module, nn.Linear) or ".lora_" in name:
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


def _torchao() -> Any:
    try:
        from torchao import float8
    except ImportError:
        raise UserError("--fp8 needs torchao: pip install 'internvl-pack[fp8]'") from None
    return float8
