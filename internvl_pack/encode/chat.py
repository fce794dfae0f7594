"""Conversations to parts of a token sequence: what is fixed, what is text, what is trained, where images lie.

A template turns checked turns into `Part`s without touching a tokenizer's vocabulary for content, so that typed text
can never be mistaken for structure. Templates are found by `conv_style` in a registry:

    @register_template("my_style")
    def my_style(tokenizer):
        return ChatML(tokenizer, system_prompt="You are a pirate.")
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

from ..errors import UserError
from ..plugins import add_to

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The system turn that InternVL2.5 and 3 were trained with (37 tokens with its frame in the Qwen2.5 vocabulary).
INTERNVL2_5_SYSTEM_PROMPT = (
    "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
)


class Turn(NamedTuple):
    """One turn. `pieces` is its text, cut where its images stand: an image lies between each two pieces."""

    role: str  # "system", "human", "gpt", "function" or "pretrain"
    pieces: tuple[str, ...]


class Part(NamedTuple):
    """A run of the token sequence.

    kind "ids":   `value` is an int32 array of fixed tokens
    kind "text":  `value` is text to encode as content
    kind "image": the next image's block; `value` is None
    kind "end":   a turn ends here; `value` is its role
    """

    kind: str
    value: np.ndarray | str | int | None
    trained: bool = False


IMAGE = Part("image", None)


def without_answers(parts: list[Part], trained: Sequence[bool]) -> list[Part]:
    """The parts of a conversation with some answers untrained; ids stay as they are.

    Args:
        parts: of any template: what comes before the end of the k-th answer, and after the turn before it, is its.
        trained: of each answer.
    """
    found, start, answers = list(parts), 0, iter(trained)
    for place, part in enumerate(parts):
        if part.kind != "end":
            continue
        if part.value == "gpt" and not next(answers):
            found[start:place] = [each._replace(trained=False) for each in parts[start:place]]
        start = place
    return found


class ChatTemplate(Protocol):
    """How a conversation is written. One that knows turns from `function` names all its roles in `roles`."""

    def layout(self, turns: list[Turn]) -> list[Part]:
        """The parts of a conversation.

        Raises:
            SampleError: the template cannot write it.
        """
        ...


# Factories by conv_style; formats.py finds them.
TEMPLATES: dict[str, Callable[..., ChatTemplate]] = {}

_Factory = TypeVar("_Factory", bound=Callable[..., ChatTemplate])


def register_template(conv_style: str) -> Callable[[_Factory], _Factory]:
    """Register a factory `tokenizer -> ChatTemplate` under the name that users write as `conv_style`.

    Raises:
        UserError: another one has the name.
    """
    return lambda factory: add_to(TEMPLATES, "conv_style", conv_style, factory)


def single_token(tokenizer: PreTrainedTokenizerBase, token: str, conv_style: str) -> int:
    """The id of a control token; UserError where the tokenizer does not have it as one token."""
    token_id = tokenizer.get_added_vocab().get(token)
    if token_id is None:
        raise UserError(
            f"conv_style {conv_style!r} needs the token {token!r}, which this tokenizer lacks; "
            "choose another conv_style or add the token to the tokenizer of model_name_or_path"
        )
    return token_id


class Frame(NamedTuple):
    """What a template writes around the turns of a role.

    before: in front, tokenized by itself, not trained.
    text: in front, encoded together with the text of the turn, as its first words.
    opening: of an answer, between `before` and its text, trained: what generation must write itself.
    end: behind, trained with an answer.
    last: `end` of the last turn where it is another one.
    between: behind all that, never trained.
    """

    before: str = ""
    text: str = ""
    opening: str = ""
    end: str = ""
    last: str | None = None
    between: str = ""


_ROLES_OF_JINJA = {"system": "system", "human": "user", "gpt": "assistant", "function": "tool"}
_JINJA = """\
{%- macro text(content) -%}
  {%- if content is string -%}
    {{ content }}
  {%- else -%}
    {%- for part in content -%}
      {%- if part['type'] == 'text' -%}
        {{ part['text'] }}
      {%- elif part['type'] == 'image' -%}
        {{ '<IMG_CONTEXT>\\n' }}
      {%- elif part['type'] == 'video' -%}
        {{ '<video>\\n' }}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if messages[0]['role'] != 'system' %}{{ SYSTEM }}{% endif -%}
{%- for message in messages -%}
    TURNS
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ PROMPT }}{% endif -%}
"""


class Framed:
    """Each turn in the frame of its role, encoded on its own.

    An answer is encoded apart from its frame, as generation sees it; other turns together with the plain text before
    them, as InternVL's own preprocessing does. Trained are an answer, its `opening` and its `end`. An answer of nothing
    but white space is not trained.

    Args:
        frames: of "system", "human", "gpt", and of "function" where the format has it.
        system_prompt: of conversations without a system turn; None writes none.
        strip: take white space off both ends of the turns' texts.
        lstrip: off their beginnings.
        skip_first_answer: leave out an answer that the conversation begins with.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        frames: Mapping[str, Frame],
        system_prompt: str | None,
        *,
        strip: bool = False,
        lstrip: bool = False,
        skip_first_answer: bool = False,
    ) -> None:
        self.roles = frozenset(frames)
        self._frames = dict(frames)
        self._strip, self._lstrip, self._skip_first_answer = strip, lstrip, skip_first_answer
        self._bos = bos_of(tokenizer)
        texts = {text for frame in frames.values() for text in (*frame, "") if text is not None}
        self._fixed = {text: ids_of(tokenizer, text) for text in texts}
        self._default_system: list[Part] = []
        self._system = ""
        if system_prompt is not None:
            frame = frames["system"]
            self._system = f"{frame.before}{frame.text}{system_prompt}{frame.end}{frame.between}"
            self._default_system = [Part("ids", ids_of(tokenizer, self._system)), Part("end", "system")]

    def layout(self, turns: list[Turn]) -> list[Part]:
        """The parts of a conversation: each turn's frame, its text, its images. See ChatTemplate."""
        parts = [*self._bos]
        if turns[0].role != "system":
            parts += self._default_system
        if self._skip_first_answer and turns[0].role == "gpt":
            parts.append(Part("end", "gpt"))  # each turn has its end, whatever there is of it
            turns = turns[1:]
        for number, (role, pieces) in enumerate(turns, 1):
            frame = self._frames[role]
            end = frame.last if frame.last is not None and number == len(turns) else frame.end
            if self._strip:
                pieces = trimmed(pieces)
            elif self._lstrip:
                pieces = (pieces[0].lstrip(), *pieces[1:])
            trained = role == "gpt" and bool(pieces[0].strip())
            self._add(parts, frame.before, False)
            self._add(parts, frame.opening, trained)
            parts.append(Part("text", frame.text + pieces[0], trained))
            for piece in pieces[1:]:
                parts += (IMAGE, Part("text", piece))
            self._add(parts, end, trained)
            self._add(parts, frame.between, False)
            parts.append(Part("end", role))
        return parts

    def _add(self, parts: list[Part], text: str, trained: bool) -> None:
        if text:
            parts.append(Part("ids", self._fixed[text], trained))

    def jinja(self) -> str:
        """The format as a chat template of transformers; a part of type `image` stands for an image, on a line.

        The tokenizer's first token is left out: a tokenizer adds it to what the template writes.
        """
        turns = []
        for role, name in _ROLES_OF_JINJA.items():
            if (frame := self._frames.get(role)) is not None:
                before = json.dumps(f"{frame.before}{frame.opening}{frame.text}", ensure_ascii=False)
                after = json.dumps(f"{frame.end}{frame.between}", ensure_ascii=False)
                trim = " | trim" if self._strip else ""
                turns.append(
                    f"{{%- elif message['role'] == '{name}' %}}{{{{ {before} }}}}"
                    f"{{{{ text(message['content']){trim} }}}}{{{{ {after} }}}}"
                )
        prompt = json.dumps(self._frames["gpt"].before, ensure_ascii=False)
        return (
            _JINJA.replace("SYSTEM", json.dumps(self._system, ensure_ascii=False))
            .replace("TURNS", "\n    ".join(turns).replace("elif", "if", 1))
            .replace("PROMPT", prompt)
        )


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    """int32 ids of what a template writes, control tokens included."""
    return np.array(tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)


