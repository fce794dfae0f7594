"""InternVL's other chat formats: ids and labels, written by hand from the formats' strings.

A conversation is written as runs of text, a trained one in `[...]` of the format's own string, and read by the
tokenizer run by run: control tokens part the runs, so that no word reaches from one into the next.
"""

from __future__ import annotations

import pytest
from helpers.chat_tokenizers import HARMONY, PHI3, with_bos, with_tokens
from helpers.encode_samples import SPEC, expected, jpeg, raw_sample

from internvl_pack.encode import EncodeConfig, Encoder
from internvl_pack.encode.formats import known_templates
from internvl_pack.errors import SampleError, UserError

SYSTEM = "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"
GPT_OSS_SYSTEM = """You are InternVL, a large language model trained by Shanghai AI Laboratory.
Knowledge cutoff: 2024-06
Current date: 2025-08-06

Reasoning: low

# Valid channels: final. Channel must be included for every message."""
TWO_ROUNDS = [("human", "What is it?"), ("gpt", "A chair."), ("human", "Sure?"), ("gpt", "Yes.\nQuite.")]


def encoded(tokenizer, conv_style, turns, images=None, **fields):
    encoder = Encoder(tokenizer, EncodeConfig(conv_style=conv_style, tokens_per_tile=4))
    sample = encoder.encode(raw_sample(turns, images, **fields), SPEC)
    return sample.input_ids.tolist(), sample.labels.tolist()


def test_the_formats_of_internvl_are_known():
    assert {"Hermes-2", "internlm2-chat", "phi3-chat", "internvl_zh", "internvl3_5_gpt_oss", "internvl2_5"} <= set(
        known_templates()
    )


def test_hermes_2_has_no_line_break_between_turns(tokenizer):
    assert encoded(tokenizer, "Hermes-2", TWO_ROUNDS) == expected(
        tokenizer,
        f"<|im_start|>system\n{SYSTEM}<|im_end|><|im_start|>user\nWhat is it?<|im_end|><|im_start|>assistant\n",
        ["A chair.<|im_end|>"],
        "<|im_start|>user\nSure?<|im_end|><|im_start|>assistant\n",
        ["Yes.\nQuite.<|im_end|>"],
    )


def test_hermes_2_leaves_out_an_answer_that_nothing_was_asked_for(tokenizer):
    assert encoded(tokenizer, "Hermes-2", [("gpt", "Hello!"), *TWO_ROUNDS]) == encoded(
        tokenizer, "Hermes-2", TWO_ROUNDS
    )


def test_hermes_2_with_an_image(tokenizer):
    got = encoded(tokenizer, "Hermes-2", [("human", "<image>\nWhat?"), ("gpt", "A cat.")], {"a": jpeg(40, 40)})
    assert got == expected(
        tokenizer,
        f"<|im_start|>system\n{SYSTEM}<|im_end|><|im_start|>user\n",
        "<img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>",
        "\nWhat?<|im_end|><|im_start|>assistant\n",
        ["A cat.<|im_end|>"],
    )


def test_a_system_turn_takes_the_place_of_the_default_one(tokenizer):
    assert encoded(tokenizer, "Hermes-2", [("system", "Be brief."), ("human", "Hi"), ("gpt", "Ho")]) == expected(
        tokenizer,
        "<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\nHi<|im_end|><|im_start|>assistant\n",
        ["Ho<|im_end|>"],
    )


def test_internlm2_chat_begins_with_bos_and_strips_texts(tokenizer):
    other = with_bos(tokenizer)
    turns = [("human", "  What is it?\n"), ("gpt", "\n\nA chair. "), ("human", "Sure?"), ("gpt", "Yes.")]
    assert encoded(other, "internlm2-chat", turns) == expected(
        other,
        f"<s><|im_start|>system\n{SYSTEM}<|im_end|><|im_start|>user\nWhat is it?<|im_end|><|im_start|>assistant\n",
        ["A chair.<|im_end|>"],
        "<|im_start|>user\nSure?<|im_end|><|im_start|>assistant\n",
        ["Yes.<|im_end|>"],
    )


def test_phi3_chat(tokenizer):
    other = with_tokens(tokenizer, PHI3)
    assert encoded(other, "phi3-chat", TWO_ROUNDS) == expected(
        other,
        f"<|system|>\n{SYSTEM}<|end|><|user|>\nWhat is it?<|end|><|assistant|>\n",
        ["A chair.<|end|>"],
        "<|user|>\nSure?<|end|><|assistant|>\n",
        ["Yes.\nQuite.<|end|>"],
    )


def test_phi3_chat_where_role_tokens_take_the_white_space_after_them(tokenizer):
    """As in Phi-3's own tokenizer: the line break is gone, and so is white space that a text begins with."""
    other = with_tokens(tokenizer, PHI3, rstrip=True)
    assert encoded(other, "phi3-chat", [("human", "\n What is it?"), ("gpt", "  A chair.")]) == expected(
        other,
        f"<|system|>{SYSTEM}<|end|><|user|>What is it?<|end|><|assistant|>",
        ["A chair.<|end|>"],
    )


def test_internvl_zh_has_words_for_roles(tokenizer):
    other = with_bos(tokenizer)
    assert encoded(other, "internvl_zh", TWO_ROUNDS) == expected(
        other,
        *("<s>", " <human>: What is it?", " <bot>:"),
        *([" A chair."], ["</s>"]),
        *("<human>: Sure?", " <bot>:"),
        *([" Yes.\nQuite."], ["</s>"]),
    )


