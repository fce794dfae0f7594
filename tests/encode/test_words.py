"""Remembered words give the tokenizer's ids, or leave the text to it."""

from __future__ import annotations

import json
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from internvl_pack.encode import words
from internvl_pack.encode.words import WordEncoder
from internvl_pack.testing.tiny import conversation_texts

EXPRESSIONS = list(words._PLAIN_EXPRESSIONS)
FIRST = "aZé ſ\u0301ΩЯかカ一0٣²\t\n\r\x0b\x1c\x85\u00a0\u2028'’“—…€×←≤、！<|>_-\u200d한"
texts = st.text(alphabet=st.one_of(st.sampled_from(FIRST), st.characters(codec="utf-8")), max_size=40)
plain = st.text(alphabet="abstT'dlLrRe0129 \t\n\r.,!?\"(-éßЯ一か—’…！×<", max_size=40)


def bpe(demo_dir, pre_tokenizer, normalizer=None) -> Tokenizer:
    """A small byte-level BPE of the given kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(conversation_texts(demo_dir / "demo.jsonl"), trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    return tokenizer


def split(expression: str):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), behavior="isolated"), byte_level])


def word_encoder(tokenizer: Tokenizer) -> WordEncoder | None:
    return WordEncoder.for_tokenizer(json.loads(tokenizer.to_str()), tokenizer)


@pytest.fixture(scope="module", params=["qwen", "llama3", "gpt2"])
def pair(request, demo_dir) -> tuple[Tokenizer, WordEncoder]:
    if request.param == "gpt2":
        tokenizer = bpe(demo_dir, pre_tokenizers.ByteLevel(add_prefix_space=False))
    else:
        tokenizer = bpe(demo_dir, split(EXPRESSIONS[request.param == "llama3"]), normalizers.NFC())
    encoder = word_encoder(tokenizer)
    assert encoder is not None
    return tokenizer, encoder


@pytest.mark.slow
@given(texts)
@settings(max_examples=300, deadline=None)
def test_any_text_has_the_tokenizers_ids_or_is_left_to_it(pair, text):
    tokenizer, encoder = pair
    found = encoder.encode(text)
    assert found is None or found == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.slow
@given(plain)
@settings(max_examples=400, deadline=None)
def test_plain_text_has_the_tokenizers_ids(pair, text):
    tokenizer, encoder = pair
    assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_real_text_has_the_tokenizers_ids_and_is_mostly_plain(pair, demo_dir):
    tokenizer, encoder = pair
    turns = conversation_texts(demo_dir / "demo.jsonl")
    found = [encoder.encode(text) for text in turns]
    assert sum(ids is not None for ids in found) > 0.9 * len(turns)
    for text, ids in zip(turns, found, strict=True):
        assert ids is None or ids == tokenizer.encode(text, add_special_tokens=False).ids


def test_text_with_an_added_token_is_left_to_the_tokenizer(pair):
    assert pair[1].encode("x <|im_end|>") is None and pair[1].encode("x <|im_en d|>") is not None


def test_forgetting_words_changes_nothing(pair, monkeypatch):
    tokenizer, encoder = pair
    monkeypatch.setattr(words, "_MAX_WORDS", 3)
    text = "one two three four five six one two " + "seven" * 50
    assert encoder.encode(text) == encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert len(encoder._words) <= 3


@pytest.mark.parametrize(
    "ranges, kinds", [(words.OTHER_LETTERS, "L"), (words.OTHER_SIGNS, "PS")], ids=["letters", "signs"]
)
def test_plain_characters_are_of_one_kind_and_never_compose(ranges, kinds):
    """So that no version of Unicode cuts them in another way, and NFC leaves any row of them alone."""
    found = re.findall(f"[{ranges}]", "".join(map(chr, range(0x110000))))
    assert len(found) > 400
    for character in found:
        assert unicodedata.category(character)[0] in kinds and not unicodedata.combining(character)
        assert unicodedata.is_normalized("NFC", character) and not character.isspace()
        assert character.casefold().upper() not in ("S", "T", "RE", "VE", "M", "LL", "D"), "no contraction by folding"


@pytest.mark.parametrize(
    "pre_tokenizer, normalizer",
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
        (pre_tokenizers.Whitespace(), None),
        (split(r"\p{L}+|\s+|."), None),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase()),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFKC()),
    ],
)
def test_other_tokenizers_are_left_alone(demo_dir, pre_tokenizer, normalizer):
    assert word_encoder(bpe(demo_dir, pre_tokenizer, normalizer)) is None


def test_the_tiny_tokenizer_is_covered(tokenizer):
    assert word_encoder(tokenizer.backend_tokenizer) is not None