def bos_of(tokenizer: PreTrainedTokenizerBase) -> list[Part]:
    """The token that a sequence of this tokenizer begins with, if there is one."""
    # Asked by doing: add_bos_token does not say it of a tokenizer that was saved and loaded again.
    if tokenizer.bos_token_id is None or tokenizer("").input_ids[:1] != [tokenizer.bos_token_id]:
        return []
    return [Part("ids", np.array([tokenizer.bos_token_id], dtype=np.int32))]


class ChatML(Framed):
    """`<|im_start|>role` newline, the text, `<|im_end|>` newline, a turn: `preprocess_internvl2_5` of InternVL.

    Trained are an answer and its `<|im_end|>`: not the header, not the newline after the turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None, conv_style: str = "internvl2_5"
    ) -> None:
        for token in ("<|im_start|>", "<|im_end|>"):
            single_token(tokenizer, token, conv_style)
        super().__init__(tokenizer, chatml_frames(between="\n"), system_prompt)


def chatml_frames(between: str) -> dict[str, Frame]:
    """Frames of ChatML; `between` stands after each turn's `<|im_end|>`."""
    around = {"end": "<|im_end|>", "between": between}
    return {
        "system": Frame("<|im_start|>", "system\n", **around),
        "human": Frame("<|im_start|>", "user\n", **around),
        "gpt": Frame("<|im_start|>assistant\n", **around),
    }


class PlainText:
    """A text without turns, all of it trained but its images: records whose one turn is from `pretrain`.

    As `preprocess_pretrain` of InternVL 3.5, whatever the chat format. Nothing is written around it but the token that
    a sequence of the tokenizer begins with.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._bos = bos_of(tokenizer)

    def layout(self, turns: list[Turn]) -> list[Part]:
        ((role, pieces),) = turns
        trained = any(piece.strip() for piece in pieces)
        parts = [*self._bos, Part("text", pieces[0], trained)]
        for piece in pieces[1:]:
            parts += (IMAGE, Part("text", piece, trained))
        return [*parts, Part("end", role)]


@register_template("internvl2_5")
def _internvl2_5(tokenizer: PreTrainedTokenizerBase) -> ChatML:
    return ChatML(tokenizer, INTERNVL2_5_SYSTEM_PROMPT)


def trimmed(pieces: tuple[str, ...]) -> tuple[str, ...]:
    """The pieces of a turn whose text, images included, was stripped at both ends."""
    pieces = (pieces[0].lstrip(), *pieces[1:])
    return (*pieces[:-1], pieces[-1].rstrip())
