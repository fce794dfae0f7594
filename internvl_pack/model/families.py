"""Which language models may be packed: known ones, ones refused by name, and the rest on proof.

A pack keeps its segments apart in attention, and in the linear attention of LINEAR. Another layer that carries a
state along the row (Mamba, a convolution over time) passes one sample's state to the next, and a multi-token
prediction head looks past the end of a segment: both are refused before training. A family that is
neither known nor refused runs only if the isolation self-check passes (selfcheck.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from .towers import TOWERS, find_tower

KNOWN = frozenset({"qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss"})
# Families whose linear layers attention/linear.py keeps apart. transformers leaves out their checkpoints' heads for
# several tokens, of which their configs speak.
LINEAR = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
KNOWN |= LINEAR | {"qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text"}

# fmt: off
STATEFUL = frozenset({
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "plamo2", "recurrent_gemma",
    "rwkv", "xlstm", "zamba", "zamba2",
})
# Families of transformers 5.24 that compute attention themselves: there is nothing to put packed attention into.
OWN_ATTENTION = frozenset({
    "big_bird", "bloom", "cpmant", "falcon", "gpt_neo", "gpt_neox_japanese", "mpt", "openai-gpt", "reformer",
    "rembert", "roformer", "xglm", "xlm", "xlnet",
})
# fmt: on
# Families whose image tokens see those after them: kept apart in a pack, they would still be computed otherwise.
BIDIRECTIONAL = frozenset({"gemma3", "gemma3n", "gemma4", "paligemma", "molmo2", "deepseek_ocr2", "pi0"})
INTERNVL_KINDS = frozenset({"internvl", "internvl_vision"})
# Keys of config.json by which models that see or hear say so.
OTHER_SENSES = ("vision_config", "audio_config", "visual", "vision_tower", "mm_vision_tower", "vision_encoder_config")
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
MULTI_TOKEN_PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_layer_types")
# Rotary scalings whose tables depend on the longest position of the row, so on a segment's neighbours.
ROW_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
# Families that scale the logits after the head, and by what; transformers does so in their own forward.
LOGIT_SCALES = {
    **dict.fromkeys(("cohere", "cohere2"), lambda config: config.logit_scale),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), lambda config: 1.0 / config.logits_scaling),
}
LOGIT_OPTIONS = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None, "lm_head_multiplier": 1.0}


def logit_scale(text_config: Any) -> float:
    """What a causal language model multiplies its head's logits by.

    Raises:
        UserError: the config changes them otherwise.
    """
    family = text_config.model_type
    if family in LOGIT_SCALES:
        return float(LOGIT_SCALES[family](text_config))
    for option, neutral in LOGIT_OPTIONS.items():
        value = getattr(text_config, option, None)
        if value not in (None, neutral):
            raise UserError(
                f"language model {family!r} changes its logits after the head ({option} {value} in its config), which "
                "the packed loss does not know: use another model"
            )
    return 1.0


def check_attention(family: str | None) -> None:
    """Refuse by name a family whose attention cannot be exchanged, before its checkpoint is loaded.

    Raises:
        UserError: it computes attention itself.
    """
    if family in OWN_ATTENTION:
        raise UserError(
            f"language model {family!r} computes attention itself, not through transformers' attention interface: "
            "packed samples would leak into each other; use a model that does (Qwen2, Qwen3, Llama)"
        )


def check_kind(content: Mapping[str, Any], whole: bool = True, tried: bool = False) -> None:
    """Refuse by its config.json what is neither of a known family nor a language model, before its weights are fetched.

    Args:
        whole: a model with its vision tower is asked for, not a language model alone.
        tried: with `--family_check`, so that its kind need not be known.

    Raises:
        UserError: a vision-language model of another family, or a language model that transformers does not have.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = content["model_type"]
    if family in INTERNVL_KINDS or (whole and find_tower(family) is not None):
        return
    if family in BIDIRECTIONAL:
        raise UserError(
            f"{family!r} lets the tokens of an image see those after them, and packed attention is causal: it would be "
            "trained otherwise than it is used; take an InternVL, a Qwen2.5-VL or a Qwen3-VL"
        )
    if whole and tried:
        return
    if found := next((key for key in OTHER_SENSES if content.get(key)), None):
        raise UserError(
            f"{family!r} is a multimodal model of another family than {', '.join(sorted(TOWERS))} ({found} in its "
            "config): its images are not made here; take one of these, name the one that it is built as by "
            "--family_check, or take its language model alone with --llm_path"
        )
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"{family!r} is no language model of transformers, and code of a checkpoint's folder is not run: take a "
            "Qwen2, Qwen3 or Llama, or an InternVL in which it stands (InternLM2 loads there)"
        )


def check_family(text_config: Any) -> bool:
    """Refuse by name what cannot be packed.

    Returns:
        whether the family is known; an unknown one needs the isolation self-check.

    Raises:
        UserError: attention of its own, layers with a state along the row, or a multi-token prediction head.
    """
    family = text_config.model_type
    check_attention(family)
    layers = set(getattr(text_config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if family in LINEAR:
        layers -= {"linear_attention"}
    if family in STATEFUL or layers & {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid"}:
        kinds = f" ({', '.join(sorted(layers))})" if layers else ""
        raise UserError(
            f"language model {family!r} has layers that carry a state along the row{kinds}: packed samples would leak "
            "into each other; use a model with attention layers only (Qwen2, Qwen3, Llama)"
        )
    if "chunked_attention" in layers:
        raise UserError(
            f"language model {family!r} has layers that attend within fixed chunks only (chunked_attention), "
            "which packed attention does not know: use a model with full or sliding attention"
        )
    for option in MULTI_TOKEN_PREDICTION:
        if family not in LINEAR and getattr(text_config, option, None):
            raise UserError(
                f"language model {family!r} has a multi-token prediction head ({option} in its config), which predicts "
                "across the ends of packed samples: remove it or use another model"
            )
    if dropout := getattr(text_config, "attention_dropout", 0.0):
        raise UserError(
            f"attention_dropout {dropout} in the language model's config: packed attention has none, set it to 0"
        )
    return family in KNOWN and not layers


def longest_exact_segment(text_config: Any) -> int | None:
    """The longest segment whose rotary table does not depend on its neighbours; None is no limit."""
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    kinds = {rope.get("rope_type", "default")} if isinstance(rope, dict) else set()
    kinds |= {r.get("rope_type") for r in rope.values() if isinstance(r, dict)}
    if not kinds & ROW_DEPENDENT_ROPE:
        return None
    return rope.get("original_max_position_embeddings") or text_config.max_position_embeddings


def tree_problem(text_config: Any) -> str | None:
    """Why prefix trees do not go with a language model, or None: with windows or with attention sinks."""
    kind = text_config.model_type
    if "sliding_attention" in (getattr(text_config, "layer_types", None) or ()):
        return (
            f"prefix trees with {kind!r}, whose layers have sliding windows: a branch would not see all of its prefix; "
            "use a model without windows"
        )
    if kind == "gpt_oss":
        return f"prefix trees with {kind!r}: its attention sinks are not joined with a prefix's; use a model without"
    return None
