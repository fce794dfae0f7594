"""Text to token ids in which nothing that people typed can become structure.

A tokenizer turns the text `<IMG_CONTEXT>` into the id that the model reads as an image slot, and `<|im_end|>` into the
end of a turn. Content is therefore encoded by a private copy of the tokenizer that does not know its structural
tokens, and the result is checked: no structural id can come out of content.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SampleError, UserError
from .words import WordEncoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Markup that InternVL's annotations carry in plain text and that its checkpoints read as single tokens.
# It opens neither an image slot nor a turn, so it may come from text.
MARKUP_TOKENS = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>")

# Structure whatever the tokenizer says of it: some checkpoints register these as ordinary added tokens.
_STRUCTURAL = re.compile(r"<\|.*\|>|</?img>|<IMG_CONTEXT>|<image>|<video>|\[IMG\]|</?s>", re.DOTALL)

# Text of a sample, in UTF-8: 2 million tokens, 1 to 4 s to encode.
MAX_TEXT_BYTES = 8 << 20
# Text without a line break to cut at. A tokenizer takes up to 350 bytes of memory for a byte of it.
MAX_STRETCH_BYTES = 1 << 20
_PIECE = 1 << 16  # characters that are encoded at a time where lines allow it
# Where text can be cut and no token changes, whichever of the expressions of words.py a tokenizer cuts words by.
_LINE_TO_CUT_AT = re.compile(r"(?<=\S)\n(?=[A-Za-z])")

_SHORT, _MAX_KNOWN = 200, 4096  # characters of a text worth remembering, texts remembered (about 4 MB)


def structural_tokens(
    tokenizer: PreTrainedTokenizerBase, markup_tokens: Iterable[str] = MARKUP_TOKENS
) -> dict[str, int]:
    """{token: id} of the added tokens that must never come out of text.

    All that the tokenizer calls special, except `markup_tokens`, and what looks like structure (`<|...|>`, `<img>`)
    without being called special. Other added tokens (`<tool_call>`, `<think>`, a user's own) stay tokens in text.
    """
    markup = set(markup_tokens)
    special = set(tokenizer.all_special_tokens)
    return {
        token.content: token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if (token.special or token.content in special or _STRUCTURAL.fullmatch(token.content))
        and token.content not in markup
    }


class TextEncoder:
    """Encodes text that people wrote. Picklable; about a million tokens a second a core where WordEncoder
    knows the tokenizer, a third of that otherwise.

    Args:
        tokenizer: a Hugging Face tokenizer; it is not changed. Fast ones are copied, the vocabulary aside.
        markup_tokens: special tokens that text may contain as tokens.

    Raises:
        UserError: a structural token still comes out of its own text, and the tokenizer cannot be kept from it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, markup_tokens: Iterable[str] = MARKUP_TOKENS) -> None:
        # Workers are processes, a core each: the tokenizers library's own threads would only fight them, and must not
        # exist when workers are forked. A user who has set the variable is not overruled.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.structural = structural_tokens(tokenizer, markup_tokens)
        self._forbidden = np.zeros(max(self.structural.values(), default=0) + 2, dtype=bool)
        self._forbidden[list(self.structural.values())] = True
        if tokenizer.unk_token_id is not None:  # stands for a character that the vocabulary lacks
            self._forbidden[tokenizer.unk_token_id : tokenizer.unk_token_id + 1] = False
        self._pattern = re.compile("|".join(map(re.escape, sorted(self.structural, key=len, reverse=True))) or r"(?!)")
        self._slow: PreTrainedTokenizerBase | None = None
        self._fast: Tokenizer | None = None
        self._words: WordEncoder | None = None
        self._known: dict[str, list[int]] = {}
        if getattr(tokenizer, "is_fast", False):
            backend: Tokenizer = tokenizer.backend_tokenizer
            identity, self._layout = _with_special(backend.to_str(), self.structural)
            self._load(_sharing_model(backend, self._layout["added_tokens"]) or identity)
        else:
            self._slow = tokenizer
            identity = json.dumps(tokenizer.get_vocab(), sort_keys=True)
        # Tells tokenizers apart: the same text, the same ids.
        self.digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        leaks = [token for token in self.structural if self._has_structure(self._encode([token])[0])]
        if any(self._has_structure(self._encode_apart(token)) for token in leaks):
            raise UserError(
                f"the tokenizer turns the text {leaks[0]!r} into a control token and cannot be kept from it; "
                "use a fast tokenizer (tokenizer.json) for model_name_or_path"
            )

    def __getstate__(self) -> dict[str, Any]:
        as_json = None if self._fast is None else self._fast.to_str()
        return self.__dict__ | {"_known": {}, "_words": None, "_fast": as_json}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["_fast"] is not None:
            self._load(state["_fast"])

    def _load(self, tokenizer: Tokenizer | str) -> None:
        """From a tokenizer of the tokenizers library, or its JSON."""
        from tokenizers import Tokenizer

        self._fast = Tokenizer.from_str(tokenizer) if isinstance(tokenizer, str) else tokenizer
        _go_on(self._fast)
        self._fast.encode_special_tokens = True  # not part of the JSON form: set at every load
        self._words = WordEncoder.for_tokenizer(self._layout, self._fast)

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        """(ids of all texts in a row, int32; how many each text has).

        Raises:
            SampleError: `lone_surrogate` (half a character, as a JSON escape can write it), `text_too_long`.
        """
        if sum(map(len, texts)) > _PIECE:
            return self._encode_long(texts)
        fresh = [text for text in texts if text not in self._known]
        found = dict(zip(fresh, self._encode(fresh), strict=True)) if fresh else {}
        pieces = [self._known[text] if text not in found else found[text] for text in texts]
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        # The same few questions and line ends come again and again.
        self._known.update((text, ids) for text, ids in found.items() if len(text) <= _SHORT)
        return self._joined(texts, pieces)

    def _encode_long(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        """As `encode`, piece by piece: a tokenizer's memory is that of one piece."""
        size = sum(_num_bytes(text) for text in texts)
        if size > MAX_TEXT_BYTES:
            raise SampleError("text_too_long", f"{size} bytes of text, more than {MAX_TEXT_BYTES}")
        runs, counts = [], []
        for text in texts:
            counts.append(0)
            for piece in _pieces(text) if self._words is not None else [text]:
                if (size := _num_bytes(piece)) > MAX_STRETCH_BYTES:
                    detail = f"{size} bytes of text without a line break, more than {MAX_STRETCH_BYTES}"
                    raise SampleError("text_too_long", f"{detail}: {piece[:40]!r}...")
                ids, _ = self._joined([piece], self._encode([piece]))
                runs.append(ids)
                counts[-1] += len(ids)
        return np.concatenate(runs), counts

    def _joined(self, texts: Sequence[str], pieces: list[list[int]]) -> tuple[np.ndarray, list[int]]:
        """As `encode`, of texts with their ids. Where structure comes out of them they are encoded apart."""
        ids = np.array([token for piece in pieces for token in piece], dtype=np.int32)
        if self._has_structure(ids):
            pieces = [self._encode_apart(text) for text in texts]
            ids = np.array([token for piece in pieces for token in piece], dtype=np.int32)
            if self._has_structure(ids):
                raise SampleError("special_token_in_text", "a control token comes out of the text itself")
        return ids, [len(piece) for piece in pieces]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            if self._slow is not None:
                return self._slow(list(texts), add_special_tokens=False, split_special_tokens=True).input_ids
            ids = [None if self._words is None else self._words.encode(text) for text in texts]
            rest = [text for text, found in zip(texts, ids, strict=True) if found is None]
            # The batch call of "fast" leaves out character offsets: a fifth less time.
            assert self._fast is not None, "one of the two is there"
            encoded = iter(self._fast.encode_batch_fast(rest, add_special_tokens=False) if rest else ())
            return [next(encoded).ids if found is None else found for found in ids]
        except (TypeError, UnicodeEncodeError):
            if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
                raise SampleError("lone_surrogate", "a turn holds half of a surrogate pair, which is no text") from None
            raise

    def _encode_apart(self, text: str) -> list[int]:
        """Encode with every structural token's text cut after its first character: slower, proof to any tokenizer."""
        cuts = [0, *(match.start() + 1 for match in self._pattern.finditer(text)), len(text)]
        pieces = self._encode([text[start:stop] for start, stop in pairwise(cuts)])
        return [token for piece in pieces for token in piece]

    def _has_structure(self, ids: Sequence[int] | np.ndarray) -> bool:
        ids = np.asarray(ids, dtype=np.int32)
        return bool(self._forbidden[np.minimum(ids, len(self._forbidden) - 1)].any())


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces of some _PIECE characters that encode as they do together."""
    start = 0
    while len(text) - start > _PIECE and (found := _LINE_TO_CUT_AT.search(text, start + _PIECE)) is not None:
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def _sharing_model(tokenizer: Tokenizer, added_tokens: list[dict]) -> Tokenizer | None:
    """A tokenizer with these added tokens and all else of `tokenizer`, whose vocabulary it shares (43 MB for Qwen2.5).

    None where the library would number the added tokens in another way.
    """
    from tokenizers import AddedToken, Tokenizer

    shared = Tokenizer(tokenizer.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(tokenizer, name) is not None:
            setattr(shared, name, getattr(tokenizer, name))
    for token in sorted(added_tokens, key=lambda token: token["id"]):
        options = {name: value for name, value in token.items() if name not in ("id", "content")}
        shared.add_tokens([AddedToken(token["content"], **options)])
    same = {token["id"]: token["content"] for token in added_tokens}
    return shared if {n: t.content for n, t in shared.get_added_tokens_decoder().items()} == same else None


def _go_on(tokenizer: Tokenizer) -> None:
    """Text of turns never begins a sequence: no space is put before it where a tokenizer does so at a beginning only.

    Llama's does (`legacy` false). One that puts a space behind every control token goes on doing it.
    """
    from tokenizers.pre_tokenizers import Metaspace

    before = tokenizer.pre_tokenizer
    if isinstance(before, Metaspace) and before.prepend_scheme == "first":  # a new one: it may be shared
        tokenizer.pre_tokenizer = Metaspace(before.replacement, prepend_scheme="never", split=before.split)


def _with_special(tokenizer_json: str, structural: dict[str, int]) -> tuple[str, dict]:
    """(JSON of the tokenizer with exactly the structural tokens marked special, so that special can be split as text;
    the same without its vocabulary)."""
    state = json.loads(tokenizer_json)
    state["truncation"] = state["padding"] = None
    for token in state["added_tokens"]:
        token["special"] = token["content"] in structural
    layout = state | {
        "model": {name: value for name, value in state["model"].items() if name not in ("vocab", "merges")}
    }
    return json.dumps(state, ensure_ascii=False), layout
