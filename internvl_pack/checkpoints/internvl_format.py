"""Checkpoints in InternVL's own format (`InternVLChatModel`): their config and names, and the native model's.

The native `InternVLForConditionalGeneration` computes the same with other names, and with q, k and v apart:

    InternVLChatModel                              native, as published under names ending in -hf
    vision_model.encoder.layers.0.attn.qkv         vision_tower.encoder.layer.0.attention.{q,k,v}_proj
    mlp1.0, mlp1.1, mlp1.3                         multi_modal_projector.layer_norm, linear_1, linear_2
    language_model.model.layers.0...               the same (Qwen2, Qwen3, Qwen3-MoE, Llama)
    language_model.model.layers.0.attention.wqkv   language_model.model.layers.0.self_attn.{q,k,v}_proj (InternLM2,
                                                   which is a Llama: only q, k and v are stored in groups)

Only views and names here, no files (internvl_format_files.py) and no code of a checkpoint's folder. What the native
model cannot compute is refused by name. The facts are those of InternVL's published modeling files.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UserError

MODEL_TYPE = "internvl_chat"
ARCHITECTURE = "InternVLChatModel"
VISION_TYPE = "intern_vit_6b"  # model_type of InternVisionModel, the 300M tower's too
PROVENANCE = "internvl_chat"  # attribute of a native config: what its config in InternVL's format said

# Language models of InternVLChatModel (`llm_config.architectures`) and the native family of each.
FAMILIES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "InternLM2ForCausalLM": "llama",
}
# Language models of published InternVLs that are refused, and why.
REFUSED = {
    "InternLM3ForCausalLM": "InternLM3 (InternVL3-9B) has its tokenizer as code of the checkpoint's folder only, which "
    "is not run",
    "Phi3ForCausalLM": "Phi-3 (InternVL2-4B, Mini-InternVL-4B) chooses its rotary factors by the longest sample of a "
    "row, so that a sample's result would depend on its neighbours",
}
FLASH = ("gating.", "mlp2.")  # the router and the second projector of InternVL3.5-Flash
INTERNLM2_ROPE = frozenset({"dynamic", "linear"})
VISION_RMS_EPS = 1e-6  # of the native tower's q and k norms, which do not read the config


# --- configs --------------------------------------------------------------------------------------


def is_internvl_format(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is InternVLChatModel's."""
    return config.get("model_type") == MODEL_TYPE or ARCHITECTURE in (config.get("architectures") or ())


def check_internvl_format(content: Mapping[str, Any]) -> None:
    """Refuse by its config.json alone a model that the native one cannot compute, before its weights are fetched.

    Raises:
        UserError: naming the kind of model, or the key of config.json.
    """
    _refuse_what_differs(content)
    _llm_architecture(content["llm_config"])


def check_names(names: Iterable[str]) -> None:
    """Refuse by the names of its weights a model that its config.json does not name.

    Raises:
        UserError: an InternVL3.5-Flash.
    """
    if any(name.startswith(FLASH) for name in names):
        raise UserError(
            "a Flash model of InternVL3.5: it chooses between 256 and 64 tokens for each tile (weights gating and "
            "mlp2), which is not done here; take the model of the same size without -Flash"
        )


