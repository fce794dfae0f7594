"""Conversations to parts of a token sequence: what is fixed, what is text, what is trained, where images lie.

A template turns checked turns into `Part`s without touching a tokenizer's vocabulary for content, so that typed text
can never be mistaken for structure. Templates are found by `conv_style` in a registry:

    @register_template("my_style")
    def my_style(tokenizer):
        return ChatML(tokenizer, system_prompt="You are a pirate.")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from internvl_pack.errors import UserError

#: The system turn that InternVL2.5 and 3 were trained with (37 tokens with its frame in the Qwen2.5 vocabulary).
INTERNVL2_5_SYSTEM_PROMPT = (
    "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
)


class Turn(NamedTuple):
    """One turn. `pieces` is its text, cut where its images stand: an image lies between each two pieces."""

    role: str  # "system", "human" or "gpt"
    pieces: tuple[str, ...]


class Part(NamedTuple):
    """A run of the token sequence.

    kind "ids":   `value` is an int32 array of fixed tokens
    kind "text":  `value` is text to encode as content
    kind "image": the next image's block; `value` is None
    kind "end":   a turn ends here; `value` is its role
    """

    kind: str
    value: object
    trained: bool = False


IMAGE = Part("image", None)

_CHATML_ROLES = {"system": "system", "human": "user"}


class ChatTemplate(Protocol):
    def layout(self, turns: list[Turn]) -> list[Part]:
        """The parts of a conversation. Raises SampleError where the template cannot write it."""
        ...


_TEMPLATES: dict[str, Callable[..., ChatTemplate]] = {}


def register_template(conv_style: str) -> Callable:
    """Register a factory `tokenizer -> ChatTemplate` under the name that users write as `conv_style`."""

    def register(factory):
        _TEMPLATES[conv_style] = factory
        return factory

    return register


def known_templates() -> tuple[str, ...]:
    return tuple(sorted(_TEMPLATES))


def make_template(conv_style: str, tokenizer) -> ChatTemplate:
    """Build the template of a `conv_style`; UserError for an unknown name or an unsuitable tokenizer."""
    if conv_style not in _TEMPLATES:
        raise UserError(f"conv_style is {conv_style!r}: choose one of {', '.join(known_templates())}")
    return _TEMPLATES[conv_style](tokenizer)


def single_token(tokenizer, token: str, conv_style: str) -> int:
    """The id of a control token; UserError where the tokenizer does not have it as one token."""
    token_id = tokenizer.get_added_vocab().get(token)
    if token_id is None:
        raise UserError(
            f"conv_style {conv_style!r} needs the token {token!r}, which this tokenizer lacks; "
            "choose another conv_style or add the token to the tokenizer of model_name_or_path"
        )
    return token_id


class ChatML:
    """`<|im_start|>role` newline, the text, `<|im_end|>` newline, a turn.

    Each turn is encoded on its own. An answer is encoded apart from its header, as generation sees it; other turns
    together with the header's plain text, as preprocess_internvl2_5 of InternVL does. Trained are an answer and its
    `<|im_end|>`: not the header, not the newline after the turn. An answer of nothing but white space is not trained.
    """

    def __init__(self, tokenizer, system_prompt: str | None, conv_style: str = "internvl2_5") -> None:
        start = single_token(tokenizer, "<|im_start|>", conv_style)
        end = single_token(tokenizer, "<|im_end|>", conv_style)

        def fixed(text: str, *before: int) -> np.ndarray:
            return np.array([*before, *tokenizer(text, add_special_tokens=False).input_ids], dtype=np.int32)

        self.system_prompt = system_prompt
        self._start = Part("ids", fixed("", start))
        self._answer_header = Part("ids", fixed("assistant\n", start))
        self._end = {trained: Part("ids", fixed("", end), trained) for trained in (True, False)}
        self._newline = Part("ids", fixed("\n"))
        self._bos = None
        if getattr(tokenizer, "add_bos_token", False) and tokenizer.bos_token_id is not None:
            self._bos = Part("ids", fixed("", tokenizer.bos_token_id))

    def layout(self, turns: list[Turn]) -> list[Part]:
        if self.system_prompt is not None and (not turns or turns[0].role != "system"):
            turns = [Turn("system", (self.system_prompt,)), *turns]
        parts = [] if self._bos is None else [self._bos]
        for role, pieces in turns:
            if role == "gpt":
                (answer,) = pieces
                trained = bool(answer.strip())
                parts += (self._answer_header, Part("text", answer, trained), self._end[trained])
            else:
                parts += (self._start, Part("text", f"{_CHATML_ROLES[role]}\n{pieces[0]}"))
                for piece in pieces[1:]:
                    parts += (IMAGE, Part("text", piece))
                parts.append(self._end[False])
            parts += (self._newline, Part("end", role))
        return parts


@register_template("internvl2_5")
def _internvl2_5(tokenizer) -> ChatML:
    return ChatML(tokenizer, INTERNVL2_5_SYSTEM_PROMPT)
