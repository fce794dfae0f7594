"""A tiny tokenizer and a tiny InternVL or Qwen-VL, built offline, for the quickstart, the tests and smoke runs.

Same classes, same special tokens and same code paths as the published checkpoints; random weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.tokenizers import IMAGE_TOKENS, OTHER_TOKENS
from ..errors import SampleError

if TYPE_CHECKING:
    from transformers import (
        InternVLConfig,
        InternVLForConditionalGeneration,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
    )

    from ..sources import Source

CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Before and after a picture, its tokens, those of a video; before and after a video, where these are others.
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GLM_TOKENS = (
    *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
)
# Contents are a string, or a list of parts, of which images are written as processors want them.
NATIVE_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# The words of made-up data.
WORDS = (
    "one", "two", "three", "four", "packs", "rows", "tiles", "lanes",
    "tokens", "of", "the", "and", "image", "text",
)  # fmt: skip


def tiny_tokenizer(texts: Iterable[str], vocab_size: int = 2048, family: str = "internvl") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`, with ChatML's special tokens and a family's, one of FAMILIES.

    Every string round-trips (the 256 bytes are in the alphabet). The same texts give the same tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    images = IMAGE_TOKENS if family == "internvl" else _native_tokens(family)
    special = [AddedToken(t, special=True, normalized=False) for t in CHAT_TOKENS + images + OTHER_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    fast.chat_template = CHAT_TEMPLATE
    if family != "internvl":
        start, end, image = images[:3]
        fast.chat_template = NATIVE_CHAT_TEMPLATE.replace("IMAGE", start + image + end)
    return fast


def _native_tokens(family: str) -> tuple[str, ...]:
    return GLM_TOKENS if family == "glm4v" else QWEN_TOKENS


def conversation_texts(jsonl: Path | str) -> list[str]:
    """Every turn's text of an annotation file, in order."""
    texts: list[str] = []
    with open(jsonl, encoding="utf-8") as lines:
        for line in lines:
            texts.extend(turn["value"] for turn in json.loads(line)["conversations"])
    return texts


