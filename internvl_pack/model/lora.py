"""LoRA on the vision tower or the language model, and checkpoints with it merged in."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import UserError

VISION_TARGETS = ("q_proj", "k_proj", "v_proj", "projection_layer", "fc1", "fc2")
LANGUAGE_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_lora(module: nn.Module, rank: int, targets: tuple[str, ...], option: str) -> None:
    """Put LoRA of `rank` on the linear layers of `module` called `targets`; everything else in it is frozen.

    alpha is twice the rank, as in InternVL's scripts; no dropout, so that packed and unpacked training
    stay the same.

    Raises:
        UserError: peft is not installed, naming `option`.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError(f"--{option} needs peft: pip install 'internvl-pack[lora]'") from None
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=list(targets))
    inject_adapter_in_model(config, module)


def merged_state_dict(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of the model without LoRA that computes the same: W + scaling * B A, under W's name.

    Args:
        state_dict: of `model`, gathered; it is not changed.
    """
    if not any(".lora_A." in name for name in state_dict):
        return state_dict
    merged = dict(state_dict)
    for path, layer in model.named_modules():
        if not hasattr(layer, "lora_A") or not hasattr(layer, "base_layer"):
            continue
        for name in [n for n in merged if n.startswith(f"{path}.base_layer.")]:
            merged[name.replace(".base_layer.", ".")] = merged.pop(name)
        for adapter, scaling in layer.scaling.items():
            a = merged.pop(f"{path}.lora_A.{adapter}.weight")
            b = merged.pop(f"{path}.lora_B.{adapter}.weight")
            weight = merged[f"{path}.weight"]
            merged[f"{path}.weight"] = (weight.float() + scaling * (b.float() @ a.float())).to(weight.dtype)
    return merged