def test_gpt_oss_trains_the_channel_and_ends_the_last_answer_with_return(tokenizer):
    other = with_tokens(tokenizer, HARMONY)
    assert encoded(other, "internvl3_5_gpt_oss", TWO_ROUNDS) == expected(
        other,
        f"<|start|>system<|message|>{GPT_OSS_SYSTEM}<|end|>",
        "<|start|>user<|message|>What is it?<|end|><|start|>assistant",
        ["<|channel|>final<|message|>A chair.<|end|>"],
        "<|start|>user<|message|>Sure?<|end|><|start|>assistant",
        ["<|channel|>final<|message|>Yes.\nQuite.<|return|>"],
    )


def test_gpt_oss_has_turns_from_functions(tokenizer):
    other = with_tokens(tokenizer, HARMONY)
    turns = [("system", "S"), ("human", "2+2?"), ("gpt", "add(2, 2)"), ("function", "4"), ("gpt", "It is 4.")]
    assert encoded(other, "internvl3_5_gpt_oss", turns) == expected(
        other,
        "<|start|>system<|message|>S<|end|><|start|>user<|message|>2+2?<|end|><|start|>assistant",
        ["<|channel|>final<|message|>add(2, 2)<|end|>"],
        "<|start|>tool<|message|>4<|end|><|start|>assistant",
        ["<|channel|>final<|message|>It is 4.<|return|>"],
    )


@pytest.mark.parametrize("conv_style", ["internvl2_5", "Hermes-2", "chat_template"])
def test_other_formats_have_none(tokenizer, conv_style):
    with pytest.raises(SampleError, match=r"role 'function': known are .*gpt.*system") as caught:
        encoded(tokenizer, conv_style, [("human", "2+2?"), ("function", "4"), ("gpt", "4")])
    assert caught.value.reason == "unknown_role"


@pytest.mark.parametrize("conv_style", ["internvl2_5", "internlm2-chat", "chat_template"])
def test_a_pretrain_text_is_trained_as_it_stands(tokenizer, conv_style):
    assert encoded(tokenizer, conv_style, [("pretrain", "  Once upon a time.\n")]) == expected(
        tokenizer, ["  Once upon a time.\n"]
    )


def test_a_pretrain_text_with_images_trains_all_but_their_blocks(tokenizer):
    other = with_bos(tokenizer)
    images = {"a": jpeg(40, 40), "b": jpeg(41, 40)}
    block = "<img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>"
    assert encoded(other, "internlm2-chat", [("pretrain", "See <image> and\n<image>.")], images) == expected(
        other, "<s>", ["See "], block, [" and\n"], block, ["."]
    )


def test_an_image_without_a_placeholder_comes_before_the_text(tokenizer):
    got = encoded(tokenizer, "internvl2_5", [("pretrain", "A cat.")], {"a": jpeg(40, 40)})
    assert got == expected(tokenizer, "<img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>", ["\nA cat."])


@pytest.mark.parametrize(
    "turns, reason",
    [
        ([("pretrain", "a"), ("gpt", "b")], "pretrain_turn_not_alone"),
        ([("human", "a"), ("pretrain", "b")], "pretrain_turn_not_alone"),
        ([("pretrain", " \n")], "no_trained_token"),
    ],
)
def test_pretrain_texts_that_cannot_be_used(tokenizer, turns, reason):
    with pytest.raises(SampleError) as caught:
        encoded(tokenizer, "internvl2_5", turns)
    assert caught.value.reason == reason


def test_preference_data_is_refused_by_name(tokenizer):
    with pytest.raises(SampleError, match="with --objective dpo or mpo") as caught:
        encoded(tokenizer, "internvl2_5", None, question="Which?", chosen="This.", rejected="That.")
    assert caught.value.reason == "preference_data"


@pytest.mark.parametrize(
    "conv_style, token",
    [("phi3-chat", "<|system|>"), ("internvl3_5_gpt_oss", "<|start|>"), ("internvl_zh", "</s>")],
)
def test_a_tokenizer_without_the_format_is_refused(tokenizer, conv_style, token):
    with pytest.raises(UserError) as caught:
        Encoder(tokenizer, EncodeConfig(conv_style=conv_style))
    assert token in str(caught.value)


def test_no_space_is_put_before_an_answer_where_the_tokenizer_does_so_at_a_beginning_only():
    """Llama's tokenizer: after a control token `a` is `a`, though by itself it is `▁a`."""
    from transformers import LlamaTokenizer

    words = ["▁a", "▁b", "<", ">", ":", "\n", *"abhumnsertiy▁"]
    pieces = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = LlamaTokenizer(vocab=pieces, merges=[("▁", "a"), ("▁", "b")], legacy=False)
    tokenizer.add_tokens([*PHI3, "<img>", "</img>", "<IMG_CONTEXT>"], special_tokens=True)
    ids, labels = encoded(tokenizer, "phi3-chat", [("system", "a"), ("human", "b a"), ("gpt", "a b")])
    turns = ["<|system|> \n a <|end|>", "<|user|> \n b ▁a <|end|>", "<|assistant|> \n a ▁b <|end|>"]
    assert tokenizer.convert_ids_to_tokens(ids) == " ".join(turns).split(" ")
    assert tokenizer("a").tokens() == ["▁a"], "the tokenizer itself is not changed"
    assert [label for label in labels if label != -100] == ids[-3:]
