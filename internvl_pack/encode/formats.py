"""Chat formats by name, and those of InternVL's other models: 1.x, 2.0, Mini-InternVL and the GPT-OSS one of 3.5.

docs/encoding.md shows how each writes a conversation, and what of it is trained. The facts are those of InternVL's
`conversation.py` and of its `preprocess_*` functions; docs/migration.md lists where these differ from their text.
Importing this module registers them; chat.py has the registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UserError
from ..plugins import load_plugins
from .chat import (
    IMAGE,
    TEMPLATES,
    ChatTemplate,
    Frame,
    Framed,
    Part,
    Turn,
    bos_of,
    chatml_frames,
    ids_of,
    register_template,
    single_token,
)
from .tokenizer_template import TokenizerTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The system turn of InternVL 1.x and 2.0, kept by them "to avoid changes in benchmark performance".
INTERNVL2_SYSTEM_PROMPT = (
    "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"
)
GPT_OSS_SYSTEM_PROMPT = (
    "You are InternVL, a large language model trained by Shanghai AI Laboratory.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2025-08-06\n\nReasoning: low\n\n"
    "# Valid channels: final. Channel must be included for every message."
)


def known_templates() -> tuple[str, ...]:
    """The names that users may write as `conv_style`."""
    load_plugins()
    return tuple(sorted(TEMPLATES))


def make_template(conv_style: str, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """Build the template of a `conv_style`.

    Raises:
        UserError: an unknown name, or an unsuitable tokenizer.
    """
    if conv_style not in TEMPLATES and conv_style not in known_templates():
        raise UserError(f"conv_style is {conv_style!r}: choose one of {', '.join(known_templates())}")
    return TEMPLATES[conv_style](tokenizer)


@register_template("Hermes-2")
def _hermes_2(tokenizer: PreTrainedTokenizerBase) -> Framed:
    _check(tokenizer, "Hermes-2", "<|im_start|>", "<|im_end|>")
    return Framed(tokenizer, chatml_frames(between=""), INTERNVL2_SYSTEM_PROMPT, skip_first_answer=True)


@register_template("internlm2-chat")
def _internlm2_chat(tokenizer: PreTrainedTokenizerBase) -> Framed:
    _check(tokenizer, "internlm2-chat", "<|im_start|>", "<|im_end|>")
    frames = chatml_frames(between="")
    return Framed(tokenizer, frames, INTERNVL2_SYSTEM_PROMPT, strip=True, skip_first_answer=True)


@register_template("phi3-chat")
def _phi3_chat(tokenizer: PreTrainedTokenizerBase) -> Framed:
    """Phi-3's tokenizer takes white space after a role's token into the token: then it goes from the text, too."""
    _check(tokenizer, "phi3-chat", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    frames = {
        "system": Frame("<|system|>", "\n", end="<|end|>"),
        "human": Frame("<|user|>", "\n", end="<|end|>"),
        "gpt": Frame("<|assistant|>\n", end="<|end|>"),
    }
    swallowed = len(ids_of(tokenizer, "<|user|>\n")) == 1
    if swallowed:
        frames |= {role: frames[role]._replace(text="") for role in ("system", "human")}
    return Framed(tokenizer, frames, INTERNVL2_SYSTEM_PROMPT, lstrip=swallowed, skip_first_answer=True)


@register_template("internvl3_5_gpt_oss")
def _gpt_oss(tokenizer: PreTrainedTokenizerBase) -> Framed:
    _check(tokenizer, "internvl3_5_gpt_oss", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>")
    frames = {
        "system": Frame("<|start|>system<|message|>", end="<|end|>"),
        "human": Frame("<|start|>user<|message|>", end="<|end|>"),
        "function": Frame("<|start|>tool<|message|>", end="<|end|>"),
        "gpt": Frame("<|start|>assistant", opening="<|channel|>final<|message|>", end="<|end|>", last="<|return|>"),
    }
    return Framed(tokenizer, frames, GPT_OSS_SYSTEM_PROMPT)


@register_template("internvl_zh")
class _HumanAndBot:
    """Roles are words, not tokens, and a space is what parts a question from its answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        _check(tokenizer, "internvl_zh", "</s>")
        self._bos = bos_of(tokenizer)
        self._bot = Part("ids", ids_of(tokenizer, " <bot>:"))
        self._end = {trained: Part("ids", ids_of(tokenizer, "</s>"), trained) for trained in (True, False)}

    def layout(self, turns: list[Turn]) -> list[Part]:
        parts, space = [*self._bos], " "
        for role, pieces in turns:
            if role == "gpt":
                trained = bool(pieces[0].strip())
                parts += (self._bot, Part("text", f" {pieces[0]}", trained), self._end[trained])
            else:
                parts.append(Part("text", pieces[0] if role == "system" else f"{space}<human>: {pieces[0]}"))
                for piece in pieces[1:]:
                    parts += (IMAGE, Part("text", piece))
            parts.append(Part("end", role))
            space = " " if role == "system" else ""
        return parts


def _check(tokenizer: PreTrainedTokenizerBase, conv_style: str, *tokens: str) -> None:
    for token in tokens:
        single_token(tokenizer, token, conv_style)


register_template("chat_template")(TokenizerTemplate)