def native_config(content: Mapping[str, Any], image_token_id: int) -> Any:
    """The `InternVLConfig` of the same model; it carries this one under `internvl_chat`, to be written again.

    Raises:
        UserError: what the native model cannot compute, naming the key of config.json.
    """
    from transformers import InternVLConfig

    _refuse_what_differs(content)
    content = copy.deepcopy(dict(content))  # transformers' configs write into what they are given
    stored = json.dumps(content)
    vision, text = _native_vision(content["vision_config"]), _native_text(content["llm_config"])
    ratio = float(content.get("downsample_ratio", 0.5))
    try:
        config = InternVLConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=image_token_id,
            image_seq_length=int((vision["image_size"] // vision["patch_size"]) ** 2 * ratio**2),
            downsample_ratio=ratio,
            vision_feature_layer=content.get("select_layer", -1),
            tie_word_embeddings=text.tie_word_embeddings,
            architectures=["InternVLForConditionalGeneration"],
        )
    except Exception as error:  # validators of configs have exceptions of their own
        raise UserError(f"config.json: {' '.join(str(error).split())}") from error
    # As text: transformers rewrites dictionaries within a config when it saves and loads.
    setattr(config, PROVENANCE, {"config": stored})
    return config


def _refuse_what_differs(content: Mapping[str, Any]) -> None:
    if ARCHITECTURE not in (content.get("architectures") or (ARCHITECTURE,)):
        raise UserError(f"config.json: architectures is {content['architectures']}, not {ARCHITECTURE}")
    for part in ("vision_config", "llm_config"):
        if not isinstance(content.get(part), Mapping):
            raise UserError(f"config.json: {part} is missing")
    for option in ("use_llm_lora", "use_backbone_lora"):
        if content.get(option):
            raise UserError(
                f"config.json: {option} is {content[option]}: merge LoRA with InternVL's merge_lora.py first"
            )
    if content.get("pad2square"):
        raise UserError("config.json: pad2square is true: the tiles of a squared image are not made here")
    if content.get("quantization_config"):
        raise UserError("config.json: quantization_config: quantised weights cannot be trained, use the 16-bit ones")
    if (version := content.get("ps_version", "v1")) != "v2":  # v1 is InternVL's default for configs that do not say
        raise UserError(f"config.json: ps_version is {version!r}: the native model pixel-shuffles as v2 does")
    vision, llm = content["vision_config"], content["llm_config"]
    positions = content.get("rope_pos_id_version") or llm.get("rope_pos_id_version") or "default"
    if positions != "default":  # V2PE: the tokens of an image share less than a position each
        raise UserError(f"config.json: rope_pos_id_version is {positions!r}: positions here count every token")
    size, forced = vision.get("image_size", 224), content.get("force_image_size")
    if forced is not None and forced != size:
        raise UserError(
            f"config.json: force_image_size is {forced} and vision_config.image_size {size}: the native model does not "
            "resize its position embeddings while it loads, save them resized first"
        )
    _refuse_vision(vision)


def _refuse_vision(vision: Mapping[str, Any]) -> None:
    if (kind := vision.get("model_type", VISION_TYPE)) != VISION_TYPE:
        raise UserError(f"config.json: vision_config.model_type is {kind!r}, only {VISION_TYPE} is known")
    if vision.get("use_moe"):
        raise UserError("config.json: vision_config.use_moe is true: a vision tower of experts is not computed here")
    if vision.get("norm_type", "rms_norm") not in ("rms_norm", "layer_norm"):
        raise UserError(f"config.json: vision_config.norm_type is {vision['norm_type']!r}, not rms_norm or layer_norm")
    if vision.get("qk_normalization", True) and vision.get("layer_norm_eps", 1e-6) != VISION_RMS_EPS:
        raise UserError(
            f"config.json: vision_config.layer_norm_eps is {vision['layer_norm_eps']} with qk_normalization: "
            f"the native tower normalises q and k with {VISION_RMS_EPS}"
        )


def native_vision_config(vision: Mapping[str, Any]) -> Any:
    """The `InternVLVisionConfig` of an InternVisionModel's config.

    Raises:
        UserError: as `native_config`.
    """
    from transformers import InternVLVisionConfig

    _refuse_vision(vision)
    try:
        return InternVLVisionConfig(**_native_vision(vision))
    except Exception as error:  # validators of configs have exceptions of their own
        raise UserError(f"config.json: {' '.join(str(error).split())}") from error


# Settings of the vision tower: (InternVisionConfig's name, InternVLVisionConfig's, InternVisionConfig's default, which
# is that of the 6B tower).
_VISION_SETTINGS = (
    ("hidden_size", "hidden_size", 3200),
    ("intermediate_size", "intermediate_size", 12800),
    ("num_hidden_layers", "num_hidden_layers", 48),
    ("num_attention_heads", "num_attention_heads", 25),
    ("num_channels", "num_channels", 3),
    ("image_size", "image_size", 224),
    ("patch_size", "patch_size", 14),
    ("qkv_bias", "attention_bias", False),
    ("qk_normalization", "use_qk_norm", True),
    ("norm_type", "norm_type", "rms_norm"),
    ("layer_norm_eps", "layer_norm_eps", 1e-6),
    ("hidden_act", "hidden_act", "gelu"),
    ("dropout", "projection_dropout", 0.0),
    ("attention_dropout", "attention_dropout", 0.0),
    ("initializer_range", "initializer_range", 0.02),
    ("initializer_factor", "layer_scale_init_value", 0.1),
)


def _native_vision(vision: Mapping[str, Any]) -> dict[str, Any]:
    return {native: vision.get(name, default) for name, native, default in _VISION_SETTINGS}


def _llm_architecture(llm: Mapping[str, Any]) -> str:
    architecture = next(iter(llm.get("architectures") or ()), None)
    if architecture in REFUSED:
        raise UserError(f"config.json: llm_config.architectures is {architecture!r}: {REFUSED[architecture]}")
    if architecture not in FAMILIES:
        raise UserError(
            f"config.json: llm_config.architectures is {architecture!r}: known are {', '.join(sorted(FAMILIES))}"
        )
    return architecture


def _native_text(llm: Mapping[str, Any]) -> Any:
    """The native text config. Only what its class knows is taken: older configs list all of transformers' defaults."""
    from transformers import AutoConfig

    architecture = _llm_architecture(llm)
    family = FAMILIES[architecture]
    settings = {k: v for k, v in llm.items() if k in _settings_of(family)}
    if architecture == "InternLM2ForCausalLM":
        scaling = llm.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type"))
        if scaling and kind not in INTERNLM2_ROPE:
            raise UserError(
                f"config.json: llm_config.rope_scaling is of type {kind!r}, InternLM2's are dynamic and linear"
            )
        settings |= {"attention_bias": bool(llm.get("bias", True)), "mlp_bias": False}
        settings.setdefault("rope_theta", 10000.0)
    try:
        return AutoConfig.for_model(family, **settings)
    except Exception as error:  # validators of configs have exceptions of their own
        raise UserError(f"config.json: llm_config: {' '.join(str(error).split())}") from error


def _settings_of(family: str) -> set[str]:
    """Names that a family's config knows by itself, without what every config has."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])}
    own -= {field.name for field in dataclasses.fields(PreTrainedConfig)} | {"layer_types", "rope_parameters"}
    own |= {"rope_theta", "rope_scaling", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"}
    own.add("head_dim")  # read by all families, declared by some
    return own | {"qwen3_moe": {"num_experts"}, "gpt_oss": {"layer_types"}}.get(family, set())


def internvl_config(config: Any, dtype: torch.dtype | None = None, **changes: Any) -> dict[str, Any]:
    """The config.json of InternVLChatModel: as it was loaded, or made from the native config.

    Args:
        config: an InternVLConfig.
        dtype: of the weights that go with it.
        changes: keys that are set, such as the template and the tiles that the model was trained with.

    Raises:
        UserError: the native model has no InternVLChatModel that computes the same.
    """
    content = loaded_from(config) or _made_from_native(config)
    if dtype is not None:
        content["torch_dtype"] = str(dtype).removeprefix("torch.")
    return content | changes


def template_of(config: Mapping[str, Any]) -> str | None:
    """The chat template of a config.json in InternVL's format, or of a native one made from that, if it names one."""
    if PROVENANCE in config:
        config = json.loads(config[PROVENANCE]["config"])
    return config.get("template") if is_internvl_format(config) else None


def remember(config: Any, **changes: Any) -> None:
    """Change keys of the config in InternVL's format that a native config carries.

    Raises:
        UserError: as `internvl_config`.
    """
    known = getattr(config, PROVENANCE, None) or {}
    setattr(config, PROVENANCE, known | {"config": json.dumps(internvl_config(config, **changes))})


def _made_from_native(config: Any) -> dict[str, Any]:
    text, vision = config.get_text_config(), config.vision_config
    architecture = next((a for a, family in FAMILIES.items() if family == text.model_type), None)
    if architecture is None:
        raise UserError(f"a language model of type {text.model_type!r} is none of {ARCHITECTURE}'s")
    if len(set(vision.image_size)) > 1 or len(set(vision.patch_size)) > 1 or not vision.use_mean_pooling:
        raise UserError(f"{ARCHITECTURE}'s vision tower has square tiles and patches and no last normalisation")
    if not isinstance(config.vision_feature_layer, int) or config.vision_feature_select_strategy != "default":
        raise UserError(f"{ARCHITECTURE} takes one vision layer without its class token")
    llm: dict[str, Any] = {"architectures": [architecture], "model_type": text.model_type}
    for name in sorted(_settings_of(text.model_type) - {"rope_theta", "rope_scaling"}):
        if hasattr(text, name):
            llm[name] = getattr(text, name)
    rope = dict(text.rope_parameters or {})
    llm["rope_theta"] = rope.pop("rope_theta", 10000.0)
    llm["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    size = vision.image_size[0]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "downsample_ratio": config.downsample_ratio,
        "dynamic_image_size": True,
        "force_image_size": size,
        "llm_config": llm,
        "max_dynamic_patch": 12,
        "min_dynamic_patch": 1,
        "ps_version": "v2",
        "select_layer": config.vision_feature_layer,
        "template": "internvl2_5",
        "tie_word_embeddings": bool(text.tie_word_embeddings),
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": True,
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "model_type": VISION_TYPE,
            **{name: getattr(vision, native) for name, native, _ in _VISION_SETTINGS},
            "image_size": size,
            "patch_size": vision.patch_size[0],
            "drop_path_rate": 0.0,
            "use_flash_attn": True,
        },
    }


