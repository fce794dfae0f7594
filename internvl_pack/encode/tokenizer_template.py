"""The chat format `chat_template`: the template that the tokenizer brings along."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..errors import SampleError, UserError
from .chat import IMAGE, Part, Turn, trimmed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        self._structure = re.compile("(" + "|".join(["\ue000[0-9]+\ue001", *map(re.escape, tokens)]) + ")")
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
        if (token := self._structure.search(written)) is not None:
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
        for number, piece in enumerate(self._structure.split(text)):
            if number % 2 == 0:
                if piece:
                    plan.append(Part("text", piece, trained))
            elif stand_in := self._STAND_IN.fullmatch(piece):
                plan.append(Part("turn", int(stand_in[1]), trained))
            else:
                token_id = self._tokenizer.convert_tokens_to_ids(piece)
                plan.append(Part("ids", np.array([token_id], dtype=np.int32), trained))


def _append_text(parts: list[Part], text: str, trained: bool) -> None:
    """Text that follows text of the same kind is encoded with it, as in the string that the template writes."""
    before = parts[-1] if parts else None
    if before is not None and isinstance(before.value, str) and before.kind == "text" and before.trained == trained:
        parts[-1] = Part("text", before.value + text, trained)
    elif text:
        parts.append(Part("text", text, trained))
