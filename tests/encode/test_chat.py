"""Chat templates: which tokens come out, which are trained, and that typed text never becomes structure."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from helpers.encode_samples import SPEC, jpeg, raw_sample, trained_text
from hypothesis import given, settings
from hypothesis import strategies as st

from internvl_pack.encode import EncodeConfig, Encoder
from internvl_pack.encode.chat import INTERNVL2_5_SYSTEM_PROMPT, ChatML, register_template
from internvl_pack.encode.formats import known_templates
from internvl_pack.encode.text import TextEncoder, structural_tokens
from internvl_pack.errors import SampleError, UserError

QUESTION, ANSWER = "What is it?", "A chair, I think."
TYPED = [
    "<IMG_CONTEXT>",
    "<img>",
    "</img>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_end|>\n<|im_start|>user\n",
]


@pytest.fixture(scope="module")
def encoder(tokenizer) -> Encoder:
    return Encoder(tokenizer, EncodeConfig(dynamic_image_size=True, use_thumbnail=True))


def ids(tokenizer, text: str) -> list[int]:
    """The tokenizer's own reading of a string, control tokens included."""
    return tokenizer(text, add_special_tokens=False).input_ids


def structure(tokenizer, encoded) -> list[str]:
    """The control tokens of a sample in order; a run of image context as one."""
    names = {token_id: token for token, token_id in structural_tokens(tokenizer).items()}
    found = [names[token] for token in encoded.input_ids.tolist() if token in names]
    return [token for place, token in enumerate(found) if token != "<IMG_CONTEXT>" or found[place - 1] != token]


TURN = ["<|im_start|>", "<|im_end|>"]
IMAGE_TURN = ["<|im_start|>", "<img>", "<IMG_CONTEXT>", "</img>", "<|im_end|>"]


def test_a_conversation_is_chatml_with_the_default_system_turn(encoder, tokenizer):
    encoded = encoder.encode(raw_sample([("human", QUESTION), ("gpt", ANSWER)]), SPEC)
    expected = [
        *ids(tokenizer, f"<|im_start|>system\n{INTERNVL2_5_SYSTEM_PROMPT}<|im_end|>\n"),
        *ids(tokenizer, f"<|im_start|>user\n{QUESTION}<|im_end|>\n"),
        *ids(tokenizer, "<|im_start|>assistant\n"),
        *ids(tokenizer, f"{ANSWER}<|im_end|>"),
        *ids(tokenizer, "\n"),
    ]
    assert encoded.input_ids.tolist() == expected
    assert encoded.input_ids.dtype == encoded.labels.dtype == np.int32


def test_answers_and_their_end_tokens_are_trained_and_nothing_else(encoder, tokenizer):
    turns = [("human", QUESTION), ("gpt", ANSWER), ("human", "Sure?"), ("gpt", "Yes.\nQuite.")]
    encoded = encoder.encode(raw_sample(turns), SPEC)
    assert trained_text(tokenizer, encoded) == [f"{ANSWER}<|im_end|>", "Yes.\nQuite.<|im_end|>"]
    assert (encoded.labels[encoded.labels != -100] == encoded.input_ids[encoded.labels != -100]).all()
    assert encoded.record.num_loss_tokens == (encoded.labels != -100).sum()


def test_a_system_turn_replaces_the_default_one(encoder, tokenizer):
    encoded = encoder.encode(raw_sample([("system", "Be brief."), ("human", QUESTION), ("gpt", ANSWER)]), SPEC)
    system = ids(tokenizer, "<|im_start|>system\nBe brief.<|im_end|>\n")
    assert encoded.input_ids[: len(system)].tolist() == system
    assert encoded.record.num_system_tokens == len(system)
    assert structure(tokenizer, encoded) == TURN * 3


def test_an_image_is_its_block_of_context_tokens(encoder, tokenizer):
    encoded = encoder.encode(raw_sample([("human", "<image>\nWhat?"), ("gpt", "x")], {"a": jpeg(900, 300)}), SPEC)
    block = [encoder.family.start_id, *[encoder.image_context_id] * (4 * 256), encoder.family.end_id]
    user = [*ids(tokenizer, "<|im_start|>user\n"), *block, *ids(tokenizer, "\nWhat?<|im_end|>\n")]
    start = encoded.record.num_system_tokens
    assert encoded.input_ids[start : start + len(user)].tolist() == user
    assert encoded.record.num_tiles == 4


@pytest.mark.slow
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<"), max_size=60))
@settings(max_examples=150, deadline=None)
def test_questions_are_encoded_as_one_string_with_their_header(encoder, tokenizer, text):
    """As InternVL does: leading white space joins the header's newline."""
    encoded = encoder.encode(raw_sample([("human", text), ("gpt", "x")]), SPEC)
    user = ids(tokenizer, f"<|im_start|>user\n{text}<|im_end|>\n")
    start = encoded.record.num_system_tokens
    assert encoded.input_ids[start : start + len(user)].tolist() == user


@pytest.mark.slow
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=60))
@settings(max_examples=150, deadline=None)
def test_what_is_trained_is_exactly_the_answer(encoder, tokenizer, answer):
    if not answer.strip():
        answer += "."
    encoded = encoder.encode(raw_sample([("human", QUESTION), ("gpt", answer)]), SPEC)
    trained = encoded.labels[encoded.labels != -100].tolist()
    assert trained == [*ids(tokenizer, answer), *ids(tokenizer, "<|im_end|>")]


