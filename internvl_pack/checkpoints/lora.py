"""LoRA on the vision tower or the language model: put in, saved alone in peft's format, merged into the weights."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError

logger = logging.getLogger(__name__)

VISION_TARGETS = ("q_proj", "k_proj", "v_proj", "projection_layer", "fc1", "fc2")
LANGUAGE_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
# Of linear attention: Qwen3.5's, Qwen3-Next's.
LINEAR_TARGETS = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj")

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's names
_PREFIX = "base_model.model."  # of names in a peft file
_NAME = "default"  # of the one adapter of each layer


def add_lora(module: nn.Module, rank: int, targets: tuple[str, ...], option: str) -> None:
    """Put LoRA of `rank` on the linear layers of `module` called `targets`; everything else in it is frozen.

    alpha is twice the rank, as in InternVL's scripts; no dropout, so that packed and unpacked training
    stay the same. A mixture's layers get none beside attention.

    Raises:
        UserError: peft is not installed, or there are no such layers; names `option`.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError(f"--{option} needs peft: pip install 'internvl-pack[lora]'") from None
    experts = any(name.endswith(".experts.gate_up_proj") for name, _ in module.named_parameters())
    if experts:  # peft would take these names for the fused experts, with another rank and another merge
        targets = tuple(name for name in targets if name not in ("gate_proj", "up_proj", "down_proj"))
        logger.warning("--%s: LoRA is on attention alone, the experts of the mixture stay as they are", option)
    paths = [p for p, m in module.named_modules() if isinstance(m, nn.Linear) and p.rpartition(".")[2] in targets]
    if not paths:
        raise UserError(f"--{option}: the model has no linear layers called {', '.join(targets)}")
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=paths)
    inject_adapter_in_model(config, module, adapter_name=_NAME)


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with LoRA, by path."""
    return {
        path: layer
        for path, layer in model.named_modules()
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer") and _NAME in layer.lora_A
    }


def has_lora(model: nn.Module) -> bool:
    return bool(lora_layers(model))


@contextlib.contextmanager
def without_lora(layers: Iterable[Any]) -> Iterator[None]:
    """These layers as they were before LoRA. Its weights are read all the same, as ZeRO-3 expects of every pass."""
    layers = list(layers)
    for layer in layers:
        layer.set_scale(_NAME, 0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(_NAME, 1)


def merged_state_dict(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the model without LoRA that computes the same: W + scaling * B A, under W's name.

    Args:
        state_dict: of `model`, gathered; it is not changed.
    """
    merged = dict(state_dict)
    for path, layer in lora_layers(model).items():
        for name in [n for n in merged if n.startswith(f"{path}.base_layer.")]:
            merged[name.replace(".base_layer.", ".")] = merged.pop(name)
        a = merged.pop(f"{path}.lora_A.{_NAME}.weight")
        b = merged.pop(f"{path}.lora_B.{_NAME}.weight")
        weight = merged[f"{path}.weight"]
        update = layer.scaling[_NAME] * (b.float() @ a.float())
        merged[f"{path}.weight"] = (weight.float() + update).to(weight.dtype)
    return merged


# --- adapters alone -------------------------------------------------------------------------------


def peft_config(model: nn.Module, base: str | None) -> Any:
    """The `LoraConfig` with which peft loads what `save_adapter` writes.

    Raises:
        UserError: weights are trained that peft's format has no place for.
    """
    from peft import LoraConfig

    ranks = {path: layer.r[_NAME] for path, layer in lora_layers(model).items()}
    rank = max(ranks.values())
    others = {path: r for path, r in ranks.items() if r != rank}
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules=sorted(ranks),
        rank_pattern={re.escape(path): r for path, r in others.items()},
        alpha_pattern={re.escape(path): 2 * r for path, r in others.items()},
        modules_to_save=_trained_modules(model, set(ranks)) or None,
        base_model_name_or_path=base,
        inference_mode=True,
    )


def _trained_modules(model: nn.Module, with_lora: set[str]) -> list[str]:
    """Modules that are trained as a whole."""
    trained = []
    native = [name for name, _ in model.named_modules() if re.fullmatch(r"model\.visual\.\w+", name)]
    parts = ("model.vision_tower", "model.multi_modal_projector", *native, "model.language_model", "model", "lm_head")
    for path in parts:
        try:
            parameters = dict(model.get_submodule(path).named_parameters(path))
        except AttributeError:
            continue
        if path == "model" and any(name.startswith("model.language_model.") for name in parameters):
            continue  # its parts were looked at
        flags = {p.requires_grad for name, p in parameters.items() if ".lora_" not in name}
        if any(lora.startswith(f"{path}.") for lora in with_lora):
            if True in flags:
                raise UserError(
                    f"--merge_lora False: weights of {path} are trained besides its LoRA, which peft's format cannot "
                    "express: merge it, or leave out --unfreeze_vit_layers"
                )
        elif flags == {True, False}:
            raise UserError(
                f"--merge_lora False: {path} is trained in parts, which peft's format cannot express: merge it"
            )
        elif flags == {True}:
            trained.append(path)
    return trained


def save_adapter(model: nn.Module, state_dict: dict[str, Tensor], folder: str | Path, base: str | None) -> None:
    """Write what is trained: LoRA, and other weights that are not frozen, as peft would.

    Args:
        state_dict: of `model`, gathered.
        base: the checkpoint that the frozen weights are of.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {peft: state_dict[name].detach().cpu().contiguous() for peft, (name, _) in _trained(model).items()}
    save_file(state, folder / ADAPTER_FILE, metadata={"format": "pt", "frozen": _frozen_digest(model, state_dict)})
    try:
        peft_config(model, base).save_pretrained(folder)
    except UserError:  # for going on from here, and not for peft
        (folder / ADAPTER_CONFIG).unlink(missing_ok=True)


def load_adapter(model: nn.Module, folder: str | Path) -> None:
    """Take what `save_adapter` wrote.

    Raises:
        UserError: other weights were trained then, or on others that are frozen.
    """
    from safetensors import safe_open

    path = Path(folder, ADAPTER_FILE)
    if not path.is_file():
        raise UserError(f"{folder}: no {ADAPTER_FILE} there: LoRA was not trained in this checkpoint")
    with safe_open(path, framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        digest = (file.metadata() or {}).get("frozen")
    trained = {name: parameter for name, (_, parameter) in _trained(model).items()}
    odd = sorted(saved.keys() ^ trained.keys())
    odd += sorted(name for name in saved.keys() & trained.keys() if saved[name].shape != trained[name].shape)
    if odd:
        raise UserError(
            f"{path}: was trained with other options (--use_llm_lora, --use_backbone_lora, --freeze_*): "
            f"{odd[0].removeprefix(_PREFIX)} and {len(odd) - 1} more differ"
        )
    if digest is not None and digest != _frozen_digest(model, model.state_dict()):
        raise UserError(f"{path}: was trained on other frozen weights: give the --model_name_or_path of that run")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(saved[name])


def _trained(model: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
    """(own name, parameter) of what is trained, by its name in a peft file."""
    return {
        _PREFIX + name.replace(f".{_NAME}.", "."): (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _frozen_digest(model: nn.Module, state_dict: dict[str, Tensor]) -> str:
    """Of the first values of each frozen weight, which distinguishes checkpoints without reading all of them."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            values = state_dict[name].reshape(-1)[:64].detach().float().cpu()
            digest.update(name.encode() + values.numpy().tobytes())
    return digest.hexdigest()
