"""The tokenizer of the tests with the control tokens of InternVL's chat formats."""

from __future__ import annotations

import copy

from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"]
PHI3 = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


def of_format(tokenizer, conv_style):
    """With what a chat format needs."""
    if conv_style == "internlm2-chat":
        return with_bos(tokenizer)
    if conv_style == "chat_template":
        other = copy.deepcopy(tokenizer)
        other.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        return other
    return with_tokens(tokenizer, [*HARMONY, *PHI3, "</s>"])


def with_tokens(tokenizer, tokens, **options):
    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken(token, special=True, normalized=False, **options) for token in tokens])
    return other


def with_bos(tokenizer, bos="<s>"):
    """As InternLM2's and Llama's: a sequence begins with <s>, unless special tokens are left out."""
    other = with_tokens(tokenizer, [bos, "</s>"])
    other.bos_token = bos
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, other.convert_tokens_to_ids(bos))]
    )
    return other