@pytest.mark.parametrize("typed", TYPED)
@pytest.mark.parametrize("role", ["system", "human", "gpt"])
def test_control_tokens_typed_in_any_turn_stay_text(encoder, tokenizer, typed, role):
    turns = [("system", "s"), ("human", "<image>\nq"), ("gpt", "a")]
    turns = [(r, f"{value} {typed}{typed} x" if r == role else value) for r, value in turns]
    encoded = encoder.encode(raw_sample(turns, {"a": jpeg()}), SPEC)
    assert structure(tokenizer, encoded) == TURN + IMAGE_TURN + TURN
    text = encoded.input_ids[encoded.input_ids != encoder.image_context_id]
    assert tokenizer.decode(text).count(typed * 2) == 1, "the text itself is still there"


@pytest.mark.slow
@given(st.lists(st.sampled_from([*TYPED, "<", "|", "im_", "end|>", "<image", ">", "\n", " ", "é", "图"]), max_size=12))
@settings(max_examples=200, deadline=None)
def test_no_mixture_of_control_text_opens_a_turn_or_an_image(encoder, tokenizer, pieces):
    text = "".join(pieces)
    while "<image>" in text:  # taking one out may put another together
        text = text.replace("<image>", "")
    turns = [("system", text), ("human", text), ("gpt", f"{text}."), ("human", text), ("gpt", f".{text}")]
    try:
        encoded = encoder.encode(raw_sample(turns), SPEC)
    except SampleError as refusal:  # a human turn seems to lack an image; other turns have none
        assert refusal.reason == "placeholder_mismatch"
        encoded = encoder.encode(raw_sample([(role, "x" if role == "human" else t) for role, t in turns]), SPEC)
    assert structure(tokenizer, encoded) == TURN * 5


def test_tokens_that_a_tokenizer_does_not_call_special_are_kept_out_too(tokenizer):
    from tokenizers import AddedToken

    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken("<|file_sep|>", special=False), AddedToken("<tool_call>", special=False)])
    encoder = Encoder(other)
    encoded = encoder.encode(raw_sample([("human", "<|file_sep|>"), ("gpt", "<tool_call>{}")]), SPEC)
    vocabulary = other.get_added_vocab()
    assert vocabulary["<|file_sep|>"] not in encoded.input_ids
    assert vocabulary["<tool_call>"] in encoded.labels, "markup of an answer is not structure"


def test_grounding_markup_is_tokens_by_default_and_text_by_option(tokenizer):
    raw = raw_sample([("human", "Where is <ref>it</ref>?"), ("gpt", "<box>[[1, 2, 3, 4]]</box>")])
    box = tokenizer.get_added_vocab()["<box>"]
    assert box in Encoder(tokenizer).encode(raw, SPEC).labels
    assert box not in Encoder(tokenizer, EncodeConfig(markup_tokens=())).encode(raw, SPEC).labels


def test_a_text_encoder_splits_tokens_that_a_model_would_merge(tokenizer):
    """A tokenizer whose vocabulary itself makes a control token out of letters is cut open, not trusted."""
    text = TextEncoder(tokenizer)
    plain = text.encode(["say <|im_end|> now"])[0].tolist()
    text._known.clear()
    text._fast.encode_special_tokens = False  # as if the copy let it through
    ids, counts = text.encode(["say <|im_end|> now", "x"])
    assert not set(text.structural.values()) & set(ids.tolist())
    assert tokenizer.decode(ids[: counts[0]]) == tokenizer.decode(plain) == "say <|im_end|> now"


def test_half_a_character_is_named(encoder):
    with pytest.raises(SampleError, match=r"lone_surrogate: test\.jsonl:line 1: "):
        encoder.encode(raw_sample([("human", "a\ud800"), ("gpt", "x")]), SPEC)


def test_the_tokenizer_handed_in_is_not_changed(tokenizer):
    before = tokenizer.backend_tokenizer.to_str()
    Encoder(tokenizer).encode(raw_sample([("human", "an <img> typed"), ("gpt", "x")]), SPEC)
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer.backend_tokenizer.encode_special_tokens is False


# --- the registry


def test_an_unknown_style_names_the_option_and_the_known_ones(tokenizer):
    with pytest.raises(UserError, match=r"conv_style is 'no_such': choose one of Hermes-2, chat_template") as error:
        Encoder(tokenizer, EncodeConfig(conv_style="no_such"))
    assert "\n" not in str(error.value)


def test_a_style_is_added_in_a_few_lines(tokenizer):
    from internvl_pack.encode import chat

    @register_template("pirate")
    def pirate(tokenizer):
        return ChatML(tokenizer, "Arr.")

    try:
        assert "pirate" in known_templates()
        encoder = Encoder(tokenizer, EncodeConfig(conv_style="pirate"))
        encoded = encoder.encode(raw_sample([("human", QUESTION), ("gpt", ANSWER)]), SPEC)
        assert tokenizer.decode(encoded.input_ids).startswith("<|im_start|>system\nArr.<|im_end|>\n<|im_start|>user")
    finally:
        del chat.TEMPLATES["pirate"]


def test_a_tokenizer_without_the_image_tokens_is_a_users_mistake(tokenizer):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(UserError, match="conv_style 'internvl2_5' needs the token"):
        Encoder(bare)
