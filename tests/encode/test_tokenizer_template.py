"""The tokenizer's own chat template: what it writes is followed to the token, and what it would change is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from helpers.encode_samples import SPEC, jpeg, raw_sample, trained_text

from internvl_pack.encode import EncodeConfig, Encoder
from internvl_pack.encode.tokenizer_template import TokenizerTemplate
from internvl_pack.errors import SampleError, UserError
from internvl_pack.testing.tiny import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def encoder(tokenizer) -> Encoder:
    return Encoder(tokenizer, EncodeConfig(dynamic_image_size=True, use_thumbnail=True))


def with_template(tokenizer, template: str):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return Encoder(other, EncodeConfig(conv_style="chat_template")), other


def test_the_tokenizers_template_gives_chatml_where_that_is_what_it_says(encoder, tokenizer):
    own = Encoder(tokenizer, replace(encoder.config, conv_style="chat_template"))
    turns = [
        ("system", " Be brief.\n"),
        ("human", "\n<image>\nq <|im_end|> <image>"),
        ("gpt", "a <img>"),
        ("human", ""),
        ("gpt", "b"),
    ]
    raw = raw_sample(turns, {"a": jpeg(), "b": jpeg(900, 300)})
    one, other = encoder.encode(raw, SPEC), own.encode(raw, SPEC)
    assert one.input_ids.tolist() == other.input_ids.tolist()
    assert one.labels.tolist() == other.labels.tolist()
    assert one.record == other.record


LLAMA_LIKE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}<|im_start|>[INST] {{ m['content'] | trim }} [/INST]"
    "{% else %} {{ m['content'] | trim }}<|im_end|>{% endif %}{% endfor %}"
)


def test_a_template_that_trims_is_followed(tokenizer):
    encoder, _ = with_template(tokenizer, LLAMA_LIKE)
    encoded = encoder.encode(raw_sample([("human", "  q\n"), ("gpt", " a "), ("human", "r"), ("gpt", "b")]), SPEC)
    text = "<|im_start|>[INST] q [/INST] a<|im_end|><|im_start|>[INST] r [/INST] b<|im_end|>"
    assert tokenizer.decode(encoded.input_ids) == text
    assert trained_text(tokenizer, encoded) == [" a<|im_end|>", " b<|im_end|>"]


@pytest.mark.parametrize(
    "turns", [[("system", "s"), ("human", "q"), ("gpt", "a")], [("human", "q"), ("human", "r"), ("gpt", "a")]]
)
def test_a_conversation_that_the_template_refuses_is_rejected_with_its_words(tokenizer, turns):
    encoder, _ = with_template(tokenizer, LLAMA_LIKE)
    with pytest.raises(SampleError, match=r"chat_template_refuses: .*(no system turn|roles must alternate)"):
        encoder.encode(raw_sample(turns), SPEC)


FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


FOUR_TURNS = [("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", "b")]


def test_of_a_template_of_hybrid_thinking_texts_and_ends_are_trained(tokenizer):
    """The empty thoughts that it writes before the last answer alone are not, whatever the number of turns."""
    encoder, template = with_template(tokenizer, FORGETFUL)
    encoded = encoder.encode(raw_sample(FOUR_TURNS), SPEC)
    assert trained_text(tokenizer, encoded) == ["a<|im_end|>", "b<|im_end|>"]
    messages = [{"role": {"human": "user", "gpt": "assistant"}[role], "content": text} for role, text in FOUR_TURNS]
    assert encoded.input_ids.tolist() == template.apply_chat_template(messages, tokenize=True)["input_ids"]
    encoded = encoder.encode(raw_sample(FOUR_TURNS[:2]), SPEC)
    assert trained_text(tokenizer, encoded) == ["a<|im_end|>"]


def test_a_template_that_ends_the_last_answer_otherwise_is_refused_with_what_to_do(tokenizer):
    encoder, _ = with_template(tokenizer, FORGETFUL.replace("<|im_end|>", "{{ '!' if loop.last }}<|im_end|>"))
    with pytest.raises(
        SampleError, match=r"chat_template_rewrites: .*answer 2 of 4 turns .*: make each answer the last"
    ):
        encoder.encode(raw_sample(FOUR_TURNS), SPEC)


@pytest.mark.parametrize("form", [CHAT_TEMPLATE, FORGETFUL])
def test_a_template_is_rendered_as_often_for_many_turns_as_for_few(tokenizer, form, monkeypatch):
    encoder, _ = with_template(tokenizer, form)
    calls = []
    render = TokenizerTemplate._render
    monkeypatch.setattr(TokenizerTemplate, "_render", lambda self, *a, **k: calls.append(1) or render(self, *a, **k))
    counts = []
    for pairs in (4, 100):
        calls.clear()
        encoded = encoder.encode(raw_sample([("human", "q"), ("gpt", "a")] * pairs), SPEC)
        assert encoded.record.num_loss_tokens == pairs * 2
        assert sum(span.ends_turn for span in encoded.record.spans) == pairs
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_a_template_that_changes_texts_is_caught(tokenizer):
    encoder, _ = with_template(
        tokenizer, "{% for m in messages %}<|im_start|>{{ m['content'] | replace('a', 'A') }}<|im_end|>{% endfor %}"
    )
    assert encoder.encode(raw_sample([("human", "q"), ("gpt", "b")]), SPEC).record.num_loss_tokens
    with pytest.raises(SampleError, match="chat_template_rewrites"):
        encoder.encode(raw_sample([("human", "q"), ("gpt", "a")]), SPEC)


@pytest.mark.parametrize(
    "template", [None, "{{ raise_exception('never') }}", "{{ messages[-1]['content'] }}", "{% if %}"]
)
def test_a_useless_template_is_a_users_mistake(tokenizer, template):
    with pytest.raises(UserError, match="conv_style 'chat_template'"):
        with_template(tokenizer, template)