def is_internlm2(config: Any) -> bool:
    """Whether a native config came from, and goes back to, a checkpoint with InternLM2."""
    known = loaded_from(config)
    return known is not None and _llm_architecture(known["llm_config"]) == "InternLM2ForCausalLM"


def loaded_from(config: Any) -> dict[str, Any] | None:
    """The config in InternVL's format that a native one was made from, if it was."""
    known = getattr(config, PROVENANCE, None)
    return json.loads(known["config"]) if known else None


# --- names of the native model --------------------------------------------------------------------

_RUNTIME = (
    ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)


def published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A native state dict under the names of published files: views, with the experts of Qwen3-MoE one by one.

    GPT-OSS's, which have biases, are published as they are.
    """
    out = {}
    for stored, tensor in state.items():
        prefix, new = next(((p, n) for p, n in _RUNTIME if stored.startswith(p)), ("", ""))
        name = new + stored.removeprefix(prefix)
        path, dot, kind = name.rpartition(".experts.")
        if not dot or kind not in ("gate_up_proj", "down_proj") or f"{stored}_bias" in state:
            out[name] = tensor
            continue
        for expert, weight in enumerate(tensor):  # gate_up_proj (experts, 2 x inner, hidden)
            names = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
            pieces = dict(zip(names, weight.chunk(len(names)), strict=True))
            out |= {f"{path}.experts.{expert}.{piece}.weight": value for piece, value in pieces.items()}
    return out


# --- from one to the other ------------------------------------------------------------------------

_VISION = (
    ("embeddings.cls_token", "embeddings.class_embedding"),
    ("embeddings.patch_embeddings.projection.", "embeddings.patch_embedding."),
    ("embeddings.position_embeddings", "embeddings.position_embedding"),
    ("encoder.layer.", "encoder.layers."),
    (".attention.projection_layer.", ".attn.proj."),
    (".attention.", ".attn."),
    (".lambda_1", ".ls1"),
    (".lambda_2", ".ls2"),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
)
_PROJECTOR = (("layer_norm.", "mlp1.0."), ("linear_1.", "mlp1.1."), ("linear_2.", "mlp1.3."))
_INTERNLM2 = (
    ("language_model.lm_head.", "language_model.output."),
    (".embed_tokens.", ".tok_embeddings."),
    (".self_attn.o_proj.", ".attention.wo."),
    (".self_attn.", ".attention."),
    (".mlp.gate_proj.", ".feed_forward.w1."),
    (".mlp.down_proj.", ".feed_forward.w2."),
    (".mlp.up_proj.", ".feed_forward.w3."),
    (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
)
_PARTS = ("q_proj", "k_proj", "v_proj")


class Groups(NamedTuple):
    """How a fused projection lies in memory: `blocks` of `queries` heads of q, one of k and one of v.

    With one block that is q, k, v one after the other (heads of each counted as one).
    """

    blocks: int
    queries: int

    def split(self, fused: Tensor) -> tuple[Tensor, ...]:
        """(rows, ...) into q, k and v; views where there is one block."""
        blocks = fused.unflatten(0, (self.blocks, self.queries + 2, -1))
        return tuple(part.flatten(0, 2) for part in (blocks[:, : self.queries], blocks[:, -2:-1], blocks[:, -1:]))

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        heads = (self.queries, 1, 1)
        blocks = [part.unflatten(0, (self.blocks, n, -1)) for part, n in zip(parts, heads, strict=True)]
        return torch.cat(blocks, dim=1).flatten(0, 2)


_VISION_QKV = Groups(1, 1)


class Weight(NamedTuple):
    """One tensor of a checkpoint in InternVL's format: the native tensors it holds, and how."""

    native: tuple[str, ...]
    groups: Groups | None

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        parts = (tensor,) if self.groups is None else self.groups.split(tensor)
        return dict(zip(self.native, parts, strict=True))

    def join(self, state: Mapping[str, Tensor]) -> Tensor:
        parts = [state[name] for name in self.native]
        return parts[0] if self.groups is None else self.groups.join(parts)


