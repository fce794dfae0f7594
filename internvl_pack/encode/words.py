"""Byte-level BPE by remembered words: the same ids as the tokenizer, in a third of the time.

Byte-level BPE first cuts a text into words by a regular expression and then encodes each word by itself. Most of the
time goes into the cutting, by a Unicode regex engine that keeps offsets; and most words have been seen before. Where
all characters of a text are of kinds that no Unicode table disagrees on (letters, signs and punctuation of common
scripts, no combining marks, no digits but 0 to 9, no spaces but ASCII's), the expression is written for Python's `re`,
words are looked up, and unknown ones asked of the tokenizer's own model once. All other text is left to the tokenizer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Letters besides ASCII: Latin (without the long s, which folds to an s), Greek, Cyrillic, kana, CJK ideographs.
OTHER_LETTERS = "À-ÖØ-öø-žƀ-ɏΑ-ΡΣ-ΫάέήίΰαβγδεζηθικλμνξοπρςστυφχψωϊϋόύώЁА-яёぁ-ゖァ-ヺ一-龥"
# Signs and punctuation besides ASCII: Latin-1, typographic, arrows, mathematical, East Asian.
OTHER_SIGNS = "¡-©«¬®-±´¶-¸»¿×÷‐-‧‰-⁞←-⇿∀-⋿、。〃〈-】〔-〛！-／：-＠［-｀｛-･€™"

_LETTERS = f"A-Za-z{OTHER_LETTERS}"
_DIGITS = "0-9"
_not_plain = re.compile(f"[^\\x00-\\x7f{OTHER_LETTERS}{OTHER_SIGNS}]").search

_CUT_LIKE_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUT_PLAIN_LIKE_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nLN]?[L]+|%| ?[^\sLN]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Expression of a tokenizer -> the same for plain text, with L and N for the letters and digits of a class.
_PLAIN_EXPRESSIONS = {
    _CUT_LIKE_QWEN.replace("%", r"\p{N}"): _CUT_PLAIN_LIKE_QWEN.replace("%", "[N]"),  # Qwen2, Qwen2.5, Qwen3
    _CUT_LIKE_QWEN.replace("%", r"\p{N}{1,3}"): _CUT_PLAIN_LIKE_QWEN.replace("%", "[N]{1,3}"),  # Llama 3
}
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?[L]+| ?[N]+| ?[^\sLN]+|\s+(?!\S)|\s+"  # built into the byte-level step

_MAX_WORDS = 1 << 16  # about 10 MB

_PROBE = (
    "The quick  brown fox's 12 tails, don't YOU'LL see?\n\n\tdef f(x):\r\n    return x**2 + 0x1F  # why... \n"
    "a\x00b \x7f\x1c\x0b\x0c  e.g. http://x.org/?q=1&r=[2]{3}~ 'S 'Re ''d 1234567 \n \n x—“é”…’s 你好，世界！ ΑΩ Я×≤\n"
)


def _printable_bytes() -> list[str]:
    """GPT-2's stand-ins: each byte as a printable character."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


_BYTES = _printable_bytes()


class WordEncoder:
    """Encodes plain text for one tokenizer; `for_tokenizer` says whether it can."""

    def __init__(self, expression: str, model: Any, added_tokens: list[str]) -> None:
        self._cut = re.compile(expression.replace("L", _LETTERS).replace("N", _DIGITS), re.ASCII).findall
        self._model = model
        self._firsts = "".join(sorted({token[0] for token in added_tokens}))
        self._added = re.compile("|".join(map(re.escape, added_tokens)) or r"(?!)").search
        self._words: dict[str, list[int]] = {}

    @classmethod
    def for_tokenizer(cls, state: dict[str, Any], tokenizer: Tokenizer) -> WordEncoder | None:
        """From a tokenizer's JSON and the tokenizer; None for another kind, or if a probe is encoded differently."""
        model, expression = state["model"], _expression_of(state["pre_tokenizer"])
        if (
            expression is None
            or model["type"] != "BPE"
            or any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
            or (state["normalizer"] is not None and state["normalizer"]["type"] != "NFC")  # leaves plain text alone
        ):
            return None
        encoder = cls(expression, tokenizer.model, [token["content"] for token in state["added_tokens"]])
        if encoder.encode(_PROBE) != tokenizer.encode(_PROBE, add_special_tokens=False).ids:
            return None
        return encoder

    def encode(self, text: str) -> list[int] | None:
        """The ids; None for text that is not plain or holds the text of an added token."""
        if not text.isascii() and _not_plain(text):
            return None
        if any(first in text for first in self._firsts) and self._added(text):
            return None
        words, ids = self._words, []
        for word in self._cut(text):
            found = words.get(word)
            if found is None:
                found = self._learn(word)
            ids += found
        return ids

    def _learn(self, word: str) -> list[int]:
        if len(self._words) >= _MAX_WORDS:
            self._words.clear()
        found = [token.id for token in self._model.tokenize("".join([_BYTES[byte] for byte in word.encode()]))]
        if len(word) <= 40:
            self._words[word] = found
        return found


def _expression_of(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The expression that plain text is cut by; None for a pre-tokenizer that is not byte-level BPE's."""
    steps = [pre_tokenizer] if pre_tokenizer is not None else []
    if len(steps) == 1 and steps[0]["type"] == "Sequence":
        steps = steps[0]["pretokenizers"]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1 and steps[0].get("use_regex", True):
        return _GPT2
    if len(steps) == 2 and steps[0]["type"] == "Split" and not steps[-1].get("use_regex", True):
        expression = steps[0]["pattern"].get("Regex")
        as_is = steps[0]["behavior"] == "Isolated" and not steps[0].get("invert")
        return _PLAIN_EXPRESSIONS.get(expression) if as_is else None
    return None
