"""From options to a `PackedModel`: load, check that the parts fit, freeze.

Works under `HfDeepSpeedConfig`: with ZeRO-3 transformers then loads partitioned weights. Keep that object
alive around the call.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints.internvl_format import MODEL_TYPE, VISION_TYPE, check_internvl_format, is_internvl_format
from ..checkpoints.internvl_format_files import config_of, load_internvl_format, load_internvl_vision, local_folder
from ..checkpoints.tokenizers import image_token_id, load_tokenizer
from ..errors import UserError, first_line, naming
from .attention import head_size_of, linear_layers, log_linear_attention, register_packed_attention, select_kernel
from .compiled import compile_blocks, repeated_blocks
from .experts import choose_experts, gather_experts_together
from .families import check_attention, check_kind
from .family_check import check_by_parity, check_name
from .fp8 import check_fp8, use_fp8, why_slower
from .freeze import freeze
from .loss import DEFAULT_CHUNK_TOKENS, select_loss_kernel
from .packed import PackedModel
from .parts import decoder_layers
from .resize import fit_vocabulary, resize_positions
from .towers import check_native_options, find_tower
from .vision import add_drop_path
from .zero3 import gather_by_layers, is_zero3, save_as_loaded, zero3_is_on

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def build_model(
    model_name_or_path: str | Path | None = None,
    *,
    tokenizer: Any,
    vision_path: str | Path | None = None,
    llm_path: str | Path | None = None,
    attn_kernel: str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    compute_dtype: torch.dtype | None = None,
    loss_chunk: int = DEFAULT_CHUNK_TOKENS,
    loss_kernel: str = "auto",
    vision_micro_tiles: int | None = None,
    compile: bool = False,
    compile_recompute: str = "language",
    fused_vision: bool = True,
    fp8: str | None = None,
    experts_implementation: str = "auto",
    router_loss_coef: float = 0.0,
    force_image_size: int | None = None,
    down_sample_ratio: float | None = None,
    freeze_llm: bool = False,
    freeze_backbone: bool = False,
    freeze_mlp: bool = False,
    unfreeze_vit_layers: int = 0,
    use_backbone_lora: int = 0,
    use_llm_lora: int = 0,
    drop_path_rate: float = 0.0,
    grad_checkpoint: bool = False,
    family_check: str | None = None,
) -> PackedModel:
    """Load a checkpoint, or a vision tower and a language model, ready to train on packs.

    Args:
        model_name_or_path: InternVLForConditionalGeneration, InternVLChatModel (InternVL's own format) or a causal
            language model, folder or hub name.
        tokenizer: the tokenizer the data is encoded with.
        vision_path, llm_path: instead of model_name_or_path: a vision tower (or an InternVL to take it from)
            and a causal language model, joined by a new projector.
        device: where it will train, for the choice of the kernel; the model is loaded on the CPU.
        dtype: of the weights; compute_dtype: of q, k, v in training if not dtype (autocast).
        loss_chunk: labelled tokens whose logits exist at once.
        loss_kernel: one of LOSS_KERNELS; with compile, auto is the compiler's.
        vision_micro_tiles: tiles that go through the vision tower at once; None for all.
        compile: the layers of both towers through torch.compile (compiled.py).
        compile_recompute: whose layers then keep nothing cheap for the backward pass: none, language, all.
        fused_vision: and the vision tower's layers as vision/fused.py writes them out, where they can be.
        fp8: one of fp8.RECIPES, for the products of the decoder layers.
        experts_implementation: one of experts.EXPERTS.
        router_loss_coef: above 0, forwards in training give the sums of a balance loss (experts.RoutingSums).
        force_image_size, down_sample_ratio: what the data is made for. Position embeddings are resized to the first;
            the second is checked against the model.
        unfreeze_vit_layers: with freeze_backbone, train the vision layers from this index on; 0 is none.
        use_backbone_lora, use_llm_lora: rank of LoRA, 0 for none; the part's own weights are then frozen.
        drop_path_rate: stochastic depth of the vision tower in training, of its last layer.
        family_check: of a model of an unknown kind, the family by whose rules it is packed, once family_check.py has
            compared.

    Raises:
        UserError: names the option and what to do.
    """
    check_loadable(family_check, model_name_or_path=model_name_or_path, vision_path=vision_path, llm_path=llm_path)
    check_native_options(
        family_check or config_of(model_name_or_path).get("model_type"),
        fp8=fp8,
        vision_micro_tiles=vision_micro_tiles,
        drop_path_rate=drop_path_rate,
        force_image_size=force_image_size,
        down_sample_ratio=down_sample_ratio,
    )
    if fp8 is not None:
        check_fp8(fp8, device, compute_dtype or dtype)
    head_size = head_size_of(config_of(model_name_or_path or llm_path))
    implementation = register_packed_attention(attn_kernel, device, compute_dtype or dtype, head_size)
    if model_name_or_path is not None:
        model = _load(model_name_or_path, tokenizer, implementation, dtype, family_check)
    elif vision_path is not None and llm_path is not None:
        model = _join(vision_path, llm_path, tokenizer, implementation, dtype, down_sample_ratio or 0.5)
    else:
        raise UserError("--model_name_or_path is missing: give a checkpoint, or both --vision_path and --llm_path")
    if force_image_size is not None and hasattr(model.config, "vision_config"):
        resize_positions(model, force_image_size)
    packed = PackedModel(
        model, head_chunk_tokens=loss_chunk, vision_micro_tiles=vision_micro_tiles, family=family_check
    )
    check_fit(packed, tokenizer, down_sample_ratio)
    log_linear_attention(packed.language_model, device)
    if packed.tower is not None:
        packed.tower.use_kernel(select_kernel(attn_kernel, device, compute_dtype or dtype))
    if router_loss_coef:
        packed.balance_routers()
    choose_experts(packed.language_model, experts_implementation)
    check_vision_micro_tiles(packed)
    if drop_path_rate:
        if not packed.has_vision:
            raise UserError(f"--drop_path_rate {drop_path_rate}: the model has no vision tower")
        add_drop_path(packed.vision_modules[0], drop_path_rate)
    freeze(
        packed,
        freeze_llm=freeze_llm,
        freeze_backbone=freeze_backbone,
        freeze_mlp=freeze_mlp,
        unfreeze_vit_layers=unfreeze_vit_layers,
        use_backbone_lora=use_backbone_lora,
        use_llm_lora=use_llm_lora,
    )
    packed.model.train(packed.training)  # what was put in, stochastic depth and LoRA, is in the same mode
    packed.head.loss_kernel = select_loss_kernel(
        "torch" if compile and loss_kernel == "auto" else loss_kernel, device, compute_dtype or dtype
    )
    if grad_checkpoint:
        packed.gradient_checkpointing_enable()
    if fp8 is not None:
        use_fp8(packed, fp8, device)
    if compile:
        compile_blocks(packed, recompute=compile_recompute, fused_vision=fused_vision)
    if fp8 is not None and (problem := why_slower(packed, device)):
        logger.warning(problem)
    if is_zero3(packed):
        save_as_loaded(packed.model)
        _gather_blocks(packed)
    trained = packed.num_parameters(only_trainable=True)
    logger.info("%s: %d parameters, %d of them trained", type(model).__name__, packed.num_parameters(), trained)
    return packed


def _gather_blocks(packed: PackedModel) -> None:
    try:
        blocks = repeated_blocks(packed)
    except AttributeError:  # a tower or a decoder of another make: a matrix at a time, experts together
        if not linear_layers(packed.language_model):
            return gather_experts_together(packed.language_model)
        # a linear layer's matrices are used once a segment, and a rank has as many as its row: gathered before that
        blocks = list(decoder_layers(packed.language_model))
    gather_by_layers(blocks)


# --- loading --------------------------------------------------------------------------------------


def _load(
    path: str | Path, tokenizer: Any, implementation: str, dtype: torch.dtype, family_check: str | None
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, InternVLForConditionalGeneration

    if family_check is not None:
        check_by_parity(path, family_check, tokenizer)
    family = _model_type(path, "model_name_or_path")
    parts = {"text_config": implementation, "vision_config": "sdpa", "": "sdpa"}
    if family == MODEL_TYPE:
        image = image_token_id(tokenizer)
        with naming("--model_name_or_path "):
            return load_internvl_format(local_folder(path), image, dtype, parts)
    if family == "internvl":
        return _from_pretrained(InternVLForConditionalGeneration, path, "model_name_or_path", parts, dtype)
    if family_check is not None or find_tower(family) is not None:
        return _from_pretrained(AutoModelForImageTextToText, path, "model_name_or_path", parts, dtype)
    return _from_pretrained(AutoModelForCausalLM, path, "model_name_or_path", implementation, dtype)


def _join(
    vision_path: str | Path,
    llm_path: str | Path,
    tokenizer: Any,
    implementation: str,
    dtype: torch.dtype,
    down_sample_ratio: float,
) -> PreTrainedModel:
    """A vision tower and a language model as one InternVL, with a new projector."""
    from transformers import (
        AutoModelForCausalLM,
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLVisionModel,
    )

    kind = _model_type(vision_path, "vision_path")
    if kind == "internvl_vision":
        vision: Any = _from_pretrained(InternVLVisionModel, vision_path, "vision_path", "sdpa", dtype)
    elif kind == "internvl":
        whole = _from_pretrained(InternVLForConditionalGeneration, vision_path, "vision_path", "sdpa", dtype)
        vision = whole.get_submodule("model.vision_tower")
    elif kind in (VISION_TYPE, MODEL_TYPE):
        with naming("--vision_path "):
            vision = load_internvl_vision(local_folder(vision_path), dtype, "sdpa")
    else:
        raise UserError(f"--vision_path {vision_path}: {kind!r} is no vision tower of InternVL")
    language: Any = _from_pretrained(AutoModelForCausalLM, llm_path, "llm_path", implementation, dtype)
    fit_vocabulary(language, tokenizer, _num_new_tokens(llm_path, tokenizer))
    image_size, patch_size = vision.config.image_size[0], vision.config.patch_size[0]
    config = InternVLConfig(
        vision_config=vision.config,
        text_config=language.config,
        image_token_id=image_token_id(tokenizer),
        image_seq_length=int((image_size // patch_size) ** 2 * down_sample_ratio**2),
        downsample_ratio=down_sample_ratio,
        tie_word_embeddings=language.config.tie_word_embeddings,
        dtype=dtype,
    )
    parts = {"text_config": implementation, "vision_config": "sdpa", "": "sdpa"}
    model = InternVLForConditionalGeneration._from_config(config, attn_implementation=parts, dtype=dtype)
    model.model.vision_tower = vision
    model.model.language_model = language.model
    model.lm_head = language.lm_head
    model.generation_config = language.generation_config
    return model


def _num_new_tokens(llm_path: str | Path, tokenizer: Any) -> int:
    """How many tokens the tokenizer has beyond the language model's own; 0 where that has none to compare with."""
    try:
        return max(0, len(tokenizer) - len(load_tokenizer(llm_path)))
    except (OSError, ValueError):
        return 0


def _from_pretrained(
    model_class: Any, path: str | Path, option: str, implementation: str | dict[str, str], dtype: torch.dtype
) -> PreTrainedModel:
    options: dict[str, Any] = {}
    quantised = config_of(path).get("quantization_config") or {}
    if quantised.get("quant_method") == "mxfp4":  # as GPT-OSS is published; only whole weights can be trained
        from transformers.utils.quantization_config import Mxfp4Config

        options["quantization_config"] = Mxfp4Config(dequantize=True)
    try:
        return model_class.from_pretrained(path, dtype=dtype, attn_implementation=implementation, **options)
    except OSError as error:
        raise UserError(f"--{option} {path}: {first_line(error)}") from error
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        lines = map(str.strip, str(error).splitlines())
        odd = next(
            (line for line in lines if line.startswith("size mismatch")), "weights do not fit config.json, see above"
        )
        # transformers 5.24 does not transpose the experts of Qwen3-VL-MoE there, as it does elsewhere.
        hint = "; under ZeRO-3 not every checkpoint is converted: use --sharding fsdp2" if zero3_is_on() else ""
        raise UserError(f"--{option} {path}: {odd.rstrip('.')}{hint}") from error


def check_loadable(family_check: str | None = None, **paths: str | Path | None) -> None:
    """Refuse by its config.json a model that cannot be trained here, before anything else of it is fetched.

    Args:
        family_check: the family by whose rules an unknown kind is tried.
        paths: model_name_or_path, or vision_path and llm_path; one whose config cannot be read is passed over.

    Raises:
        UserError: names the option, and the kind of model or a folder that is not there.
    """
    check_name(family_check)
    for option, path in paths.items():
        with naming(f"--{option} "):
            content = config_of(path)
        with naming(f"--{option} {path}: "):
            if option == "model_name_or_path" and is_internvl_format(content):
                check_internvl_format(content)
            elif option != "vision_path" and "model_type" in content:
                check_attention(content["model_type"])
                check_kind(content, whole=option == "model_name_or_path", tried=family_check is not None)


def _model_type(path: str | Path, option: str) -> str | None:
    """`model_type` of a checkpoint's config, without the classes that its repository may bring."""
    from transformers import PreTrainedConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(path)
    except OSError as error:
        raise UserError(f"--{option} {path}: {first_line(error)}") from error
    if "model_type" not in config:
        raise UserError(
            f"--{option} {path}: no config.json with a model_type there: give a checkpoint's folder or hub name"
        )
    return config["model_type"]


# --- do the parts fit -----------------------------------------------------------------------------


def check_fit(packed: PackedModel, tokenizer: Any, down_sample_ratio: float | None = None) -> None:
    """Check that tokens, tiles and model mean the same things.

    Raises:
        UserError: the tokenizer is another model's, or the tiles' reduction is not the model's.
    """
    config = packed.config
    vocabulary = config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model embeds {vocabulary}: "
            "use the checkpoint's own tokenizer"
        )
    if packed.tower is None:
        return
    token = packed.tower.image_token
    if (token_id := image_token_id(tokenizer, token)) != config.image_token_id:
        raise UserError(
            f"{token} is token {token_id} of the tokenizer and {config.image_token_id} of the model: "
            "use the checkpoint's own tokenizer"
        )
    if down_sample_ratio is not None and down_sample_ratio != config.downsample_ratio:
        raise UserError(f"--down_sample_ratio {down_sample_ratio}: the model's is {config.downsample_ratio}, use that")


def check_vision_micro_tiles(packed: PackedModel) -> None:
    """Refuse micro-tiles with ZeRO-3, which gathers the tower's weights each time it runs: as often on every rank.

    Raises:
        UserError: `vision_micro_tiles` with ZeRO-3.
    """
    if packed.vision_micro_tiles is not None and is_zero3(packed):
        raise UserError(
            f"--vision_micro_tiles {packed.vision_micro_tiles} with ZeRO-3: ranks with different numbers of tiles "
            "would wait for each other; leave it out, or use --deepspeed zero_stage1 or zero_stage2"
        )
