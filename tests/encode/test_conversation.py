"""One verdict for each odd shape of a record: see the tables of docs/encoding.md."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.encode_samples import SPEC, case_samples, jpeg, raw_sample

from internvl_pack.encode import EncodeConfig, Encoder
from internvl_pack.errors import SampleError

ONE = {"a.jpg": jpeg(448, 448)}
TWO = {"a.jpg": jpeg(448, 448), "b.jpg": jpeg(900, 300)}


@pytest.fixture(scope="module")
def encoder(tokenizer) -> Encoder:
    return Encoder(tokenizer, EncodeConfig(dynamic_image_size=True, use_thumbnail=True))


def verdict(encoder: Encoder, raw) -> str | int:
    """The reason of a rejection, or how many images a sample has."""
    try:
        return len(encoder.encode(raw, SPEC).images)
    except SampleError as error:
        assert error.source == raw.origin and raw.origin not in error.detail, "a rejection says where, once"
        return error.reason


def shown(encoder: Encoder, tokenizer, raw) -> str:
    """A sample's text after its system turn, each image's block as [tiles]."""
    encoded = encoder.encode(raw, SPEC)
    ids = encoded.input_ids[encoded.record.num_system_tokens :].tolist()
    text = tokenizer.decode([token for token in ids if token != encoder.image_context_id])
    for image in encoded.images:
        text = text.replace("<img></img>", f"[{image.grid.num_tiles}]", 1)
    return text


def trained(encoder: Encoder, tokenizer, raw) -> str:
    encoded = encoder.encode(raw, SPEC)
    return tokenizer.decode(encoded.labels[encoded.labels != -100])


# --- the files of hostile cases

CASES = {
    "placeholder_count_mismatch.jsonl": {
        "g0": 1,
        "m1_3ph_2img": "placeholder_mismatch",
        "m2_1ph_2img": "placeholder_mismatch",
        "m3_0ph_1img_list": 1,
        "m4_0ph_1img_string": 1,
        "m5_0ph_2img": 2,
        "m6_ph_no_image_key": "placeholder_mismatch",
        "m7_ph_empty_list": "placeholder_mismatch",
        "m8_ph_empty_string": "placeholder_mismatch",
        "m9_ph_null": "placeholder_mismatch",
        "m10_ph_in_second_turn": 2,
        "m11_same_image_twice": 2,
        "g1": 1,
    },
    "literal_placeholder_in_text.jsonl": {
        "l1_in_answer": 1,
        "l2_text_only": 0,
        "l3_quoted_in_question_plus_real": "placeholder_mismatch",
        "g0": 1,
    },
    "conversation_shapes.jsonl": {
        "c1_starts_gpt": 1,
        "c2_two_humans": 1,
        "c3_no_answer": "no_trained_token",
        "c4_empty_answer": "no_trained_token",
        "c5_null_answer": "turn_value_not_text",
        "c6_number_answer": 1,
        "c7_openai_keys": 1,
        "c8_mixed_keys": 1,
        "c9_empty_conversations": "no_conversation",
        "c10_no_conversations": "no_conversation",
        "c11_system_first": 1,
        "c12_unknown_role": "unknown_role",
        "c13_whitespace_turns": 1,
        "c14_one_char": 0,
        "g0": 1,
    },
    "image_field_shapes.jsonl": {
        "s1_string": 1,
        "s2_list1": 1,
        "s3_dict": 1,
        "s4_images_key": 1,
        "s5_list_with_null": "image_field",
        "s6_int": "image_field",
    },
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_of_the_hostile_cases_has_its_verdict(encoder, shared_dir, name):
    found = {own_id: verdict(encoder, raw) for own_id, raw in case_samples(shared_dir, name).items()}
    assert found == CASES[name]


def test_stale_and_impossible_sizes_in_a_record_change_nothing(encoder, shared_dir):
    rows = case_samples(shared_dir, "wrong_width_height.jsonl")
    tiles = {own_id: encoder.encode(raw, SPEC).record.num_tiles for own_id, raw in rows.items()}
    assert tiles == dict.fromkeys(rows, 4)  # 3 x 1 (the rotated one 1 x 3) and the thumbnail
    rotated = encoder.encode(rows["w6_exif_rotated"], SPEC).images[0]
    assert (rotated.size, rotated.grid.columns, rotated.grid.rows) == ((300, 900), 1, 3)


def test_images_bind_in_order_and_the_same_one_twice(encoder, tokenizer, shared_dir):
    rows = case_samples(shared_dir, "placeholder_count_mismatch.jsonl")
    assert "user\n[1]\nFirst?<|im_end|>" in shown(encoder, tokenizer, rows["m10_ph_in_second_turn"])
    assert "user\n[4]\nSecond?<|im_end|>" in shown(encoder, tokenizer, rows["m10_ph_in_second_turn"])
    assert "user\n[1] and [1]<|im_end|>" in shown(encoder, tokenizer, rows["m11_same_image_twice"])
    assert "user\n[1]\n[4]\nDescribe.<|im_end|>" in shown(encoder, tokenizer, rows["m5_0ph_2img"])


def test_the_tag_as_a_word_is_left_alone(encoder, tokenizer, shared_dir):
    rows = case_samples(shared_dir, "literal_placeholder_in_text.jsonl")
    assert trained(encoder, tokenizer, rows["l1_in_answer"]) == "Write an <image> element, like <image>.<|im_end|>"
    assert "What does the tag <image> mean?<|im_end|>" in shown(encoder, tokenizer, rows["l2_text_only"])


# --- placeholders


@pytest.mark.parametrize(
    "text, images, expected",
    [
        ("q", ONE, "[1]\nq"),
        ("q", TWO, "[1]\n[4]\nq"),
        ("", ONE, "[1]\n"),
        ("<image>\nq", ONE, "[1]\nq"),
        ("<image>q", ONE, "[1]q"),
        ("q <image>", ONE, "q [1]"),
        ("q\n<image>\n", ONE, "q\n[1]\n"),
        ("<image><image>q", TWO, "[1][4]q"),
        ("Image-1: <image>\nImage-2: <image>\nq", TWO, "Image-1: [1]\nImage-2: [4]\nq"),
        ("What is the tag <image> here?", ONE, "What is the tag [1] here?"),
        ("a <image> tag", {}, "a <image> tag"),
        ("use <image><image> twice", {}, "use <image><image> twice"),
        ("q <Image> < image >", {}, "q <Image> < image >"),
    ],
)
def test_where_images_go_in_a_question(encoder, tokenizer, text, images, expected):
    raw = raw_sample([("human", text), ("gpt", "a")], images)
    assert shown(encoder, tokenizer, raw).startswith(f"<|im_start|>user\n{expected}<|im_end|>")


@pytest.mark.parametrize(
    "text, images",
    [
        ("<image>\nq", {}),
        ("  <image> q", {}),
        ("q <image>", {}),
        ("q <image> \nr", {}),
        ("q\n<image>\nr", {}),
        ("Image-1: <image>\nq", {}),
        ("<image><image>\nq", ONE),
        ("<image>\nwhy '<image>'?", ONE),
        ("<image>\nq", TWO),
    ],
)
def test_miscounted_placeholders_reject_the_sample(encoder, text, images):
    assert verdict(encoder, raw_sample([("human", text), ("gpt", "a")], images)) == "placeholder_mismatch"


def test_images_without_placeholder_go_to_the_first_human_turn(encoder, tokenizer):
    raw = raw_sample([("system", "s"), ("gpt", "hello"), ("human", "q"), ("human", "r"), ("gpt", "a <image>")], TWO)
    assert "<|im_start|>user\n[1]\n[4]\nq<|im_end|>\n<|im_start|>user\nr<|im_end|>" in shown(encoder, tokenizer, raw)


def test_images_without_a_human_turn_reject_the_sample(encoder):
    assert verdict(encoder, raw_sample([("gpt", "a")], ONE)) == "placeholder_mismatch"


def test_placeholders_of_system_turns_and_answers_are_text(encoder, tokenizer):
    raw = raw_sample([("system", "<image>\n"), ("human", "q"), ("gpt", "<image>\nx")])
    assert verdict(encoder, raw) == 0
    assert trained(encoder, tokenizer, raw) == "<image>\nx<|im_end|>"


@pytest.mark.parametrize("system", ["<image>\nBe brief.", "Be brief.\n<image>", "<image>"])
@pytest.mark.parametrize("question", ["q", "<image>\nq"])
def test_an_image_in_the_system_turn_is_not_put_elsewhere(encoder, system, question):
    assert verdict(encoder, raw_sample([("system", system), ("human", question), ("gpt", "a")], ONE)) == (
        "placeholder_mismatch"
    )
    inline = raw_sample([("system", "Where an <image> is shown, tell."), ("human", question), ("gpt", "a")], ONE)
    assert verdict(encoder, inline) == 1


# --- conversations


def test_an_empty_answer_is_context_not_a_lesson_in_silence(encoder, tokenizer):
    raw = raw_sample([("human", "q"), ("gpt", " \n"), ("human", "r"), ("gpt", "b")])
    assert trained(encoder, tokenizer, raw) == "b<|im_end|>"


def test_texts_are_taken_as_they_are(encoder, tokenizer):
    raw = raw_sample([("human", " \n\n q \n"), ("gpt", "  a\n\n"), ("human", "\n"), ("gpt", "b")])
    text = shown(encoder, tokenizer, raw)
    assert text == (
        "<|im_start|>user\n \n\n q \n<|im_end|>\n<|im_start|>assistant\n  a\n\n<|im_end|>\n"
        "<|im_start|>user\n\n<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )
    assert trained(encoder, tokenizer, raw) == "  a\n\n<|im_end|>b<|im_end|>"


def test_openai_names_mean_the_same(encoder):
    plain = raw_sample([("human", "q"), ("gpt", "a")])
    other = raw_sample([{"role": "user", "content": "q"}, {"from": "assistant", "content": "a"}])
    ids = [encoder.encode(raw, SPEC).input_ids for raw in (plain, other)]
    assert np.array_equal(*ids)


@pytest.mark.parametrize("value, text", [(4, "4"), (-0.5, "-0.5"), (0, "0")])
def test_numbers_are_text_without_quotes(encoder, tokenizer, value, text):
    raw = raw_sample([("human", "How many?"), ("gpt", value)])
    assert trained(encoder, tokenizer, raw) == f"{text}<|im_end|>"


@pytest.mark.parametrize(
    "conversation, reason",
    [
        (None, "no_conversation"),
        ([], "no_conversation"),
        ("text", "no_conversation"),
        ({"from": "human", "value": "q"}, "no_conversation"),
        (["q", "a"], "turn_not_object"),
        ([None], "turn_not_object"),
        ([{"value": "q"}], "unknown_role"),
        ([{"from": None, "value": "q"}], "unknown_role"),
        ([{"from": ["human"], "value": "q"}], "unknown_role"),
        ([("Human", "q"), ("gpt", "a")], "unknown_role"),
        ([{"from": "human"}, {"from": "gpt", "value": "a"}], "turn_value_not_text"),
        ([("human", None), ("gpt", "a")], "turn_value_not_text"),
        ([("human", "q"), ("gpt", True)], "turn_value_not_text"),
        ([("human", "q"), ("gpt", float("nan"))], "turn_value_not_text"),
        ([("human", "q"), ("gpt", {"text": "a"})], "turn_value_not_text"),
        ([("human", "q"), ("system", "s"), ("gpt", "a")], "system_turn_not_first"),
        ([("system", "s"), ("system", "s"), ("human", "q"), ("gpt", "a")], "system_turn_not_first"),
        ([("system", "s")], "no_trained_token"),
        ([("human", "q")], "no_trained_token"),
        ([("human", "q"), ("gpt", "\n\t ")], "no_trained_token"),
    ],
)
def test_conversations_that_cannot_be_trained_on(encoder, conversation, reason):
    assert verdict(encoder, raw_sample(conversation)) == reason


# --- the image field


@pytest.mark.parametrize(
    "names, count", [(None, 0), ("", 0), ([], 0), ("a.jpg", 1), (["a.jpg"], 1), (["a.jpg", "a.jpg"], 2)]
)
def test_image_fields(encoder, names, count):
    raw = raw_sample([("human", "q"), ("gpt", "a")], ONE)
    raw.data["image"] = names
    assert verdict(encoder, raw) == count


@pytest.mark.parametrize("names", [7, 0, True, {}, {"path": "a.jpg"}, [None], ["a.jpg", ""], [["a.jpg"]], [1]])
def test_other_shapes_of_the_image_field_reject_the_sample(encoder, names):
    raw = raw_sample([("human", "q"), ("gpt", "a")], ONE)
    raw.data["image"] = names
    assert verdict(encoder, raw) == "image_field"


def test_an_image_that_is_not_there_rejects_the_sample(encoder):
    raw = raw_sample([("human", "q"), ("gpt", "a")], image="missing.jpg")
    assert verdict(encoder, raw) == "image_missing"
