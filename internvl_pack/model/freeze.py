"""What is trained: frozen parts, LoRA, and vision layers that are trained all the same."""

from __future__ import annotations

from torch import nn

from ..checkpoints.lora import LANGUAGE_TARGETS, LINEAR_TARGETS, add_lora
from ..errors import UserError
from .attention import linear_layers
from .packed import PackedModel


def freeze(
    packed: PackedModel,
    *,
    freeze_llm: bool = False,
    freeze_backbone: bool = False,
    freeze_mlp: bool = False,
    unfreeze_vit_layers: int = 0,
    use_backbone_lora: int = 0,
    use_llm_lora: int = 0,
) -> None:
    """Set requires_grad in InternVL's order, so that later options override earlier ones.

    Raises:
        UserError: nothing would be trained, or an option for a vision side the model has not.
    """
    vision_options = {"use_backbone_lora": use_backbone_lora, "unfreeze_vit_layers": unfreeze_vit_layers}
    if not packed.has_vision and (given := [name for name, value in vision_options.items() if value]):
        raise UserError(f"--{given[0]}: the model has no vision tower")
    vision, projector = packed.vision_modules or (nn.Module(), nn.Module())
    language = nn.ModuleList([packed.language_model, packed.get_output_embeddings()])
    if freeze_backbone:
        vision.requires_grad_(False)
    if freeze_llm:
        language.requires_grad_(False)
    if use_backbone_lora and packed.tower is not None:
        add_lora(vision, use_backbone_lora, packed.tower.lora_targets, "use_backbone_lora")
    if use_llm_lora:
        language.requires_grad_(False)
        targets = LANGUAGE_TARGETS + (LINEAR_TARGETS if linear_layers(packed.language_model) else ())
        add_lora(packed.language_model, use_llm_lora, targets, "use_llm_lora")
    if freeze_mlp:
        projector.requires_grad_(False)
    if unfreeze_vit_layers and packed.tower is not None:
        layers = packed.tower.layers
        if unfreeze_vit_layers >= len(layers):
            raise UserError(
                f"--unfreeze_vit_layers {unfreeze_vit_layers}: the vision tower has layers 0 to {len(layers) - 1}"
            )
        for layer in layers[unfreeze_vit_layers:]:
            layer.requires_grad_(True)
    for layer in unused_vision_layers(packed):
        layer.requires_grad_(False)
    if not any(p.requires_grad for p in packed.parameters()):
        raise UserError("nothing is left to train: leave out one of --freeze_llm, --freeze_backbone, --freeze_mlp")


def unused_vision_layers(packed: PackedModel) -> list[nn.Module]:
    """Layers after the one whose features are taken (InternVL's select_layer): no gradient ever reaches them."""
    # an index into [embeddings, after layer 1, after layer 2, ...]
    used = getattr(packed.config, "vision_feature_layer", None)
    if packed.tower is None or not isinstance(used, int):
        return []
    layers = packed.tower.layers
    return list(layers[used if used >= 0 else len(layers) + 1 + used :])