def source_texts(sources: Sequence[Source], limit: int = 2000) -> Iterator[str]:
    """Texts of some `limit` rows, of each dataset as many, of those that can be read; long ones cut."""
    for source in sources:
        rows = max(1, limit // len(sources))
        for row in range(0, len(source), max(1, len(source) // rows)):
            try:
                turns = source.read(row).data.get("conversations")
            except SampleError:
                continue
            for turn in turns if isinstance(turns, list) else ():
                text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
                if isinstance(text, str):
                    yield text[:2000]


# Rotary and normalisation differ between the families; sizes are what a CPU trains in milliseconds.
LANGUAGE_MODELS = ("qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss")
FAMILIES = ("internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v")


def _text_settings(vocab_size: int, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """Of every tiny decoder: grouped-query heads, 4 of the queries and 2 of keys and values."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,  # a pad row of a partitioned embedding breaks ZeRO-3's start
    }


def tiny_text_config(
    llm: str = "qwen2", *, vocab_size: int, hidden_size: int = 64, num_layers: int = 2, **overrides: Any
) -> PreTrainedConfig:
    """Config of a tiny language model of a family."""
    from transformers import AutoConfig

    settings = _text_settings(vocab_size, hidden_size, num_layers) | {"head_dim": hidden_size // 4}
    if llm == "qwen3_moe":
        settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
    if llm == "gpt_oss":
        settings |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    return AutoConfig.for_model(llm, **(settings | overrides))


def tiny_internvl_config(
    tokenizer: PreTrainedTokenizerBase,
    llm: str = "qwen2",
    *,
    image_size: int = 56,
    patch_size: int = 14,
    vision_hidden_size: int = 32,
    num_vision_layers: int = 2,
    **text_settings: Any,
) -> InternVLConfig:
    """Config of a tiny InternVL: by default 4 tokens a tile of 56 x 56, 2 vision and 2 decoder layers.

    Args:
        llm: one of LANGUAGE_MODELS; `text_settings` go to `tiny_text_config`.
    """
    from transformers import InternVLConfig

    text = tiny_text_config(llm, vocab_size=len(tokenizer), **text_settings)
    vision = {
        "hidden_size": vision_hidden_size,
        "intermediate_size": 2 * vision_hidden_size,
        "num_hidden_layers": num_vision_layers,
        "num_attention_heads": 2,
        "image_size": [image_size, image_size],
        "patch_size": [patch_size, patch_size],
        "attention_bias": True,
        "initializer_range": 0.05,
    }
    return InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.get_added_vocab()["<IMG_CONTEXT>"],
        image_seq_length=(image_size // patch_size) ** 2 // 4,
        downsample_ratio=0.5,
        tie_word_embeddings=text.tie_word_embeddings,
    )


def tiny_internvl(
    tokenizer: PreTrainedTokenizerBase, llm: str = "qwen2", *, seed: int = 0, **settings: Any
) -> InternVLForConditionalGeneration:
    """A tiny InternVLForConditionalGeneration with seeded random weights, float32; see `tiny_internvl_config`."""
    import torch
    from transformers import InternVLForConditionalGeneration

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return InternVLForConditionalGeneration(tiny_internvl_config(tokenizer, llm, **settings))


def tiny_native_config(
    tokenizer: PreTrainedTokenizerBase, family: str, *, hidden_size: int = 64, num_layers: int = 2
) -> PreTrainedConfig:
    """Config of a tiny model of native resolution: tokens of 28 or 32 pixels a side, 2 vision and 2 decoder layers."""
    from transformers import AutoConfig

    text = _text_settings(len(tokenizer), hidden_size, num_layers)
    turned = 0.5 if family.startswith("qwen3_5") else 1.0  # of a head's elements, by the rotary embedding
    section = int(hidden_size // 8 * turned)  # rotary frequencies of a head, shared among time, height and width
    axis = section // 3
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    rope["mrope_section"] = [section - 2 * axis, axis, axis]
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": hidden_size,
        "initializer_range": 0.05,
    }
    if family == "qwen2_5_vl":
        vision |= {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]}
    elif family == "glm4v":
        vision |= {"patch_size": 14, "image_size": 112}
        rope["partial_rotary_factor"] = 1.0
    else:
        vision |= {"patch_size": 16, "num_position_embeddings": 64}
        rope["mrope_interleaved"] = True
        text["head_dim"] = hidden_size // 4
    if family.startswith("qwen3_vl"):
        vision["deepstack_visual_indexes"] = [0]
    if family.startswith("qwen3_5"):  # of each two layers the first is linear
        rope["partial_rotary_factor"] = turned
        text |= {"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": hidden_size // 8, "linear_value_head_dim": hidden_size // 8}
    if family.endswith("_moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
    if family == "qwen3_5_moe":
        del text["intermediate_size"]
        text["shared_expert_intermediate_size"] = hidden_size
    start, end, image, video, *others = (tokenizer.get_added_vocab()[token] for token in _native_tokens(family))
    borders = {"vision_start_token_id": start, "vision_end_token_id": end}
    if family == "glm4v":
        borders = {"image_start_token_id": start, "image_end_token_id": end}
        borders |= dict(zip(("video_start_token_id", "video_end_token_id"), others, strict=True))
    return AutoConfig.for_model(
        family,
        text_config=text | {"rope_parameters": rope},
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        **borders,
    )


def tiny_native(tokenizer: PreTrainedTokenizerBase, family: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A tiny model of native resolution with seeded random weights, float32; see `tiny_native_config`."""
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(tiny_native_config(tokenizer, family, **settings))


def save_tiny_checkpoint(
    directory: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    llm: str = "qwen2",
    *,
    family: str = "internvl",
    **settings: Any,
) -> Path:
    """Write a tiny model and its tokenizer as an ordinary checkpoint, which `from_pretrained` loads.

    Args:
        family: one of FAMILIES; `llm` and `settings` are InternVL's, of others see `tiny_native_config`.
    """
    directory = Path(directory)
    model: PreTrainedModel
    if family == "internvl":
        model = tiny_internvl(tokenizer, llm, **settings)
    else:
        model = tiny_native(tokenizer, family, **settings)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
