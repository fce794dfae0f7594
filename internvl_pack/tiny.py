"""A tiny tokenizer and a tiny InternVL, built offline, for the quickstart, the tests and smoke runs.

Same classes, same special tokens and same code paths as the published checkpoints; random weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

IMAGE_TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>")
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
OTHER_TOKENS = ("<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(texts: Iterable[str], vocab_size: int = 2048):
    """A byte-level BPE tokenizer trained on `texts`, with the ChatML and InternVL special tokens.

    Every string round-trips (the 256 bytes are in the alphabet). The same texts give the same tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in CHAT_TOKENS + IMAGE_TOKENS + OTHER_TOKENS]
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
    return fast


def conversation_texts(jsonl: Path) -> list[str]:
    """Every turn's text of an annotation file, in order."""
    texts = []
    with open(jsonl, encoding="utf-8") as lines:
        for line in lines:
            texts.extend(turn["value"] for turn in json.loads(line)["conversations"])
    return texts
