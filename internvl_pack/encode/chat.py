"""Conversations to parts of a token sequence: what is fixed, what is text, what is trained, where images lie.

A template turns checked turns into `Part`s without touching a tokenizer's vocabulary for content, so that typed text
can never be mistaken for structure. Templates are found by `conv_style` in a registry:

    @register_template("my_style")
    def my_style(tokenizer):
        return ChatML(tokenizer, system_prompt="You are a pirate.")
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np

from ..errors import SampleError, UserError
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


class TokenizerTemplate:
    """The tokenizer's own chat template (Jinja), rendered with stand-ins for the turns' texts.

    What the template writes around the texts is learnt once for each sequence of roles: the conversation is rendered as
    a whole, and up to a turn for each kind of turn, by what is written before and after its text. An answer's span is
    what follows the generation prompt; its end is trained up to the last token of the turn, white space after that is
    not. Then each sample is rendered once with its real texts and must come out the same: no template can change a text
    unseen.

    Templates of hybrid thinking write the last answer otherwise than earlier ones, behind an empty block of thoughts.
    With these a conversation is trained as it is rendered whole, and of an answer its text and its end alone.

    Definitions of tools are the template's to write; they may hold no control token, which would be read as one.

    Costs one Jinja rendering a sample, and a few for each sequence of roles.

    Raises:
        SampleError: `chat_template_refuses`, the template does not take the conversation (roles that do not alternate);
            `chat_template_rewrites`, it changes history or texts; `unsupported_field`, it writes no tools, or these
            hold a control token.
    """

    _NAMES = {"system": "system", "human": "user", "gpt": "assistant"}  # noqa: RUF012
    _STAND_IN = re.compile("\ue000([0-9]+)\ue001")

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise UserError("conv_style 'chat_template' needs a tokenizer with a chat template; this one has none")
        self._tokenizer = tokenizer
        tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, tokens))})" if tokens else r"(?!)()")
        self._plans: dict[tuple[tuple[str, ...], str], tuple[str, list[Part]]] = {}
        self._is_hybrid = False
        try:
            self._is_hybrid = self._rewrites_openings()
            self.layout([Turn("human", ("Hi.",)), Turn("gpt", ("Hello.",))])
        except SampleError as error:
            raise UserError(f"conv_style 'chat_template' cannot use this tokenizer's chat template: {error}") from None

    def layout(self, turns: list[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[Part]:
        roles = tuple(turn.role for turn in turns)
        key = roles, json.dumps(tools, ensure_ascii=False) if tools else ""
        if key not in self._plans:
            if len(self._plans) >= 1024:
                self._plans.clear()
            if tools:
                self._check_tools(roles, key[1], tools)
            self._plans[key] = self._learn(roles, tools)
        rendered, plan = self._plans[key]
        pieces = self._pieces_as_rendered(turns, rendered, tools)
        parts: list[Part] = []
        for kind, value, trained in plan:
            if kind == "turn":
                assert isinstance(value, int)
                trained = trained and any(piece.strip() for piece in pieces[value])
                _append_text(parts, pieces[value][0], trained)
                for piece in pieces[value][1:]:
                    parts.append(IMAGE)
                    _append_text(parts, piece, trained)
            elif kind == "text":
                assert isinstance(value, str)
                _append_text(parts, value, trained)
            else:
                parts.append(Part(kind, value, trained))
        return parts

    def _check_tools(self, roles: tuple[str, ...], written: str, tools: Sequence[Mapping[str, Any]]) -> None:
        if (token := self._added.search(written)) is not None:
            raise SampleError("unsupported_field", f"field 'tools' holds the control token {token[0]!r}")
        texts = ["x"] * len(roles)
        if self._render(roles, texts, tools) == self._render(roles, texts, ()):
            raise SampleError(
                "unsupported_field",
                "the record has a field 'tools', which the tokenizer's chat template does not write: write it into the "
                "texts of the turns, or remove it",
            )

    def _render(
        self, roles: tuple[str, ...], texts: list[str], tools: Sequence[Mapping[str, Any]], generate: bool = False
    ) -> str:
        import jinja2

        messages = [
            {"role": self._NAMES[role], "content": text} for role, text in zip(roles, texts, strict=False)
        ]  # as many as there are texts
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tools=[dict(tool) for tool in tools] or None, tokenize=False, add_generation_prompt=generate
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise SampleError("chat_template_refuses", f"roles {', '.join(roles[:8])}: {error}") from None
        assert isinstance(rendered, str), "one conversation, not tokenized"
        return rendered

    def _pieces_as_rendered(
        self, turns: list[Turn], rendered: str, tools: Sequence[Mapping[str, Any]]
    ) -> list[tuple[str, ...]]:
        """The pieces of all turns, trimmed if that is what the template does."""
        roles = tuple(turn.role for turn in turns)
        texts = ["<image>".join(turn.pieces) for turn in turns]
        actual = self._render(roles, texts, tools)
        for trim in (False, True):
            shown = [text.strip() for text in texts] if trim else texts
            filled = self._STAND_IN.split(rendered)  # text, number, text, ...: the numbers' places
            filled[1::2] = [shown[int(number)] for number in filled[1::2]]
            if actual == "".join(filled):
                return [trimmed(turn.pieces) if trim else turn.pieces for turn in turns]
        raise SampleError(
            "chat_template_rewrites",
            "the chat template changes the text of a turn: write it as the template leaves it (thoughts in the last "
            "answer alone), or end the sample with that turn",
        )

    def _rewrites_openings(self) -> bool:
        """Whether an answer begins otherwise when the conversation goes on after it."""
        roles = ("human", "gpt", "human", "gpt")
        texts = [f"\ue000{index}\ue001" for index in range(len(roles))]
        try:
            one, two = self._render(roles[:2], texts[:2], ()), self._render(roles, texts, ())
        except SampleError:
            return False
        return one.partition(texts[1])[0] != two.partition(texts[1])[0]

    def _learn(self, roles: tuple[str, ...], tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Part]]:
        """(the rendering with stand-ins, its parts); kind "turn" stands for the text of turn `value`."""
        stand_ins = [f"\ue000{index}\ue001" for index in range(len(roles))]
        rendered = self._render(roles, stand_ins, tools)
        if self._STAND_IN.findall(rendered) != [str(index) for index in range(len(roles))]:
            raise SampleError("chat_template_rewrites", f"a turn of {', '.join(roles)} is left out, moved or repeated")
        around = self._STAND_IN.split(rendered)[::2]  # what is written before, between and after the texts
        marks: list[tuple[int, str | None, bool]] = []  # (place, role whose turn ends there, trained from there on)
        known: dict[tuple[str, str, str], tuple[int | None, int, int] | None] = {}
        place = 0
        for index, role in enumerate(roles):
            start = place + len(around[index])
            stop = place = start + len(stand_ins[index])
            kind = role, around[index], around[index + 1]
            if kind not in known:
                known[kind] = self._turn(roles, stand_ins, index, around, tools)
            if (found := known[kind]) is None:
                continue
            opening, end, border = found
            if role == "gpt":
                assert opening is not None
                marks += [(start - opening, None, True), (stop + end, None, False)]
            marks.append((stop + border, role, False))
        plan: list[Part] = []
        trained, start = False, 0
        for place, ended, trained_after in [*marks, (len(rendered), None, False)]:
            self._add_rendered(plan, rendered[start:place], trained)
            if ended is not None:
                plan.append(Part("end", ended))
            trained, start = trained_after, place
        return rendered, plan

    def _turn(
        self,
        roles: tuple[str, ...],
        texts: list[str],
        index: int,
        around: list[str],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[int | None, int, int] | None:
        """Characters of a turn's frame: trained ones before its text (of an answer), after it its end, and its border.

        `around` is what the whole conversation has before, between and after the texts. None of a turn without a
        border: what comes before the next is no conversation by itself.

        Raises:
            SampleError: an answer is written in another way once the conversation goes on.
        """
        try:
            upto = self._render(roles[: index + 1], texts[: index + 1], tools)
        except SampleError:
            if roles[index] == "gpt":
                raise
            return None
        before, _, behind = upto.rpartition(texts[index])
        if roles[index] != "gpt":
            return (None, 0, len(behind)) if around[index + 1].startswith(behind) else None
        prompt = self._render(roles[:index], texts[:index], tools, generate=True)
        opening = 0
        if not self._is_hybrid:
            written = before.rpartition(texts[index - 1])[2] if index else before
            if written != around[index] or not before.startswith(prompt):
                self._refuse_rewriting(roles, index)
            opening = len(before) - len(prompt)
        if not around[index + 1].startswith(behind):
            self._refuse_rewriting(roles, index)
        return opening, len(behind.rstrip()), len(behind)

    @staticmethod
    def _refuse_rewriting(roles: tuple[str, ...], index: int) -> NoReturn:
        raise SampleError(
            "chat_template_rewrites",
            f"answer {index + 1} of {len(roles)} turns is written in another way once the conversation goes on: make "
            "each answer the last of a sample of its own, or use a conv_style that writes all alike",
        )

    def _add_rendered(self, plan: list[Part], text: str, trained: bool) -> None:
        """Append what the template wrote: control tokens as ids, stand-ins as turns, the rest as text."""
        position = 0
        for match in self._STAND_IN.finditer(text):
            self._add_written(plan, text[position : match.start()], trained)
            plan.append(Part("turn", int(match[1]), trained))
            position = match.end()
        self._add_written(plan, text[position:], trained)

    def _add_written(self, plan: list[Part], text: str, trained: bool) -> None:
        for number, piece in enumerate(self._added.split(text)):
            if number % 2:
                token_id = self._tokenizer.convert_tokens_to_ids(piece)
                plan.append(Part("ids", np.array([token_id], dtype=np.int32), trained))
            elif piece:
                plan.append(Part("text", piece, trained))


def _append_text(parts: list[Part], text: str, trained: bool) -> None:
    """Text that follows text of the same kind is encoded with it, as in the string that the template writes."""
    before = parts[-1] if parts else None
    if before is not None and isinstance(before.value, str) and before.kind == "text" and before.trained == trained:
        parts[-1] = Part("text", before.value + text, trained)
    elif text:
        parts.append(Part("text", text, trained))


def trimmed(pieces: tuple[str, ...]) -> tuple[str, ...]:
    """The pieces of a turn whose text, images included, was stripped at both ends."""
    pieces = (pieces[0].lstrip(), *pieces[1:])
    return (*pieces[:-1], pieces[-1].rstrip())


@register_template("chat_template")
def _chat_template(tokenizer: PreTrainedTokenizerBase) -> TokenizerTemplate:
    return TokenizerTemplate(tokenizer)
