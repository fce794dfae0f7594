"""Texts of any size: the same ids in bounded memory, or refused by name."""

from __future__ import annotations

import time

import numpy as np
import pytest
from helpers.encode_samples import SPEC, raw_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from internvl_pack.encode import EncodeConfig, Encoder
from internvl_pack.encode import text as text_module
from internvl_pack.encode.conversation import MAX_IMAGES, MAX_TURNS
from internvl_pack.encode.text import MAX_STRETCH_BYTES, MAX_TEXT_BYTES, TextEncoder
from internvl_pack.errors import SampleError


@pytest.fixture(scope="module")
def encoder(tokenizer) -> Encoder:
    return Encoder(tokenizer)


@pytest.mark.slow
@given(
    st.lists(st.text(alphabet="ab Zé\u0301图.\n\r\t 1'<|im_end|>", max_size=40), min_size=1, max_size=4),
    st.sampled_from(["qwen", "gpt2"]),
)
@settings(max_examples=300, deadline=None)
def test_a_long_text_encodes_as_a_short_one(tokenizer, texts, kind):
    encoder = TextEncoder(tokenizer)
    if kind == "gpt2":
        from tokenizers import pre_tokenizers

        fast = encoder._fast
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoder._words = None
    whole, counts = encoder.encode(texts)
    pieces = [piece for text in texts for piece in text_pieces(text)]
    assert "".join(pieces) == "".join(texts)
    cut, _ = encoder.encode(pieces)
    assert whole.tolist() == cut.tolist() and sum(counts) == len(whole)


def text_pieces(text: str) -> list[str]:
    """Cut at every line that may be cut at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_PIECE", 1)
        return list(text_module._pieces(text))


def test_long_texts_of_a_sample_keep_their_counts(tokenizer):
    encoder = TextEncoder(tokenizer)
    texts = ["short", "A line of words, é<|im_end|>.\nNext\n" * 4000, "", "图" * 1000]
    ids, counts = encoder.encode(texts)
    alone = [encoder.encode([text[:3000]])[0] for text in texts]
    ends = np.cumsum(counts)
    for start, count, first in zip(ends - counts, counts, alone, strict=True):
        same = min(count, len(first)) - 20  # the short one is cut inside a word
        assert ids[start : start + same].tolist() == first[:same].tolist() if same > 0 else True
    assert ends[-1] == len(ids) and counts[2] == 0
    assert not set(ids.tolist()) & set(encoder.structural.values())


@pytest.mark.parametrize(
    "text",
    [
        "a" * (MAX_STRETCH_BYTES + 1),
        "图" * (MAX_STRETCH_BYTES // 2),
        "a" + " " * MAX_STRETCH_BYTES,
        "ab\n" * MAX_TEXT_BYTES,
    ],
)
def test_a_text_that_would_take_the_workers_memory_is_refused_at_once(encoder, text):
    started = time.process_time()
    with pytest.raises(SampleError) as caught:
        encoder.encode(raw_sample([("human", "q"), ("gpt", text)]), SPEC)
    assert caught.value.reason == "text_too_long" and len(str(caught.value)) < 200
    assert time.process_time() - started < 5


@pytest.mark.slow
@pytest.mark.parametrize("style", ["internvl2_5", "chat_template"])
def test_a_record_of_any_number_of_turns_takes_seconds_at_most(tokenizer, style):
    encoder = Encoder(tokenizer, EncodeConfig(conv_style=style))
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    started = time.process_time()
    for number in (MAX_TURNS + 2, 500_000):
        with pytest.raises(SampleError, match="too_many_turns"):
            encoder.encode(raw_sample(turns * (number // 2)), SPEC)
    assert time.process_time() - started < 5


def test_a_record_of_too_many_images_is_refused_before_a_file_is_opened(encoder):
    raw = raw_sample([("human", "q"), ("gpt", "a")], image=["a.jpg"] * (MAX_IMAGES + 1))
    with pytest.raises(SampleError, match="too_many_images"):
        encoder.encode(raw, SPEC)
