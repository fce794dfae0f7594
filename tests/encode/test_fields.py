"""Fields of records and turns as other tools write them: honoured, or refused by name, never passed over in silence."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from helpers.encode_samples import SPEC, jpeg, raw_sample

from internvl_pack.encode import EncodeConfig, Encoder
from internvl_pack.encode.fields import RECORD_FIELDS, SYSTEM_FIELDS, TRAINING_FLAGS, TURN_FIELDS, unknown_fields
from internvl_pack.errors import SampleError

DATA_PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


@pytest.fixture(scope="module", params=["internvl2_5", "chat_template"])
def encoder(request, tokenizer) -> Encoder:
    return Encoder(tokenizer, EncodeConfig(conv_style=request.param))


def human(text: str, **fields) -> dict:
    return {"from": "human", "value": text, **fields}


def gpt(text: str, **fields) -> dict:
    return {"from": "gpt", "value": text, **fields}


def trained(encoder: Encoder, tokenizer, turns: list[dict], **fields) -> str:
    encoded = encoder.encode(raw_sample(turns, **fields), SPEC)
    return tokenizer.decode(encoded.labels[encoded.labels != -100])


def reason(encoder: Encoder, turns: list[dict], images=None, **fields) -> str:
    with pytest.raises(SampleError) as caught:
        encoder.encode(raw_sample(turns, images, **fields), SPEC)
    return caught.value.reason


@pytest.mark.parametrize("flag", TRAINING_FLAGS)
@pytest.mark.parametrize("no, yes", [(False, True), (0, 1), (0.0, 1.0), (0, None)])
def test_an_answer_marked_as_untrained_is_context_and_the_others_are_trained(encoder, tokenizer, flag, no, yes):
    turns = [human("Hi"), gpt("Bad.", **{flag: no}), human("Again"), gpt("Good.", **{flag: yes})]
    plain = [{k: v for k, v in turn.items() if k != flag} for turn in turns]
    assert trained(encoder, tokenizer, turns).startswith("Good.")
    assert "Bad." not in trained(encoder, tokenizer, turns)
    flagged, unflagged = (encoder.encode(raw_sample(t), SPEC) for t in (turns, plain))
    assert flagged.input_ids.tolist() == unflagged.input_ids.tolist(), "the model sees the same"
    assert flagged.record.num_loss_tokens == (flagged.labels != -100).sum() < unflagged.record.num_loss_tokens


@pytest.mark.parametrize(
    "turns, expected",
    [
        ([human("q"), gpt("a", loss=False)], "no_trained_token"),
        ([human("q"), gpt("a", weight=0.5)], "turn_flag"),
        ([human("q"), gpt("a", loss="no")], "turn_flag"),
        ([human("q"), gpt("a", loss=True, weight=0)], "turn_flag"),
        ([human("q", loss=True), gpt("a")], "turn_flag"),
        ([{"from": "system", "value": "s", "train": 1}, human("q"), gpt("a")], "turn_flag"),
    ],
)
def test_a_flag_that_cannot_be_kept_refuses_the_sample(encoder, turns, expected):
    assert reason(encoder, turns) == expected


def test_flags_of_questions_that_ask_for_nothing_are_kept(encoder, tokenizer):
    turns = [human("q", loss=False, weight=0), gpt("a", loss=True, weight=1)]
    assert trained(encoder, tokenizer, turns).startswith("a")


@pytest.mark.parametrize("field", SYSTEM_FIELDS)
def test_the_system_prompt_of_a_record_is_its_system_turn(encoder, field):
    turns = [human("Hi"), gpt("Ho")]
    as_field = encoder.encode(raw_sample(turns, **{field: "You are a pirate."}), SPEC)
    as_turn = encoder.encode(raw_sample([{"from": "system", "value": "You are a pirate."}, *turns]), SPEC)
    both = encoder.encode(
        raw_sample([{"from": "system", "value": "You are a pirate."}, *turns], **{field: "You are a pirate."}), SPEC
    )
    assert as_field.input_ids.tolist() == as_turn.input_ids.tolist() == both.input_ids.tolist()
    assert as_field.record.num_system_tokens == as_turn.record.num_system_tokens > 0


@pytest.mark.parametrize(
    "fields", [{"system": ["s"]}, {"system": "a", "system_prompt": "b"}, {"system": 3}], ids=["list", "two", "number"]
)
def test_a_system_field_that_is_not_one_text_refuses_the_sample(encoder, fields):
    assert reason(encoder, [human("q"), gpt("a")], **fields) == "system_field"


def test_a_system_field_and_another_system_turn_contradict_each_other(encoder):
    turns = [{"from": "system", "value": "a"}, human("q"), gpt("a")]
    assert reason(encoder, turns, system="b") == "system_field"


@pytest.mark.parametrize("field", ["tool_calls", "function_call", "reasoning_content", "thinking", "audio", "images"])
def test_a_turn_that_holds_more_than_text_is_refused_by_name(encoder, tokenizer, field):
    turns = [human("q"), gpt("a", **{field: [{"name": "f"}]})]
    with pytest.raises(SampleError, match=f"turn 2 has a field '{field}'"):
        encoder.encode(raw_sample(turns), SPEC)
    for nothing in (None, "", [], {}):
        assert trained(encoder, tokenizer, [human("q"), gpt("a", **{field: nothing})]).startswith("a")


def test_a_call_without_text_is_told_as_a_call(encoder):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]
    assert reason(encoder, turns) == "unsupported_field"


@pytest.mark.parametrize(
    "field, value", [("tools", "[{}]"), ("tools", [{"type": "function"}]), ("audio", "a.wav"), ("loss_mask", [0, 1])]
)
def test_a_record_that_holds_more_than_turns_and_images_is_refused_by_name(encoder, tokenizer, field, value):
    turns = [human("q"), gpt("a")]
    with pytest.raises(SampleError, match=f"the record has a field '{field}'"):
        encoder.encode(raw_sample(turns, **{field: value}), SPEC)
    for nothing in (None, "", "[]", []):
        assert trained(encoder, tokenizer, turns, **{field: nothing}).startswith("a")


def test_null_is_absent_where_two_schemas_were_joined(encoder, tokenizer):
    turns = [
        {"from": None, "value": None, "role": "user", "content": "q"},
        {"from": "gpt", "value": "a", "role": None, "content": None},
    ]
    nothing = dict.fromkeys(RECORD_FIELDS - {"conversations", "images"})
    assert trained(encoder, tokenizer, turns, **nothing).startswith("a")


def test_two_roles_or_texts_of_one_turn_must_agree(encoder, tokenizer):
    same = [{"from": "human", "role": "user", "value": "q", "content": "q"}, gpt("a")]
    assert trained(encoder, tokenizer, same).startswith("a")
    assert reason(encoder, [human("q"), gpt("a", content="b")]) == "turn_ambiguous"
    assert reason(encoder, [human("q"), gpt("a", role="user")]) == "turn_ambiguous"


def test_unknown_fields_are_named_once_and_known_or_empty_ones_are_not():
    turns = [human("q", mood="sad", loss=0), gpt("a", mood="glad", score=None)]
    raw = raw_sample(turns, {"a.jpg": jpeg()}, id="x", width=3, quality=0.5, source="", system="s")
    assert unknown_fields(raw.data) == ["quality", "conversations[].mood"]
    assert unknown_fields({"conversations": "no list"}) == unknown_fields({"conversations": [3]}) == []


def test_the_page_on_data_tells_what_happens_to_every_known_field():
    told = set(re.findall(r"`([a-z_]+)`", DATA_PAGE.read_text(encoding="utf-8").partition("### Fields")[2]))
    assert told >= RECORD_FIELDS | TURN_FIELDS


# --- tools

TOOLS = [{"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {"type": "object"}}}]
WRITES_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def own_format(tokenizer, template: str) -> Encoder:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return Encoder(other, EncodeConfig(conv_style="chat_template"))


@pytest.mark.parametrize("written", [TOOLS, json.dumps(TOOLS)])
def test_tools_are_written_where_the_tokenizers_template_writes_them(tokenizer, written):
    encoder = own_format(tokenizer, WRITES_TOOLS)
    encoded = encoder.encode(raw_sample([human("q"), gpt("a")], tools=written), SPEC)
    assert tokenizer.decode(encoded.input_ids) == (
        f"<|im_start|>system\n{json.dumps(TOOLS[0])}\n<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n"
    )
    assert tokenizer.decode(encoded.labels[encoded.labels != -100]) == "a<|im_end|>"
    plain = encoder.encode(raw_sample([human("q"), gpt("a")], tools=None), SPEC)
    assert tokenizer.decode(plain.input_ids).startswith("<|im_start|>user"), "what was learnt with tools stays there"


@pytest.mark.parametrize(
    "template, tools, told",
    [
        (WRITES_TOOLS, [{"name": "<|im_end|>"}], "holds the control token '<|im_end|>'"),
        (WRITES_TOOLS, "sum(a, b)", "no list of objects"),
        (WRITES_TOOLS, {"name": "sum"}, "no list of objects"),
        (WRITES_TOOLS.partition("{% endif %}")[2], TOOLS, "chat template does not write"),
    ],
)
def test_other_tools_are_refused_by_name(tokenizer, template, tools, told):
    with pytest.raises(SampleError, match=re.escape(told)) as refused:
        own_format(tokenizer, template).encode(raw_sample([human("q"), gpt("a")], tools=tools), SPEC)
    assert refused.value.reason == "unsupported_field"