def weights(names: Iterable[str], config: Any = None) -> dict[str, Weight]:
    """What a checkpoint in InternVL's format holds, by its own names.

    Args:
        names: all published native names of the model.
        config: its native config; not needed for a vision tower alone.
    """
    internlm2 = config is not None and is_internlm2(config)
    if internlm2:
        text = config.get_text_config()
        wqkv = Groups(text.num_key_value_heads, text.num_attention_heads // text.num_key_value_heads)
    out: dict[str, Weight] = {}
    for name in names:
        part, _, rest = name.partition(".")
        groups = None
        if part == "vision_tower":
            stored, groups = f"vision_model.{_replaced(rest, _VISION)}", _VISION_QKV
            fused = "qkv"
        elif part == "multi_modal_projector":
            stored, fused = _replaced(rest, _PROJECTOR), ""
        else:
            stored, groups = (_replaced(name, _INTERNLM2), wqkv) if internlm2 else (name, None)
            fused = "wqkv"
        piece = next((p for p in _PARTS if f".{p}." in stored), None)
        if groups is None or piece is None:
            out[stored] = Weight((name,), None)
            continue
        native = tuple(name.replace(piece, p) for p in _PARTS)
        out[stored.replace(piece, fused)] = Weight(native, groups)
    return out


def _replaced(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    for native, stored in pairs:
        name = name.replace(native, stored)
    return name
